"""Counted floating-point operations, and what this device can do of them a second."""

import time
from functools import cache

import torch

from model import Transformer


def matmul_parameters(model: Transformer) -> int:
    """Weights that every token is multiplied with: all matrices in the blocks, and the head."""
    return sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) + model.head.weight.numel()


def flops_per_token(model: Transformer) -> float:
    """Forward and backward of one token: 6 N + 12 L (h d) T (Chowdhery et al. 2022, appendix B; causality not discounted)."""
    config = model.config
    scores = config.n_layers * config.n_heads * config.head_width * config.context_length
    return 6.0 * matmul_parameters(model) + 12.0 * scores


@cache  # the runs of a sweep measure it once
def matmul_peak(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """FLOP/s of the best of several square matrix products: the yardstick for the share of peak that training reaches."""
    size = size if device.type == "cpu" else 8 * size
    a = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(6):
        a[0, 0].item()  # waits for what was asked of the device before
        began = time.perf_counter()
        (a @ a)[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(seconds)
