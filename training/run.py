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
from types import FrameType, TracebackType
from typing import Any, TextIO

import torch
from torch import nn

from data.tokenizer import Tokenizer
from model import ModelConfig
from training.ranks import Ranks, part_like
from weights import checkpoint

UNBEGUN = {".lock", "wandb", "config.yaml.tmp"}  # all that a run killed before its first step can leave


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
    """One run's folder: config.yaml, metrics.jsonl, checkpoints/, loss.png, wandb/. One process owns it, until the `with` ends.

    Until `begin`, nothing that was there is touched, and what was not there goes away again if something fails.
    """

    def __init__(self, path: Path, made: bool = False):
        self.path, self.made = path, made
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.lock: TextIO | None = None

    @classmethod
    def create(cls, path: str | None, overwrite: bool) -> "RunFolder":
        """A new folder, or an existing empty one. An earlier run is never touched unless `overwrite` says so."""
        try:
            folder = cls(Path(path) if path else dated())
            folder.made = not folder.path.is_dir() or not path
            folder.path.mkdir(parents=True, exist_ok=True)
            earlier = {entry.name for entry in folder.path.iterdir()} - UNBEGUN
        except OSError as error:
            where = path or "runs"
            raise ValueError(f"run_dir={where} cannot be made ({error.strerror}): choose another run_dir") from None
        is_run = folder.config.exists()
        if earlier and not (overwrite and is_run):
            remedy = f"resume={folder.path} continues the run in it, overwrite=true replaces it"
            raise ValueError(f"run_dir={folder.path} is not empty: {remedy if is_run else 'choose another run_dir'}")
        return folder.own()

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        return cls(path).own()

    def own(self) -> "RunFolder":
        """The lock goes with the process, however it ends."""
        try:
            self.lock = (self.path / ".lock").open("a")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path} belongs to a run that is alive: wait for it, stop it, or choose another run_dir"
            ) from None
        except OSError as error:
            raise ValueError(f"{self.path} cannot be written ({error.strerror}): choose another run_dir") from None
        return self

    def begin(self, config: str, progress: Progress, start: Path | None) -> None:
        """Bring the folder to the state it had at `progress`: of an earlier run that is replaced, or of steps that were lost or
        given up, nothing stays that the run is about to write again."""
        if progress.step == 0:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            for path in (self.metrics, self.path / "loss.png"):
                path.unlink(missing_ok=True)
        for leftover in self.checkpoints.glob("*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        if self.metrics.exists():  # a line that was cut short goes, too
            kept = [line for line in self.metrics.read_text().splitlines() if 0 <= row_step(line) <= progress.step]
            checkpoint.write_text(self.metrics, "".join(line + "\n" for line in kept))
        if start is not None:
            checkpoint.point(self.checkpoints / "latest", start.resolve())
            best = self.checkpoints / f"step-{progress.best_step:08d}"
            if best.exists():
                checkpoint.point(self.checkpoints / "best", best)
        checkpoint.write_text(self.config, config)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.config.exists():  # never begun
            shutil.rmtree(self.path / "wandb", ignore_errors=True)
            (self.path / ".lock").unlink()
            if self.made:
                self.path.rmdir()
        assert self.lock is not None
        self.lock.close()

    def append_metrics(self, row: dict[str, Any]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}  # JSON has no NaN
        with checkpoint.writing(self.metrics), open(self.metrics, "a") as file:
            file.write(json.dumps(finite) + "\n")

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
        """A checkpoint of this step, to which `latest` (and `best`) then point. Older ones go, but for `keep` and the best."""
        folder, best = self.checkpoints / f"step-{progress.step:08d}", self.checkpoints / "best"
        if best.resolve() == folder.resolve():  # left by steps that were given up, about to be replaced
            best.unlink(missing_ok=True)
        if self.metrics.exists():
            checkpoint.sync(self.metrics)  # the rows up to a checkpoint are on disk before it is
        trainer = {"progress": asdict(progress), **{key: value for key, value in state.items() if key != "model"}}
        best_loss = progress.best_loss if progress.best_step >= 0 else None
        about = {"step": progress.step, "best_val_loss": best_loss, **about}
        checkpoint.save(folder, model_config, state["model"], tokenizer, trainer, about)
        checkpoint.point(self.checkpoints / "latest", folder)
        if progress.best_step == progress.step:
            checkpoint.point(best, folder)
        for old in [path for path in checkpoint.steps(self.checkpoints) if path.name <= folder.name][:-keep]:
            if old.resolve() != best.resolve():
                shutil.rmtree(old)


def open_folder(run_dir: str | None, resume: str | None, overwrite: bool) -> RunFolder:
    """The folder of the run that goes on, or of a new one."""
    return RunFolder.reopen(Path(str(run_dir))) if resume else RunFolder.create(run_dir, overwrite)


def row_step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def dated() -> Path:
    """runs/<date-time>, with a number behind it when a run of this second exists; made here, so that no two runs share it."""
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

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.received: int | None = None  # by this rank, perhaps while it waits for what the others have received
        self.signal: int | None = None  # what all ranks stop for

    def __enter__(self) -> "StopRequest":
        self.before = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            os._exit(128 + number)
        self.received = number

    def requested(self) -> bool:
        """Whether a rank was told to stop. All ask together, so all leave after the same step, with the same status."""
        self.signal = self.ranks.highest(self.received or 0) or None
        return self.signal is not None


def named_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Optimizer state by weight name, so that it does not depend on the order of the groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: dict(state) for p, state in optimizer.state.items()}


def restore_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, dict[str, Any]]) -> None:
    for name, p in model.named_parameters():
        if name in saved:
            optimizer.state[p] = {
                key: part_like(value, p) if key != "step" else value.to(p.device) for key, value in saved[name].items()
            }
