"""A run is killed at thirty moments, and goes on after each: it ends as if nothing had happened."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from nursery import Nursery
from tiny_runs import differing, finished, metrics, state, tiny

from weights import checkpoint

KILLS, STEPS = 30, 240


def last_step(run: Path) -> int:
    """Of the last whole row of metrics.jsonl."""
    rows = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if (run / "metrics.jsonl").exists() else []
    return int(rows[-1].split(b",")[0].split(b":")[1]) if rows else 0


def wait_for(happened, process: int, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not happened():
        os.kill(process, 0)  # it lives
        assert time.monotonic() < limit
        time.sleep(0.0005)


def half_written(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob("step-*.tmp"))


def killed(nursery: Nursery, run: Path, arguments: list[str], when) -> None:
    process = nursery.start(*arguments)
    wait_for(when, process)
    os.kill(process, signal.SIGKILL)
    assert nursery.ended(process) == -signal.SIGKILL
    link = run / "checkpoints" / "latest"
    if link.exists():
        assert checkpoint.is_whole(link)
    else:
        assert not link.is_symlink()


@pytest.mark.slow
def test_thirty_kills(tmp_path):
    settings = ["model.dropout=0.1", "optimizer=muon", "micro_batch_size=2", f"steps={STEPS}", "save_every=3", "eval_every=7"]
    finished(*tiny(tmp_path, *settings, f"run_dir={tmp_path}/calm"))
    run = tmp_path / "killed"
    arguments = tiny(tmp_path, *settings, f"run_dir={run}", "resume=auto")
    draw, torn = random.Random(5), 0
    with Nursery() as nursery:
        for kill in range(KILLS):
            if kill % 3 == 2:  # while a checkpoint is being written
                killed(nursery, run, arguments, lambda: half_written(run))
            else:
                target = last_step(run) + draw.uniform(0, 1.5 * STEPS / KILLS)
                killed(nursery, run, arguments, lambda target=target: last_step(run) > target)
            torn += bool(half_written(run))
        assert last_step(run) < STEPS, "it was over before it was killed so often"
        last = nursery.start(*arguments)
        assert nursery.ended(last) == 0
    assert torn > 0
    assert differing(state(tmp_path / "calm"), state(run)) == []
    assert metrics(run) == metrics(tmp_path / "calm")
    for link in ("latest", "best"):
        assert os.readlink(run / "checkpoints" / link) == os.readlink(tmp_path / "calm" / "checkpoints" / link)
    assert half_written(run) == []


def test_a_kill_in_the_middle_of_a_save(tmp_path):
    """The name that resuming uses always holds a whole checkpoint; what was half-written is ignored, then cleared away."""
    settings = ["steps=30", "save_every=1", "keep_checkpoints=2"]
    finished(*tiny(tmp_path, *settings, f"run_dir={tmp_path}/calm"))
    run = tmp_path / "killed"
    arguments = tiny(tmp_path, *settings, f"run_dir={run}", "resume=auto")
    with Nursery() as nursery:
        for _ in range(20):
            killed(nursery, run, arguments, lambda: half_written(run))
            if half_written(run):
                break
    assert half_written(run)
    finished(*arguments)
    assert half_written(run) == []
    assert differing(state(tmp_path / "calm"), state(run)) == []
    assert metrics(run) == metrics(tmp_path / "calm")
