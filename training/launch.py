"""A run, or the runs of a sweep: what came of each, and what the process says of it in the end."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.device import REMEDY, out_of_memory
from training.ranks import LOST, Ranks, lost_a_rank


@dataclass
class Outcome:
    """Of a run, which may be one of a sweep."""

    status: int = 0  # of the process: 0, or 128 + the signal that ended the run
    run_dir: str = ""
    val_loss: float | None = None  # the lowest
    overrides: tuple[str, ...] = ()
    error: str = ""


def explain(problem: Exception) -> str:
    """What a user can do something about, in one line; "" for a fault of the program."""
    line = " ".join(str(problem).split())
    if isinstance(problem, ValueError | OSError):
        return line
    if out_of_memory(problem):
        return f"out of memory ({line[:160]}). {REMEDY}"
    return LOST if lost_a_rank(problem) else ""


def sweep_table(jobs: list[Outcome]) -> str:
    """The runs of a sweep, the lowest validation loss first."""
    ranked = sorted(jobs, key=lambda job: math.inf if job.val_loss is None else job.val_loss)
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    rows = [("validation loss", "run", "overrides")]
    for job in ranked:
        loss = "failed" if job.val_loss is None else f"{job.val_loss:.4f}"
        rows.append((loss, job.run_dir, " ".join(override for override in job.overrides if override not in shared)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def launch(jobs: Callable[[], Sequence[Any]], run: Callable[[Any, Ranks], Outcome]) -> None:
    """Run every job (which has `overrides`), in this process or this rank; exits with a status other than 0 if that came of it.
    An error is one line. In a sweep it does not end the other runs."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    ranks, outcomes = Ranks.from_environment(), list[Outcome]()
    try:
        found = jobs()
        for job in found:
            try:
                outcome = run(job, ranks)
            except Exception as problem:
                outcome = Outcome(error=explain(problem))
                if len(found) == 1 or ranks.world > 1 or not outcome.error:
                    raise
                print(f"error: {outcome.error}", file=sys.stderr)
            if outcome.status:
                ranks.stop()
                sys.exit(outcome.status)
            outcomes.append(replace(outcome, overrides=job.overrides))
    except KeyboardInterrupt:  # before the loop began, or in the middle of a set-up
        sys.exit(130)
    except Exception as problem:
        first, message = ranks.first_to_fail(), explain(problem)
        if first and not message:
            raise
        sys.exit(f"error: {message}" if first else 1)
    ranks.stop()
    if len(outcomes) > 1 and ranks.main:
        print(sweep_table(outcomes))
    if any(outcome.error for outcome in outcomes):
        sys.exit(1)
