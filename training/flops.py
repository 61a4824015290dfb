"""Counted floating-point operations, and what this device can do of them a second."""

import time
from functools import cache

import torch

from model import ModelConfig, Transformer


def matmul_parameters(model: Transformer) -> int:
    """Weights that every token is multiplied with: all matrices in the blocks, and the head."""
    blocks = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    return blocks + model.head.weight.numel()


def flops_per_token(model: Transformer, context: int | None = None) -> float:
    """Forward and backward of one token: 6 N + 12 L (h d) T (Chowdhery et al. 2022, appendix B; causality not discounted)."""
    config: ModelConfig = model.config
    width = config.n_heads * config.head_width
    return 6.0 * matmul_parameters(model) + 12.0 * config.n_layers * width * (context or config.context_length)


@cache  # the runs of a sweep measure it once
def matmul_peak(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """FLOP/s of the best of several square matrix products: the yardstick for the share of peak that training reaches."""
    size = size if device.type == "cpu" else 8 * size
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best
