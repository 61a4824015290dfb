"""A run: where it stands, the folder it lives in, and how it is asked to stop."""

import fcntl
import json
import math
import os
import shutil
import signal
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from torch import nn

from data.tokenizer import Tokenizer
from model import ModelConfig
from weights import checkpoint


@dataclass
class Progress:
    """Everything about where a run stands that is not a weight or the optimizer's: step n means that n updates are done."""

    step: int = 0
    position: int = 0  # sequences consumed: the order of the data is a function of this and the seed
    best_loss: float = math.inf
    best_step: int = -1
    wandb_id: str | None = None

    def advance(self, sequences: int) -> None:
        self.step += 1
        self.position += sequences

    def due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def improved(self, loss: float) -> bool:
        if not loss < self.best_loss:  # a NaN is never the best
            return False
        self.best_loss, self.best_step = loss, self.step
        return True


class RunFolder:
    """config.yaml, metrics.jsonl, checkpoints/, loss.png: one run's folder, owned by one live process at a time."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.lock: TextIO | None = None

    @classmethod
    def create(cls, path: str | None, overwrite: bool) -> "RunFolder":
        """A new folder, or an existing empty one. An earlier run is never touched unless `overwrite` says so."""
        folder = cls(Path(path) if path else dated())
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.own()
        except (NotADirectoryError, FileExistsError):
            raise ValueError(f"run_dir={path} is not a folder: choose another run_dir") from None
        except OSError as error:
            raise ValueError(
                f"run_dir={folder.path} cannot be written ({error.strerror}): choose another run_dir"
            ) from None
        earlier = [entry for entry in folder.path.iterdir() if entry.name != ".lock"]
        if earlier and not overwrite:
            raise ValueError(
                f"run_dir={folder.path} is not empty: resume={folder.path} continues the run in it, overwrite=true replaces it"
            )
        for entry in earlier:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        folder = cls(path)
        folder.own()
        for leftover in folder.checkpoints.glob("*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        return folder

    def own(self) -> None:
        """The lock goes with the process, however it ends."""
        self.lock = open(self.path / ".lock", "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path} belongs to a run that is alive: wait for it, stop it, or choose another run_dir"
            ) from None

    def cut_metrics(self, step: int) -> None:
        """Drop the rows after `step`, and a line that was cut short: the run is about to write them again."""
        if not self.metrics.exists():
            return
        kept = [line for line in self.metrics.read_text().splitlines() if 0 <= row_step(line) <= step]
        temporary = self.metrics.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self.metrics)

    def append_metrics(self, row: dict[str, Any]) -> None:
        with open(self.metrics, "a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()] if self.metrics.exists() else []

    def save(
        self,
        progress: Progress,
        model_config: ModelConfig,
        state: dict[str, Any],
        tokenizer: Tokenizer,
        about: dict[str, Any],
        keep: int,
    ) -> None:
        """A checkpoint of this step; `latest` (and `best`) point to it afterwards; all but the last `keep` and the best go."""
        folder = self.checkpoints / f"step-{progress.step:08d}"
        trainer = {"progress": asdict(progress), **{key: value for key, value in state.items() if key != "model"}}
        checkpoint.save(folder, model_config, state["model"], tokenizer, trainer, about)
        checkpoint.point(self.checkpoints / "latest", folder)
        if progress.best_step == progress.step:
            checkpoint.point(self.checkpoints / "best", folder)
        protected = {(self.checkpoints / name).resolve() for name in ("latest", "best")}
        for old in checkpoint.steps(self.checkpoints)[:-keep]:
            if old.resolve() not in protected:
                shutil.rmtree(old)


def row_step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def dated() -> Path:
    """runs/<date-time>, with a number behind it when a run of this second exists."""
    stem = Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path, n = stem, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            n += 1
            path = stem.with_name(f"{stem.name}-{n}")


class StopRequest:
    """SIGINT or SIGTERM: finish the step, save, leave. A second SIGINT: leave at once (checkpoints are complete or absent)."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            os._exit(128 + number)
        self.signal = number

    @property
    def requested(self) -> bool:
        return self.signal is not None


def named_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Optimizer state by weight name, so that it does not depend on the order of the groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: dict(state) for p, state in optimizer.state.items()}


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, dict[str, Any]]
) -> None:
    for name, p in model.named_parameters():
        if name in saved:
            optimizer.state[p] = {
                key: value.to(p.device) if torch.is_tensor(value) and key != "step" else value
                for key, value in saved[name].items()
            }
