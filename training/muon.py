"""Muon: momentum made orthogonal, so that a step moves all directions of a matrix equally (Jordan et al. 2024)."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from training.ranks import part_like, whole


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups that have a `momentum`, AdamW for the others.

    Matrices of equal shape are orthogonalised together in one batch, which on small models costs a fraction of one by one.
    Where each rank holds a part of a matrix, all orthogonalise the whole: a part cannot be made orthogonal on its own.
    """

    def __init__(self, params: Any, **options: Any):
        self.adamw = torch.optim.AdamW([torch.zeros(1)], **options)
        super().__init__(params, self.adamw.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]
        self.adamw.state = self.state  # one state, so that one state_dict holds both
        self.adamw.step()
        for group in self.param_groups:
            if "momentum" in group:
                self.step_matrices(group)

    def step_matrices(self, group: dict[str, Any]) -> None:
        batches: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                batches[p.shape, p.dtype, p.device].append(p)
        for (shape, _, _), weights in batches.items():
            updates = []
            for p in weights:
                assert p.grad is not None
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum"].lerp_(p.grad, 1 - group["momentum"])
                updates.append(whole(p.grad.lerp(buffer, group["momentum"])))  # Nesterov's look-ahead
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for p, update in zip(weights, orthogonalise(torch.stack(updates)), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(part_like(update.to(p.dtype), p), alpha=-group["lr"] * scale)


def orthogonalise(m: Tensor, steps: int = 5) -> Tensor:
    """(n, rows, columns) -> nearly U V^T of each matrix's U S V^T, by an odd polynomial that drives all singular values
    towards 1 (Newton-Schulz; the coefficients are Jordan's, which trade exactness for speed: values end within 0.7 to 1.2).

    x <- p(x x^T) x is taken on the smaller side: p and x x^T commute, so that x x^T <- p x x^T p, and only the product of all p
    meets x. In bfloat16, which is fast on CUDA, products of products lose too much: there each p meets x at once.
    """
    wide = m.size(-2) <= m.size(-1)
    x = (m if wide else m.mT).to(torch.bfloat16 if m.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    together = 1 if m.is_cuda else steps
    for _ in range(steps // together):
        gram = x @ x.mT
        product = p = polynomial(gram)
        for _ in range(together - 1):
            gram = p @ gram @ p
            p = polynomial(gram)
            product = p @ product
        x = product @ x
    return x if wide else x.mT


def polynomial(gram: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p
