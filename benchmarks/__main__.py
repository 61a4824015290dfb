"""Run every benchmark that needs nothing but this machine; the others say in their first lines what they want."""

import runpy

NAMES = ["train_step", "decode", "context_growth", "cold_start", "tokenize_speed", "growth", "ranks", "recompute", "plan"]
NAMES += ["scaling_law", "row_products"]

for name in NAMES:
    print(f"== {name}", flush=True)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
