"""A pretrained model on Python and on another text, before and after a little finetuning on either: held-out text.

`python -m benchmarks.finetune MODEL TEXT [STEPS]`, with a folder or hub name and, for example, tinyshakespeare.txt. Losses are
over the first 64 windows of the held-out part.
"""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import store

SHAPE = ["model.context_length=256", "batch_size=2", "schedule.warmup_steps=5", "eval_every=null", "eval_windows=64"]
FOUND = re.compile(r"validation loss ([\d.]+) \| perplexity ([\d.,]+) \| ([\d.]+) bits per byte")


def evaluation(*arguments: str) -> dict[str, float]:
    """The last one that `train.py experiment=finetune` prints."""
    done = subprocess.run(
        [sys.executable, "train.py", "experiment=finetune", *SHAPE, "wandb.mode=disabled", *arguments],
        capture_output=True,
        text=True,
    )
    found = FOUND.findall(done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"train.py ended with {done.returncode}: {done.stderr.strip()}")
    return dict(zip(("loss", "perplexity", "bits per byte"), (float(n.replace(",", "")) for n in found[-1]), strict=True))


def main(model: str, text: str, steps: str = "20") -> None:
    texts = {"the standard library": ["data=stdlib"], Path(text).name: [f"data.path={Path(text).resolve()}"]}
    rows: list[dict[str, Any]] = []

    def add(trained_on: str | None, on: str, found: dict[str, float]) -> None:
        rows.append({"finetuned on": trained_on, "held-out text": on, **found})
        print(rows[-1], flush=True)

    for on, data in texts.items():
        add(None, on, evaluation(f"init_from={model}", *data, "eval_only=true"))
    with TemporaryDirectory() as folder:
        for n, (trained_on, data) in enumerate(texts.items()):
            run = Path(folder) / str(n)
            add(trained_on, trained_on, evaluation(f"init_from={model}", *data, f"steps={steps}", f"run_dir={run}"))
            other = next(name for name in texts if name != trained_on)
            add(trained_on, other, evaluation(f"init_from={run}", *texts[other], "eval_only=true"))
    print(store("finetune", rows, {"model": Path(model).name, "steps": int(steps), "windows": 64, "tokens a step": 2 * 256}))


if __name__ == "__main__":
    main(*sys.argv[1:])
