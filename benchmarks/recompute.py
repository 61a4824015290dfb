"""What `checkpoint_activations=true` saves in memory and costs in time: one training step on a CPU, with and without.

`python -m benchmarks.recompute`. Memory is the most that a step takes beside weights and optimizer state, measured where freed
memory goes back to the system at once; time is measured apart, where it does not.
"""

import os
from statistics import median
from typing import Any

import torch

from benchmarks.harness import as_row, forget_peak, in_a_process, interleave, resident, store, training_step
from model import ModelConfig, Transformer
from training.device import set_up
from training.objective import NextTokenLoss, recompute_blocks
from training.optimizer import OptimizerConfig, make_optimizer

SHAPES = {  # name: (layers, heads, d_model, vocab, context, batch)
    "6 x 192, 8 sequences of 256": (6, 6, 192, 4096, 256, 8),
    "12 x 256, 4 sequences of 512": (12, 4, 256, 4096, 512, 4),
    "12 x 768 (GPT-2), 1 sequence of 1024": (12, 12, 768, 50304, 1024, 1),
}


def trainee(shape: tuple[int, ...], recompute: bool) -> Any:
    n_layers, n_heads, d_model, vocab, context, batch = shape
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=vocab, context_length=context, n_layers=n_layers, n_heads=n_heads, d_model=d_model)
    objective = NextTokenLoss(Transformer(config))
    if recompute:
        recompute_blocks(objective.model)
    ids = torch.randint(0, vocab, (batch, context + 1))
    return training_step(objective, make_optimizer(OptimizerConfig(), objective.model), ids)


def memory(shape: tuple[int, ...]) -> dict[str, int]:
    found = {}
    for name, recompute in (("kept", False), ("recomputed", True)):
        step = trainee(shape, recompute)
        step()
        peaks = []
        for _ in range(3):
            before = resident()
            forget_peak()
            step()
            peaks.append(resident("VmHWM") - before)
        found[name] = int(median(peaks))
        del step
    return found


def time(shape: tuple[int, ...]) -> Any:
    set_up(torch.device("cpu"), compiled=False)
    return interleave({"kept": trainee(shape, False), "recomputed": trainee(shape, True)}, turns=5)


def main() -> None:
    rows = []
    for name, shape in SHAPES.items():
        timings = in_a_process(time, shape)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
        peaks = in_a_process(memory, shape)
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        rows.append(as_row({"shape": name, "bytes": peaks}, timings, "kept"))
        print(rows[-1], flush=True)
    store("recompute", rows)


if __name__ == "__main__":
    main()
