"""What is left to look at: the picture of a run, the table of a sweep, the reason why a run has failed."""

import math
from dataclasses import dataclass
from typing import Any

from training.device import REMEDY, out_of_memory
from training.ranks import LOST, lost_a_rank
from training.run import RunFolder
from weights import checkpoint


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


CURVES: dict[str, dict[str, Any]] = {
    "train/loss": {"label": "train loss", "lw": 1, "color": "#7aa6c2"},
    "val/loss": {"label": "validation loss, lowest {:.3f}", "lw": 1.5, "marker": "o", "ms": 4, "color": "#c2512f"},
    "train/lr": {"lw": 1, "color": "#555555"},
}


def draw_losses(folder: RunFolder) -> None:
    """loss.png: train and validation loss over steps, the learning rate below."""
    from matplotlib.figure import Figure  # heavy

    rows = folder.read_metrics()
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for key, style in CURVES.items():
        steps, values = [[row[name] for row in rows if row.get(key) is not None] for name in ("step", key)]
        if values:
            label = style.get("label", "").format(min(values))
            (below if key == "train/lr" else above).plot(steps, values, **{**style, "label": label})
    above.set(ylabel="loss (nats a token)")
    above.set_title(folder.path.name, fontsize="medium")
    if above.lines:
        above.legend(frameon=False)
    below.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    with checkpoint.writing(folder.path / "loss.png"):
        temporary = folder.path / "loss.tmp.png"
        figure.savefig(temporary, dpi=120)
        temporary.replace(folder.path / "loss.png")
