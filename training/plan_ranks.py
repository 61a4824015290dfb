"""What a step takes on each of several ranks, on paper: for machines that one does not have.

N weights, R ranks. Weights, gradients and optimizer state are float32; weights are gathered in c bytes each (2 in bfloat16 on
CUDA, else 4). In a ring, each rank sends (R - 1) / R of what all gather or scatter, and twice that of what all sum (Patarasu
and Yuan 2009).

           stays (bytes)             whole for a moment (bytes, at most)          sent by a rank (bytes a step)
    ddp    8 N + optimizer           a bucket of gradients, 25 MiB                2 (R - 1) / R 4 N
    fsdp   (8 N + optimizer) / R     weights and gradients of two blocks          (R - 1) / R (2 c N + 4 N)
                                     and of all outside the blocks (2 c each),
                                     and the largest of them in float32 (4 each)

The first is the data parallelism of Li et al. (2020). The second is stage 3 of ZeRO (Rajbhandari et al. 2020, section 7), as
Zhao et al. (2023) build it: whole are the block that runs and the one fetched for after it. With A > 1 micro-batches a step,
both keep the gradients that are not exchanged yet, 4 N bytes more, and fsdp gathers for each micro-batch: 2 A c N. Activations
and logits are a rank's own, and come on top.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model import ModelConfig, Transformer
from training.batches import Batches
from training.plan import Plan
from training.update import Precision

BUCKET = 25 << 20


@dataclass
class RankPlan:
    """Bytes on each rank, and bytes that each sends in a step."""

    parallel: str
    ranks: int
    stays: float
    passing: float  # whole for a moment
    activations: float  # of one micro-batch, logits too
    sent: float

    @property
    def memory(self) -> float:
        return self.stays + self.passing + self.activations

    def __str__(self) -> str:
        parts = {"weights, gradients, optimizer": self.stays, "gathered": self.passing, "activations": self.activations}
        memory = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in parts.items() if size)
        return (
            f"{self.parallel} on {self.ranks} ranks: {self.memory / 2**30:,.2f} GiB each ({memory}); "
            f"each sends {self.sent / 2**30:,.2f} GiB a step"
        )


def plan_ranks(
    config: ModelConfig, ranks: int, *, optimizer: float, activations: dict[str, int], micro_batches: int, gathered_bytes: int
) -> dict[str, RankPlan]:
    """By `parallel`. `optimizer`: bytes of its state for the whole model; `activations`: most bytes of a micro-batch's."""
    with torch.device("meta"):
        model = Transformer(config)
    weights = sum(p.numel() for p in model.parameters())
    block = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    outside = weights - config.n_layers * block
    states, share = 8 * weights + optimizer, (ranks - 1) / ranks
    kept = 4 * weights if micro_batches > 1 else 0
    moving = kept + min(BUCKET, 4 * weights)
    ddp = RankPlan("ddp", ranks, states, moving, activations["ddp"], share * 2 * 4 * weights)
    whole = gathered_bytes * (outside + min(2, config.n_layers) * block)
    moving = whole + (kept or whole) + 4 * max(block, outside)
    sent = share * (2 * micro_batches * gathered_bytes * weights + 4 * weights)
    return {"ddp": ddp, "fsdp": RankPlan("fsdp", ranks, states / ranks, moving, activations["fsdp"], sent)}


def rank_plans(
    plan: Plan, make: Callable[..., Plan], config: ModelConfig, batches: Batches, precision: Precision
) -> dict[str, RankPlan]:
    """The same, with activations and optimizer state as they were counted for the `plan` of one device, which `make` made."""
    held = torch.bfloat16 if precision.dtype == torch.bfloat16 else torch.float32
    sharded = make(weights=held)
    return plan_ranks(
        config,
        batches.ranks.world,
        optimizer=plan.memory["optimizer"],
        activations={"ddp": plan.passing, "fsdp": sharded.passing},
        micro_batches=batches.share // batches.micro,
        gathered_bytes=held.itemsize,
    )
