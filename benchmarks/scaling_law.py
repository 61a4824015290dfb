"""A scaling law on a laptop: six model sizes at three budgets of arithmetic each, fitted and drawn.

`python -m benchmarks.scaling_law`, a quarter of an hour on two cores. At a fixed budget C = 6 N D a small model sees many tokens
and learns little from each, a large one the other way round: the loss over the size N is a valley, and its floor moves right
as C grows (Hoffmann et al. 2022, their second approach). The text is the standard library, in bytes; N counts the matrices, with
the head.
"""

import time
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, store
from data.batches import Windows
from data.prepare import prepare
from data.source import DataConfig
from data.tokenizer import TokenizerConfig
from model import ModelConfig, Transformer
from training.device import set_up
from training.evaluate import evaluate
from training.flops import flops_per_token, matmul_parameters
from training.objective import NextTokenLoss
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer, set_learning_rate
from training.ranks import Ranks
from training.schedule import ScheduleConfig, learning_rate_share

BUDGETS = (2e11, 6e11, 2e12)  # floating-point operations
SIZES = ((1, 32), (1, 48), (2, 48), (2, 64), (2, 96), (3, 128))  # (layers, d_model)
CONTEXT, BATCH = 128, 8
OPTIMIZER = OptimizerConfig(name="muon", lr=0.02)
SCHEDULE = ScheduleConfig(name="wsd", warmup_steps=10, final=0.0, decay_fraction=0.6)


@dataclass
class Run:
    budget: float
    parameters: int
    tokens: int
    loss: float  # nats a byte, on held-out modules


def train(n_layers: int, d_model: int, budget: float, windows: Windows, held_out: Windows) -> Run:
    """One model, as far as the budget goes; its schedule ends there too."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_layers": n_layers, "d_model": d_model, "n_heads": max(1, d_model // 32), "qk_norm": True}
    model = Transformer(ModelConfig(vocab_size=257, context_length=CONTEXT, mlp="relu2", zero_init=True, **shape))
    objective, optimizer = NextTokenLoss(model), make_optimizer(OPTIMIZER, model)
    steps = round(budget / (flops_per_token(model) * BATCH * CONTEXT))
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate_share(SCHEDULE, step, steps))
        loss, n = objective(*windows.batch(range(step * BATCH, (step + 1) * BATCH)))
        (loss / n).backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found = evaluate(objective, held_out, 4 * BATCH, Ranks(), None)
    return Run(budget, matmul_parameters(model), steps * BATCH * CONTEXT, found.loss)


def valley(runs: list[Run]) -> tuple[np.ndarray, float, float]:
    """A parabola through loss over ln N, and where its floor lies: coefficients, N and loss there."""
    a, b, c = np.polyfit([log(run.parameters) for run in runs], [run.loss for run in runs], 2)
    at = -b / (2 * a)
    return np.array([a, b, c]), exp(at), float(c - b * b / (4 * a))


def power(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """y = k x^p, by least squares in logarithms: k, p."""
    p, k = np.polyfit(np.log(xs), np.log(ys), 1)
    return exp(k), float(p)


def plot(runs: list[Run], law: str) -> None:
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for budget in BUDGETS:
        here = [run for run in runs if run.budget == budget]
        curve, best, floor = valley(here)
        (dots,) = axes.plot([run.parameters for run in here], [run.loss for run in here], "o", label=f"{budget:.0e} FLOPs")
        line = np.geomspace(here[0].parameters, here[-1].parameters, 100)
        axes.plot(line, np.polyval(curve, np.log(line)), color=dots.get_color(), alpha=0.5)
        axes.plot(best, floor, "*", color=dots.get_color(), ms=14)
    axes.set(xscale="log", xlabel="parameters N", ylabel="held-out loss (nats a byte)", title=law)
    axes.minorticks_off()
    axes.set_xticks([2e4, 5e4, 1e5, 2e5, 5e5], ["20,000", "50,000", "100,000", "200,000", "500,000"])
    axes.legend()
    figure.savefig(RESULTS / "scaling_law.png", dpi=150)


def main() -> None:
    set_up(torch.device("cpu"), compiled=False)
    began = time.perf_counter()
    corpus = prepare(DataConfig(), TokenizerConfig(name="bytes"), CONTEXT)
    windows, held_out = Windows(corpus.train, CONTEXT, seed=0), Windows(corpus.val, CONTEXT, seed=None)
    runs = []
    for budget in BUDGETS:
        for n_layers, d_model in SIZES:
            runs.append(train(n_layers, d_model, budget, windows, held_out))
            print(runs[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    floors = [valley([run for run in runs if run.budget == budget]) for budget in BUDGETS]
    k, p = power(list(BUDGETS), [best for _, best, _ in floors])
    law = f"best N = {k:.2g} C^{p:.2f}"
    found = {"law": law, "best N": [best for _, best, _ in floors], "loss there": [floor for *_, floor in floors]}
    found["tokens a parameter there"] = [budget / 6 / best**2 for budget, (_, best, _) in zip(BUDGETS, floors, strict=True)]
    print(found)
    plot(runs, law)
    print(store("scaling_law", [vars(run) for run in runs], found | {"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
