"""How gradients move the weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
    """One optimizer over all trained weights; each group remembers its peak learning rate for `set_learning_rate`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: dict[str, list[tuple[str, Tensor]]] = {"matrix": [], "table": [], "vector": []}
    for name, p in named:
        kind = "vector" if p.dim() < 2 else "matrix" if "blocks." in name else "table"
        groups[kind].append((name, p))
    decay = {"matrix": config.weight_decay, "table": config.weight_decay, "vector": 0.0}
    muon = config.name == "muon"
    params = [
        {
            "params": members,
            "weight_decay": decay[kind],
            "lr": config.lr if not muon or kind == "matrix" else config.adam_lr,
            **({"muon": kind == "matrix"} if muon else {}),
        }
        for kind, members in groups.items()
        if members
    ]
    betas = (config.beta1, config.beta2)
    optimizer: torch.optim.Optimizer
    if muon:
        optimizer = MuonWithAdamW(params, momentum=config.momentum, betas=betas, eps=config.eps)
    else:
        optimizer = torch.optim.AdamW(params, betas=betas, eps=config.eps, fused=True)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak_lr"]


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before."""
    return whole(torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit))
