"""Run every benchmark that needs nothing but this machine."""

import runpy
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in ("__init__", "__main__", "harness"):
        print(f"== {path.stem}", flush=True)
        runpy.run_module(f"benchmarks.{path.stem}", run_name="__main__")
