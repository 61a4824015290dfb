"""What each part of `experiment=shakespeare_cpu` gives: the recipe without it, over three seeds.

`python -m benchmarks.ablations TEXT [STEPS [WORKERS]]`: 500 steps, a quarter of the recipe, take 20 minutes on two cores. Losses
are over the whole last tenth of the text.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.harness import store

SEEDS = (0, 1, 2)
VARIANTS = {
    "the recipe": [],
    "AdamW for Muon": ["optimizer=adamw"],
    "GELU for ReLU^2": ["model.mlp=gelu"],
    "SwiGLU for ReLU^2, equal parameters": ["model.mlp=swiglu"],
    "learned positions for RoPE": ["model.position=learned"],
    "no QK-norm": ["model.qk_norm=false"],
    "output projections start random": ["model.zero_init=false"],
    "cosine to a tenth for the linear cool-down": ["schedule=cosine"],
    "AdamW, GELU, learned, cosine, none of the rest": [
        *("optimizer=adamw", "model.mlp=gelu", "model.position=learned", "model.qk_norm=false", "model.zero_init=false"),
        "schedule=cosine",
    ],
}


def loss(text: Path, steps: str, overrides: list[str], seed: int) -> float:
    with TemporaryDirectory() as folder:
        settings = [
            f"data.path={text}",
            f"seed={seed}",
            f"steps={steps}",
            f"run_dir={folder}/run",
            "wandb.mode=disabled",
            "eval_every=null",
        ]
        command = [sys.executable, "train.py", "experiment=shakespeare_cpu", *settings, *overrides]
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"validation loss ([\d.]+)", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr.strip()}")
    return float(found[-1])


def main(text: str, steps: str = "500", workers: str = "1") -> None:
    path = Path(text).resolve()
    with ThreadPoolExecutor(int(workers)) as pool:
        runs = {name: [pool.submit(loss, path, steps, more, seed) for seed in SEEDS] for name, more in VARIANTS.items()}
        rows = []
        for name, three in runs.items():
            losses = [run.result() for run in three]
            rows.append({"variant": name, "overrides": VARIANTS[name], "losses": losses, "median": median(losses)})
            print(rows[-1], flush=True)
    print(store("ablations", rows, {"steps": int(steps)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
