"""How gradients move the weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.muon import MuonWithAdamW
from training.ranks import whole


@dataclass(kw_only=True)
class OptimizerConfig:
    """`adamw`: AdamW for everything (Loshchilov and Hutter 2019). `muon`: Muon at `lr` for the matrices inside the blocks,
    AdamW at `adam_lr` for embeddings, head, norms and biases. Norms and biases do not decay."""

    name: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float | None = 1.0  # the global gradient norm is cut to this; null: never
    momentum: float = 0.95  # muon only
    adam_lr: float = 3e-3  # muon only

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "muon"):
            raise ValueError(f"optimizer.name={self.name} is not one of adamw, muon")
        for name in ("lr", "adam_lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be above 0")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay} must be at least 0")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ValueError(f"optimizer.grad_clip={self.grad_clip} must be above 0, or null to switch it off")


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """One optimizer over all weights; each group remembers its peak learning rate for `set_learning_rate`."""
    kinds: dict[str, list[Tensor]] = {"matrix": [], "table": [], "vector": []}
    for name, p in model.named_parameters():
        kinds["vector" if p.dim() < 2 else "matrix" if "blocks." in name else "table"].append(p)
    groups: list[dict[str, Any]] = []
    for kind, members in kinds.items():
        muon = {"momentum": config.momentum} if config.name == "muon" and kind == "matrix" else {}
        lr = config.adam_lr if config.name == "muon" and not muon else config.lr
        decay = 0.0 if kind == "vector" else config.weight_decay
        if members:
            groups.append({"params": members, "lr": lr, "peak_lr": lr, "weight_decay": decay, **muon})
    optimizer = MuonWithAdamW if config.name == "muon" else torch.optim.AdamW
    return optimizer(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak_lr"]


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before."""
    return whole(torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit))
