"""On one CUDA GPU: a training step of GPT-2 124M in bfloat16 against the peak, its memory against plain PyTorch's, and how many
tokens our recipe and AdamW take to the same loss.

`python -m benchmarks.gpu_train [TEXT]`, meant for six minutes; losses are of the text, by default the standard library.
`--check` runs the same on small shapes, on whatever device there is.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.growth import PlainLoss
from benchmarks.harness import in_a_process, interleave, store, trained
from benchmarks.train_step import GPT2, TINY, tokens
from model import ModelConfig, Transformer
from training.device import out_of_memory, peak_memory, set_up
from training.flops import flops_per_token, matmul_peak
from training.objective import NextTokenLoss, cross_entropy
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer
from training.update import Precision

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H100_AND_H200 = 989e12  # FLOP/s in bfloat16, dense, by their data sheets
SHARES = (0.35, 0.5, 0.65)  # of AdamW's steps
LEARN = ["model.n_layers=6", "model.n_heads=6", "model.d_model=384", "batch_size=64", "compile=true", "data.val_fraction=0.05"]
CHECK = ["model=tiny", "batch_size=4", "tokenizer=bytes", "data.max_tokens=100000"]


class WholeLoss(nn.Module):
    """Fused attention, but the logits of the whole batch."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(self.model(ids).flatten(0, 1), targets.flatten()), torch.tensor(targets.numel())


LOSSES: dict[str, Callable[[Transformer], nn.Module]] = {
    "sprout": NextTokenLoss,
    "fused attention, whole logits": WholeLoss,
    "attention by the equation, whole logits": PlainLoss,
}


def step_of(config: ModelConfig, batch: int, optimizer: str, loss: str, compile: bool) -> Callable[[], None]:
    """A step as training takes it, on the best device, in bfloat16."""
    set_up(DEVICE, compile)
    objective, precision = LOSSES[loss](Transformer(config).to(DEVICE)), Precision(DEVICE, torch.bfloat16)
    updates = make_optimizer(OptimizerConfig(name=optimizer), objective)
    if compile:
        objective.compile()
    ids = tokens(config, batch, config.context_length).to(DEVICE)

    def step() -> None:
        with precision.autocast():
            loss_sum, _ = objective(ids[:, :-1], ids[:, 1:])
        (loss_sum / ids[:, 1:].numel()).backward()
        clip_gradients(objective.parameters(), 1.0)
        precision.step(updates)

    return step


def speed(config: ModelConfig, batch: int, optimizer: str) -> dict[str, Any]:
    seconds = interleave({"step": step_of(config, batch, optimizer, "sprout", True)}, turns=15, warmup=4)["step"].median
    rate = batch * config.context_length / seconds
    done = rate * flops_per_token(Transformer(config))
    shares = {
        "share of 989 TFLOP/s": done / H100_AND_H200,
        "share of the matmul peak": done / matmul_peak(DEVICE, torch.bfloat16),
    }
    return {"optimizer": optimizer, "micro-batch": batch, "tokens a second": round(rate), **shares, "bytes": peak_memory(DEVICE)}


def memory(config: ModelConfig, batch: int, loss: str, compile: bool) -> int | None:
    """Bytes at the peak; None: more than there are."""
    try:
        step = step_of(config, batch, "adamw", loss, compile)
        step()
        step()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return None
    return peak_memory(DEVICE)


def main(text: str = "") -> None:
    check = text == "--check"
    if not (check or torch.cuda.is_available()):
        return print("no CUDA GPU: nothing to measure")
    config, batches, steps = (
        (replace(TINY, n_layers=1), (2,), 4) if check else (replace(GPT2, context_length=1024), (16, 32, 64), 1000)
    )
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    for optimizer, batch in [("adamw", batch) for batch in batches] + [("muon", batches[-1])]:
        tell(in_a_process(speed, config, batch, optimizer))
    for kind in LOSSES:
        for compile in (True, False) if kind == "sprout" else (False,):
            peak = in_a_process(memory, config, batches[-1], kind, compile)
            tell({"memory of": kind, "compiled": compile, "micro-batch": batches[-1], "bytes": peak})
    data = ["data=text", f"data.path={text}"] if text and not check else []
    shape = [*data, *(CHECK if check else LEARN)]
    goal = trained(*shape, f"steps={steps}", "optimizer=adamw")
    tell({"optimizer": "adamw", "steps": steps, "loss": goal})
    for share in SHARES:
        loss = trained(*shape, f"steps={max(2, round(share * steps))}")
        tell({"optimizer": "muon", "share of adamw's steps": share, "loss": loss, "reached": loss <= goal})
    if not check:
        print(store("gpu_train", rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
