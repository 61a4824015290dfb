"""Side-by-side measurements. `python -m benchmarks` runs them all; each writes benchmarks/results/<name>.json."""
