"""What `dry_run=true` foretells, and what the run then takes: `python -m benchmarks.plan`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import store

MODELS = {
    "default": ["steps=100", "eval_every=50"],
    "6 x 256, context 512, vocabulary 257": [
        *("steps=60", "eval_every=30", "eval_windows=32", "tokenizer=bytes", "batch_size=8", "micro_batch_size=4"),
        *("model.n_layers=6", "model.d_model=256", "model.context_length=512"),
    ],
}


def output(*arguments: str) -> str:
    command = [sys.executable, "train.py", "wandb.mode=offline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def seconds(clock: str) -> int:
    """Of h:mm:ss or m:ss."""
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return total


def main() -> None:
    rows = []
    for model, settings in MODELS.items():
        with TemporaryDirectory() as folder:
            told = output("dry_run=true", *settings)
            ran = output(f"run_dir={folder}/run", *settings)
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        memory = max(json.loads(line).get("time/memory_gib", 0) for line in lines) * 2**30
        clock, shares = re.findall(r"([\d:]+) in all: (.*)", ran)[-1]
        working = sum(float(share) for share in re.findall(r"(?:training|evaluation) ([\d.]+)%", shares)) / 100
        planned = {
            "bytes": float(re.findall(r"measured +([\d,.]+) MiB", told)[0].replace(",", "")) * 2**20,
            "seconds": seconds(re.findall(r"time +([\d:]+):", told)[0]),
        }
        rows.append(
            {"model": model, "planned": planned, "measured": {"bytes": memory, "seconds": round(seconds(clock) * working, 1)}}
        )
        print(rows[-1], flush=True)
    print(store("plan", rows))


if __name__ == "__main__":
    main()
