"""Interleaved measurements: contestants take turns in one process, so that a machine's moods hit all of them alike."""

import gc
import json
import multiprocessing
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from training.optimizer import clip_gradients

RESULTS = Path(__file__).parent / "results"


@dataclass
class Timing:
    """Seconds a turn: the median, and the quartiles that say how far to trust it."""

    median: float
    low: float
    high: float
    turns: int


def interleave(contestants: Mapping[str, Callable[[], object]], turns: int = 7, warmup: int = 1) -> dict[str, Timing]:
    """Time each contestant `turns` times, once a round, after `warmup` rounds that do not count. Every round has an order of its
    own: what goes first, or after a certain other, may meet other caches."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffle = list(contestants.items()), Random(0).shuffle
    for turn in range(warmup + turns):
        shuffle(order)
        for name, run in order:
            gc.collect()
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return {name: timing(times) for name, times in seconds.items()}


def training_step(objective: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Callable[[], None]:
    """Forward, backward, clipping and update on one batch of ids (b, t + 1), as often as it is called."""

    def step() -> None:
        loss, n = objective(ids[:, :-1], ids[:, 1:])
        (loss / n).backward()
        clip_gradients(objective.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trained(*overrides: str) -> float:
    """The validation loss at the end of `python train.py` with these overrides, in a process and a folder of its own."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, f"run_dir={folder}/run", "wandb.mode=disabled", "eval_every=null"]
        done = subprocess.run(command, capture_output=True, text=True)
    losses = re.findall(r"validation loss ([\d.]+)", done.stdout)
    if done.returncode or not losses:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr.strip()}")
    return float(losses[-1])


def timing(times: list[float]) -> Timing:
    ordered = sorted(times)
    return Timing(median(ordered), ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4], len(ordered))


def resident(which: str = "VmRSS") -> int:
    """Bytes of main memory that this process holds; VmHWM: the most since `forget_peak`. Linux only."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def in_a_process(work: Callable[..., Any], *args: Any) -> Any:
    """What work(*args) returns in a new process: its memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "versions": {name: found(name) for name in ("torch", "transformers", "tokenizers", "tiktoken")},
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def found(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def store(name: str, rows: list[dict[str, Any]], about: dict[str, Any] | None = None) -> Path:
    """Write the rows (one a measured case) with the machine they come from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **(about or {}), "rows": rows}, indent=1) + "\n")
    return path


def as_row(case: dict[str, Any], timings: dict[str, Timing], base: str) -> dict[str, Any]:
    """A case, each contestant's timing, and how many times as fast as `base` it was."""
    ratios = {name: round(timings[base].median / t.median, 3) for name, t in timings.items()}
    return {**case, "seconds": {name: asdict(t) for name, t in timings.items()}, f"times as fast as {base}": ratios}
