"""The keys and values of every token seen: the prefix of a text is computed once, not again for each new token.

A key or value never changes when text is appended, since no token sees a later one. Row r holds the tokens 0 .. lengths[r] - 1
in the slots of the same number: slot = position, so rows of unequal length need no padding and no bookkeeping; what lies
beyond a row's length is never visible, and overwritten when the row grows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig

BLOCK = 128  # keys are read in whole blocks, so that shapes repeat and the cost follows what is filled, not what is allocated


@dataclass
class LayerCache:
    """One layer's share: keys and values (rows, kv_heads, capacity, head width), written in place."""

    keys: Tensor
    values: Tensor

    def append(self, k: Tensor, v: Tensor, at: Tensor, read: int) -> tuple[Tensor, Tensor]:
        """Store k and v (b, kv_heads, t, d) at the positions (t,) or (b, t); return the first `read` slots of both."""
        rows = torch.arange(k.size(0), device=k.device)[:, None]
        self.keys[rows, :, at] = k.transpose(1, 2).to(self.keys.dtype)
        self.values[rows, :, at] = v.transpose(1, 2).to(self.values.dtype)
        return self.keys[:, :, :read], self.values[:, :, :read]


class KVCache:
    """Room for `capacity` tokens a row, allocated once by the caller and handed to `Transformer.forward`, which fills it."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        capacity = min(capacity or config.context_length, config.context_length)
        self.capacity = -(-capacity // BLOCK) * BLOCK  # whole blocks; positions still end at context_length
        shape = (rows, config.kv_heads, self.capacity, config.head_width)
        self.layers = [
            LayerCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.n_layers)
        ]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0  # of the lengths, known without asking the device

    def positions(self, t: int) -> Tensor:
        """Where the next t tokens of each row go: (rows, t)."""
        return self.lengths[:, None] + torch.arange(t, device=self.lengths.device)

    def reach(self, t: int) -> int:
        """How many slots must be read once t more tokens are in: the fullest row's, rounded up to a block."""
        return -(-(self.longest + t) // BLOCK) * BLOCK

    def advance(self, t: int) -> None:
        self.lengths += t
        self.longest += t

    def cut(self, lengths: list[int]) -> None:
        """Forget all but the first lengths[r] tokens of each row: the padding of unequal prompts, or a text taken back."""
        self.lengths.copy_(torch.tensor(lengths))
        self.longest = max(lengths)

    def row(self, r: int) -> "KVCache":
        """A cache that is row r of this one: it writes into the same memory, and starts empty."""
        one = object.__new__(KVCache)
        one.capacity, one.longest = self.capacity, 0
        one.layers = [LayerCache(layer.keys[r : r + 1], layer.values[r : r + 1]) for layer in self.layers]
        one.lengths = self.lengths[r : r + 1].zero_()
        return one
