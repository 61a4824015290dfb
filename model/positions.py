"""Where a token stands. Attention alone cannot tell: permute its inputs, and its outputs are permuted alike.

Shapes: b rows, t queries, s keys, h heads, d width of a head. `at` holds positions: (t,), or (b, t) if rows
differ.
Each kind overrides one of three no-ops, and is chosen once, when the model is built.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from model.config import ModelConfig


class Position(nn.Module):
    """The interface, and the kind "none": a causal mask alone tells of order (Haviv et al. 2022)."""

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add positions to the embeddings (b, t, d_model)."""
        return x

    def rotate(self, q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries and keys (b, h, t, d) by their positions."""
        return q, k

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor | None:
        """What to add to the attention scores: (h, t, s) or (b, h, t, s), or None."""
        return None


class Learned(Position):
    """One trained vector a position, added to the embedding (GPT-2)."""

    def __init__(self, context_length: int, d_model: int):
        super().__init__()
        self.table = nn.Embedding(context_length, d_model)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(at)


class Fixed(Position):
    """A kind whose table is computed, not trained, so no part of the state_dict. It follows the model to
    another device, but never to another dtype: bfloat16 cannot tell position 257 from 256."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.on_cpu = table
        self.table = table.to(torch.get_default_device())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.table = self.on_cpu.to(fn(torch.empty(0, device=self.table.device)).device)
        return self


class Sinusoidal(Fixed):
    """Waves of lengths 2 pi to 20,000 pi, added to sqrt(d_model) embedding (Vaswani et al. 2017, 3.4-3.5)."""

    def __init__(self, context_length: int, d_model: int):
        angles = angles_of(context_length, frequencies(d_model, 10000.0))
        super().__init__(rearrange([angles.sin(), angles.cos()], "two t pair -> t (pair two)"))

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        return x * math.sqrt(x.size(-1)) + self.table[at].to(x.dtype)


class Rotary(Fixed):
    """RoPE (Su et al. 2021): turn the plane of dimensions (i, i + d/2) by position * theta^(-2i/d).

    A dot product of two turned vectors depends on the difference of their positions only.
    """

    def __init__(self, context_length: int, head_width: int, theta: float, scaling: dict[str, float] | None = None):
        frequency = frequencies(head_width, theta)
        angles = angles_of(context_length, frequency if scaling is None else stretch(frequency, scaling))
        cos, sin = angles.cos(), angles.sin()
        # (2, context_length, d): the factors of each dimension itself, and of the other one of its pair
        super().__init__(torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)]))

    def rotate(self, q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.table[:, at].unsqueeze(-3)  # (1, t, d) or (b, 1, t, d): alike for every head
        return turn(q, cos, sin), turn(k, cos, sin)


class Alibi(Fixed):
    """Press et al. 2021: each head lowers a score by its slope times the distance; no vector has a position.

    With n heads, n a power of two, the slopes are 2^(-8 i / n), i = 1 .. n; otherwise those of the power
    below, then every other one of the power above.
    """

    def __init__(self, n_heads: int):
        power = 2 ** math.floor(math.log2(n_heads))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(n_heads - power)]
        super().__init__(torch.tensor(slopes, device="cpu")[:, None, None])

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        distance = q_at[..., None, :, None] - k_at  # (1, t, s) or (b, 1, t, s)
        return -self.table * distance


def frequencies(width: int, theta: float) -> Tensor:
    """theta^(-2i/width) for i < width/2: radians a position, from 1 to about 1/theta, on the CPU."""
    return 1.0 / theta ** (torch.arange(0, width, 2, device="cpu").float() / width)


def angles_of(context_length: int, frequency: Tensor) -> Tensor:
    """(context_length, pairs): position times frequency, in radians."""
    return torch.outer(torch.arange(context_length, device="cpu").float(), frequency)


def stretch(frequency: Tensor, scaling: dict[str, float]) -> Tensor:
    """Llama 3.1's context extension (Llama Team 2024, and its code): waves longer than the old context /
    low_freq_factor are slowed by `factor`, those shorter than the old context / high_freq_factor stay, those
    between are blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_context_length"] * frequency / (2 * math.pi)  # rotations within the old context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / scaling["factor"]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_(i + d/2)) by its angle, in float32 at least, as the tables are."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin).to(x.dtype)


def make_position(config: ModelConfig) -> Position:
    match config.position:
        case "rope":
            return Rotary(config.context_length, config.head_width, config.rope_theta, config.rope_scaling)
        case "learned":
            return Learned(config.context_length, config.d_model)
        case "sinusoidal":
            return Sinusoidal(config.context_length, config.d_model)
        case "alibi":
            return Alibi(config.n_heads)
        case _:
            return Position()
