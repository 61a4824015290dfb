"""How a training step grows with context, batch, width and depth: time and memory, ours and a plain one.

`python -m benchmarks.growth`. Plain is the textbook: attention by the equation, which holds (t, t) weights, and a loss that holds
the logits of the whole batch in float32. Memory is what activations and logits take when they are most, counted as `dry_run=true`
does it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import model.attention
from benchmarks.harness import RESULTS, as_row, interleave, store, training_step
from model import ModelConfig, Transformer
from model.attention import scaled_dot_product_attention
from training.device import set_up
from training.objective import NextTokenLoss
from training.optimizer import OptimizerConfig, make_optimizer
from training.plan import Allocations

BASE = ModelConfig(vocab_size=8192, context_length=256, n_layers=4, n_heads=4, d_model=192)
AXES: dict[str, tuple[int, ...]] = {
    "context_length": (128, 256, 512, 1024, 2048),
    "batch_size": (1, 2, 4, 8, 16),
    "d_model": (96, 192, 384, 768),
    "n_layers": (2, 4, 8, 16),
}
BATCH = 4


class PlainLoss(nn.Module):
    def __init__(self, transformer: Transformer):
        super().__init__()
        self.model = transformer

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with patch.object(model.attention, "fused_attention", equation):
            logits = self.model(tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), torch.tensor(targets.numel())


def equation(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v)[0]


LOSSES: dict[str, Callable[[Transformer], nn.Module]] = {"sprout": NextTokenLoss, "plain": PlainLoss}


def trainee(config: ModelConfig, batch: int, loss: Callable[[Transformer], nn.Module]) -> Callable[[], None]:
    torch.manual_seed(0)
    objective = loss(Transformer(config))
    ids = torch.zeros(batch, config.context_length + 1, dtype=torch.long)
    return training_step(objective, make_optimizer(OptimizerConfig(), objective), ids)


def counted(config: ModelConfig, batch: int, loss: Callable[[Transformer], nn.Module]) -> int:
    """Bytes of activations and logits at their peak, on tensors without data."""
    with FakeTensorMode(), Allocations(config.vocab_size) as seen:
        objective = loss(Transformer(config))
        seen.are("weights", objective.parameters())
        for p in objective.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.are("gradients", [p.grad]))
        seen.passing = 0
        ids = torch.zeros(batch, config.context_length, dtype=torch.long)
        objective(ids, ids)[0].backward()
    return seen.passing


def plot(rows: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(2, len(AXES), sharex="col")
    for column, (axis, values) in enumerate(AXES.items()):
        here = [row for row in rows if row["axis"] == axis]
        for who in LOSSES:
            panels[0, column].plot(values, [row["seconds"][who]["median"] for row in here], marker="o", ms=3, label=who)
            panels[1, column].plot(values, [row["bytes"][who] / 2**20 for row in here], marker="o", ms=3, label=who)
        panels[1, column].set(xlabel=axis)
        for panel in panels[:, column]:
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(values, [str(value) for value in values])
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.minorticks_off()
    panels[0, 0].set(ylabel="seconds a step")
    panels[1, 0].set(ylabel="MiB of activations")
    panels[0, 0].legend()
    figure.savefig(RESULTS / "growth.png", dpi=150)


def main() -> None:
    set_up(torch.device("cpu"), compiled=False)
    rows: list[dict[str, Any]] = []
    for axis, values in AXES.items():
        for value in values:
            batch = value if axis == "batch_size" else BATCH
            changed: dict[str, Any] = {} if axis == "batch_size" else {axis: value}
            config = replace(BASE, **changed)
            steps = {who: trainee(config, batch, loss) for who, loss in LOSSES.items()}
            row = as_row({"axis": axis, "value": value}, interleave(steps, turns=5), "plain")
            row["bytes"] = {who: counted(config, batch, loss) for who, loss in LOSSES.items()}
            print({key: found for key, found in row.items() if key != "seconds"}, flush=True)
            rows.append(row)
    plot(rows)
    print(store("growth", rows, {"base": vars(BASE) | {"batch_size": BATCH}}))


if __name__ == "__main__":
    main()
