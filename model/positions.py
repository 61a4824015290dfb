"""Where a token stands. Attention alone cannot tell: permute its inputs and its outputs are permuted the same way.

Shapes: b rows, t queries, s keys, h heads, d width of a head. `at` holds positions: (t,), or (b, t) when rows differ.
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
    """The interface, and the kind "none": a causal mask alone lets a model infer order (Haviv et al. 2022)."""

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


class Sinusoidal(Position):
    """Fixed waves of lengths 2 pi to 20,000 pi, added to the embedding times sqrt(d_model) (Vaswani et al. 2017, 3.4-3.5)."""

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        d_model = x.size(-1)
        angles = at[..., None].float() * frequencies(d_model, 10000.0).to(at.device)
        waves = rearrange([angles.sin(), angles.cos()], "two ... pair -> ... (pair two)")
        return x * math.sqrt(d_model) + waves.to(x.dtype)


class Rotary(Position):
    """RoPE (Su et al. 2021): turn the plane of dimensions (i, i + d/2) by position * theta^(-2i/d).

    A dot product of two turned vectors depends on the difference of their positions only.
    """

    def __init__(self, context_length: int, head_width: int, theta: float, scaling: dict[str, float] | None = None):
        super().__init__()
        self.context_length = context_length
        self.frequencies = frequencies(head_width, theta)
        if scaling is not None:
            self.frequencies = stretch(self.frequencies, scaling)
        self.table = self._angles(torch.get_default_device())

    def _angles(self, device: torch.device) -> Tensor:
        angles = torch.outer(torch.arange(self.context_length, device="cpu").float(), self.frequencies)
        return torch.stack([angles.cos(), angles.sin()]).to(device)  # (2, context_length, d / 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the model to another device, but not to another dtype: bfloat16 cannot tell position 257 from 256."""
        super()._apply(fn, recurse)
        self.table = self._angles(fn(torch.empty(0, device=self.table.device)).device)
        return self

    def rotate(self, q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.table[:, at].unsqueeze(-3)  # (1, t, d / 2) or (b, 1, t, d / 2): the same for every head
        return turn(q, cos, sin), turn(k, cos, sin)


class Alibi(Position):
    """Press & al. 2021: each head lowers a score by its slope times the distance; no vector carries a position."""

    def __init__(self, n_heads: int):
        super().__init__()
        power = 2 ** math.floor(math.log2(n_heads))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(n_heads - power)]  # between those of twice as many heads
        self.slopes = slopes

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes, device=q_at.device)
        distance = q_at[..., None, :, None] - k_at  # (1, t, s) or (b, 1, t, s)
        return -slopes[:, None, None] * distance


def frequencies(width: int, theta: float) -> Tensor:
    """theta^(-2i/width) for i < width/2: radians a position, from 1 down to about 1/theta. On the CPU, in float32."""
    return 1.0 / theta ** (torch.arange(0, width, 2, device="cpu").float() / width)


def stretch(frequency: Tensor, scaling: dict[str, float]) -> Tensor:
    """Llama 3.1's context extension: waves longer than the old context / low_freq_factor are slowed by `factor`, those shorter
    than the old context / high_freq_factor stay, those between are blended (Llama Team 2024, and its published code)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_context_length"] * frequency / (2 * math.pi)  # rotations within the old context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / scaling["factor"]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_(i + d/2)) by its angle, in float32 at least."""
    a, b = rearrange(x.to(torch.promote_types(x.dtype, cos.dtype)), "... (two pair) -> two ... pair", two=2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def make_position(config: ModelConfig) -> Position:
    match config.position:
        case "rope":
            return Rotary(config.context_length, config.head_width, config.rope_theta, config.rope_scaling)
        case "learned":
            return Learned(config.context_length, config.d_model)
        case "sinusoidal":
            return Sinusoidal()
        case "alibi":
            return Alibi(config.n_heads)
        case _:
            return Position()
