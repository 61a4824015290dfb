"""What sample.py is made of: prompts to text, and two ways of looking at the model while it writes."""

from sampling.text import Written, complete, write

__all__ = ["Written", "complete", "write"]
