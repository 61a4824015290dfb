"""What sample.py is made of: prompts to text, and two ways of looking at the model while it writes."""
