"""What is left to look at: the picture of a run, the table of a sweep."""

import math
from dataclasses import dataclass
from typing import Any

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


def draw_losses(folder: RunFolder) -> None:
    """loss.png: train and validation loss over steps, the learning rate below."""
    from matplotlib.figure import Figure  # heavy

    rows = folder.read_metrics()
    curves = {key: [(row["step"], row[key]) for row in rows if row.get(key) is not None] for key in CURVES}
    figure = Figure(figsize=(8, 5))
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.1, top=0.94, hspace=0.08)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for key, style in CURVES.items():
        if curves[key]:
            name = key.replace("/", " ")
            if key == "val/loss":
                name = f"validation loss, lowest {min(loss for _, loss in curves[key]):.3f}"
            (below if key == "train/lr" else above).plot(*zip(*curves[key], strict=True), label=name, **style)
    above.set_ylabel("loss (nats a token)")
    above.set_title(folder.path.name, fontsize="medium")
    if above.has_data():
        above.legend(frameon=False)
    below.set_ylabel("learning rate")
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    with checkpoint.writing(folder.path / "loss.png"):
        temporary = folder.path / "loss.tmp.png"
        figure.savefig(temporary, dpi=120)
        temporary.replace(folder.path / "loss.png")


CURVES: dict[str, dict[str, Any]] = {
    "train/loss": {"lw": 1, "color": "#7aa6c2"},
    "val/loss": {"lw": 1.5, "marker": "o", "ms": 4, "color": "#c2512f"},
    "train/lr": {"lw": 1, "color": "#555555"},
}
