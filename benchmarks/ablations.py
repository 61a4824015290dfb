"""What each part of `experiment=shakespeare_cpu` gives: the recipe without it, over three seeds.

`python -m benchmarks.ablations TEXT [STEPS [WORKERS]]`: 500 steps, a quarter of the recipe, take 20 minutes on two cores. Losses
are over the whole last tenth of the text.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.harness import store, trained

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


def main(text: str, steps: str = "500", workers: str = "1") -> None:
    recipe = ("experiment=shakespeare_cpu", f"data.path={Path(text).resolve()}", f"steps={steps}")
    with ThreadPoolExecutor(int(workers)) as pool:
        runs = {name: [pool.submit(trained, *recipe, f"seed={seed}", *more) for seed in SEEDS] for name, more in VARIANTS.items()}
        rows = []
        for name, three in runs.items():
            losses = [run.result() for run in three]
            rows.append({"variant": name, "overrides": VARIANTS[name], "losses": losses, "median": median(losses)})
            print(rows[-1], flush=True)
    print(store("ablations", rows, {"steps": int(steps)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
