"""A run: where it stands, the folder it lives in, and how it is asked to stop."""

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from data.tokenizer import Tokenizer
from model import ModelConfig
from training.ranks import Ranks
from weights import checkpoint

UNBEGUN = {".lock", "wandb", "config.yaml.tmp"}  # all that a run killed before its first step can leave
WHOLE_ROW = re.compile(r'\{"step": (?P<step>\d+),.*\}\n')  # of metrics.jsonl


@dataclass
class Progress:
    """Everything about where a run stands that is not a weight or the optimizer's: step n means that n updates are done."""

    step: int = 0
    position: int = 0  # sequences consumed: the order of the data is a function of this and the seed
    best_loss: float = math.inf
    best_step: int = -1
    wandb_id: str | None = None
    corpus: str = ""  # the folder of its tokens, whose name tells of the text and of what was made of it

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
    """One run's folder: config.yaml, metrics.jsonl, checkpoints/, loss.png, wandb/."""

    def __init__(self, path: Path):
        self.path, self.checkpoints = path, path / "checkpoints"
        self.metrics, self.config = path / "metrics.jsonl", path / "config.yaml"

    def begin(self, config: str, progress: Progress, start: Path | None) -> None:
        """Bring config, metrics and links to what they were at `progress`; of an earlier run that is replaced nothing stays.
        Checkpoints of steps that were given up stay until the run comes there again."""
        if progress.step == 0:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            for path in (self.metrics, self.path / "loss.png"):
                path.unlink(missing_ok=True)
        for link in (self.checkpoints / "latest", self.checkpoints / "best"):
            if link.is_dir() and not link.is_symlink():  # a copy of the run in which links became folders
                step = self.checkpoints / f"step-{checkpoint.read_json(link / 'config.json')['step']:08d}"
                shutil.rmtree(link) if step.exists() else link.rename(step)
        if start is not None and not start.exists():
            start = self.checkpoints / f"step-{progress.step:08d}"
        for leftover in self.checkpoints.glob("*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        if self.metrics.exists():  # a line that was cut short goes, too
            rows = map(WHOLE_ROW.match, self.metrics.read_text(errors="replace").splitlines(keepends=True))
            checkpoint.write_text(self.metrics, "".join(row[0] for row in rows if row and int(row["step"]) <= progress.step))
        if start is not None:
            checkpoint.point(self.checkpoints / "latest", start.resolve())
            best = self.checkpoints / f"step-{progress.best_step:08d}"
            if best.exists():
                checkpoint.point(self.checkpoints / "best", best)
            else:  # what it points to, if anything, is of steps that were given up
                (self.checkpoints / "best").unlink(missing_ok=True)
        checkpoint.write_text(self.config, config)

    def append_metrics(self, row: dict[str, Any]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}  # JSON has no NaN
        with checkpoint.writing(self.metrics), open(self.metrics, "a") as file:
            file.write(json.dumps(finite) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()] if self.metrics.exists() else []

    def save(self, progress: Progress, model_config: ModelConfig, state: dict[str, Any], tokenizer: Tokenizer, keep: int) -> None:
        """A checkpoint of this step, to which `latest` (and `best`) then point. Older ones go, but for `keep` and the best."""
        folder, best = self.checkpoints / f"step-{progress.step:08d}", self.checkpoints / "best"
        if best.resolve() == folder.resolve():  # left by steps that were given up, about to be replaced
            best.unlink(missing_ok=True)
        if self.metrics.exists():
            checkpoint.sync(self.metrics)  # the rows up to a checkpoint are on disk before it is
        weights, trainer = state.pop("model"), {"progress": asdict(progress), **state}
        best_loss = progress.best_loss if progress.best_step >= 0 else None
        about = {"step": progress.step, "best_val_loss": best_loss, "tokens": progress.position * model_config.context_length}
        checkpoint.save(folder, model_config, weights, tokenizer, trainer, {**about, "command": shlex.join(sys.argv)})
        checkpoint.point(self.checkpoints / "latest", folder)
        if progress.best_step == progress.step:
            checkpoint.point(best, folder)
        for old in [path for path in checkpoint.steps(self.checkpoints) if path.name <= folder.name][:-keep]:
            if old.resolve() != best.resolve():
                shutil.rmtree(old)


def check_run_dir(run_dir: str | None, resume: bool, overwrite: bool) -> None:
    """Raise ValueError for a folder that is not for this run, or cannot be."""
    path = Path(run_dir or "runs")
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"run_dir={path} cannot be made ({there} is no folder that you may write to): choose another run_dir")
    others = {entry.name for entry in path.iterdir()} - UNBEGUN if run_dir and there is path else set()
    is_run = (path / "config.yaml").exists()
    if others and not resume and not (overwrite and is_run):
        remedy = f"resume={path} continues the run in it, overwrite=true replaces it"
        raise ValueError(f"run_dir={path} is not empty: {remedy if is_run else 'choose another run_dir'}")


@contextmanager
def open_folder(run_dir: str | None, resume: bool, overwrite: bool) -> Iterator[RunFolder]:
    """The folder of a run that goes on, or of a new one, owned by this process. Until `begin`, nothing that was there is touched,
    and what was not there goes away again if something fails."""
    check_run_dir(run_dir, resume, overwrite)
    made = not run_dir or not Path(run_dir).is_dir()
    try:
        folder = RunFolder(Path(run_dir) if run_dir else dated())
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / ".lock").open("a")  # goes with the process, however it ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        remedy = "wait for it, stop it, or choose another run_dir"
        raise ValueError(f"{folder.path} belongs to a run that is alive: {remedy}") from None
    except OSError as error:
        what = f"run_dir={run_dir or 'runs'} cannot be {'made' if made else 'written'}"
        raise ValueError(f"{what} ({error.strerror}): choose another run_dir") from None
    with lock:
        try:
            yield folder
        finally:
            if not folder.config.exists():  # never begun
                for path in [folder.path] if made else [folder.path / name for name in UNBEGUN]:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def dated() -> Path:
    """runs/<date-time>, with a number behind it when a run of this second exists; made here, so that no two runs share it."""
    path = first = Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for n in count(2):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = first.with_name(f"{first.name}-{n}")
    return path


class StopRequest:
    """SIGINT, SIGTERM or SIGHUP (the terminal is gone, and nohup was not asked for): finish the step, save, leave. A second
    SIGINT: leave at once (checkpoints are complete or absent)."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.received: int | None = None  # by this rank, perhaps while it waits for what the others have received
        self.signal: int | None = None  # what all ranks stop for

    def __enter__(self) -> "StopRequest":
        heard = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            heard.remove(signal.SIGHUP)
        self.before = {number: signal.signal(number, self.receive) for number in heard}
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
