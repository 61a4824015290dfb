"""Runs for tests: a model that trains in milliseconds, `python train.py ...` in this process, and what a run left behind."""

import io
import json
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose as compose_with_hydra
from hydra import initialize_config_dir

import train
import weights
from configs import compose
from configs.schema import TrainConfig
from training.ranks import Ranks
from weights import checkpoint

TINY = [
    "model.context_length=16",
    "model.d_model=32",
    "model.n_heads=2",
    "model.n_layers=2",
    "tokenizer=bytes",
    "optimizer=adamw",
    "schedule=cosine",
    "batch_size=4",
    "steps=6",
    "schedule.warmup_steps=2",
    "eval_windows=3",
    "log_every=1",
    "dtype=float32",
    "device=cpu",
    "wandb.mode=disabled",
]


@dataclass
class Command:
    status: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.strip().splitlines()[-1]


def command(*arguments: str) -> Command:
    """`python train.py ...`, in this process."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["train.py", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            train.main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
            err.write(f"{ended.code}\n" if isinstance(ended.code, str) else "")
    return Command(status, out.getvalue(), err.getvalue())


def configured(*arguments: str) -> TrainConfig:
    """What `python train.py ...` hands to `train`."""
    with initialize_config_dir(str(Path(train.__file__).parent / "configs"), version_base=None):
        composed = compose_with_hydra("train", list(arguments))
    return compose.to_config(compose.Job(composed, arguments), weights.model_config, weights.tokenizer)


def write_text(folder: Path, words: int = 3000) -> Path:
    """Some text that can be learned a little."""
    path = folder / "text.txt"
    draw = random.Random(0)
    path.write_text(" ".join(draw.choice(["one", "two", "three", "four", "five", "\n"]) for _ in range(words)))
    return path


def tiny(folder: Path, *overrides: str) -> list[str]:
    """Arguments of a tiny run on the text of `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    arguments = [*TINY, f"data.path={text}", f"data.cache_dir={folder / 'cache'}", *overrides]
    return list({argument.split("=")[0]: argument for argument in arguments}.values())  # the last one of a key counts


def finished(*arguments: str) -> Command:
    done = command(*arguments)
    assert done.status == 0, done.err
    return done


def trained(config: TrainConfig) -> None:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert train.train(config, Ranks()).status == 0


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what depends on the machine's mood."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state(run: Path) -> dict[str, Any]:
    """All that is in a run's (or a checkpoint's) latest checkpoint, flat: name -> tensor or value."""
    folder = checkpoint.find(run)
    trainer = checkpoint.read_trainer(folder)
    found = {f"model {name}": w for name, w in checkpoint.read_weights(folder / "model.safetensors").items()}
    for name, parts in trainer["optimizer"].items():
        found |= {f"optimizer {name} {key}": value for key, value in parts.items()}
    return found | {f"progress {key}": value for key, value in trainer["progress"].items() if key != "wandb_id"}


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names whose values are not the same, to the bit."""
    same = {
        name: torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name]
        for name in a.keys() & b.keys()
    }
    return sorted({name for name, equal in same.items() if not equal} | (a.keys() ^ b.keys()))
