"""The picture of a run."""

from typing import Any

from training.run import RunFolder
from weights import checkpoint

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
