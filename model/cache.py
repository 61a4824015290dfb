"""The keys and values of every token seen: a prefix is computed once, not again for each new token.

A key or value never changes when text is appended, since no token sees a later one. (A query is used once, by its own
token, and not kept.) Row r holds its tokens 0 .. lengths[r] - 1 in the slots of the same number (slot = position). What lies
beyond a row's length, like the padding of a shorter prompt, is never visible, and is overwritten as the row grows:

    cache = model.new_cache(2)
    model(prompts, cache)   # (2, 5): the second has 3 tokens, padded at its end
    cache.cut([5, 3])       # forget the padding
    model(newest, cache)    # (2, 1): go to slots 5 and 3, and read what came before
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig

BLOCK = 128  # reads end at a multiple of this: shapes repeat, and the cost follows what is filled


@dataclass
class LayerCache:
    """One layer's share: keys and values (rows, kv_heads, capacity, head width), written in place."""

    keys: Tensor
    values: Tensor

    def append(self, k: Tensor, v: Tensor, at: Tensor, read: int) -> tuple[Tensor, Tensor]:
        """Store k and v (b, kv_heads, t, d) at positions (t,) or (b, t); return the first `read` slots."""
        for slots, new in ((self.keys, k.to(self.keys.dtype)), (self.values, v.to(self.values.dtype))):
            if at.dim() == 1:
                slots.index_copy_(2, at, new)
            else:  # rows differ: the index tensors come first, (b, t, kv_heads, d)
                slots[torch.arange(new.size(0), device=at.device)[:, None], :, at] = new.transpose(1, 2)
        return self.keys[:, :, :read], self.values[:, :, :read]


class KVCache:
    """Room for `capacity` tokens a row, 2 x layers x kv_heads x head width numbers each; `Transformer.forward` fills it."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        capacity = min(capacity or config.context_length, config.context_length)
        self.capacity = whole_blocks(capacity)  # positions still end at context_length
        shape = (rows, config.kv_heads, self.capacity, config.head_width)
        # Zeros: an unwritten slot has weight 0, and 0 times what memory happened to hold could be NaN.
        self.layers = [
            LayerCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.n_layers)
        ]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0  # of the lengths, known without asking the device

    def positions(self, t: int) -> Tensor:
        """Where the next t tokens go: (t,) for a single row, else (rows, t)."""
        at = self.lengths[:, None] + torch.arange(t, device=self.lengths.device)
        return at[0] if len(at) == 1 else at

    def reach(self, t: int) -> int:
        """How many slots must be read once t more tokens are in: the fullest row's, in whole blocks."""
        if self.longest + t > self.capacity:
            raise ValueError(f"a cache of {self.capacity} slots a row cannot hold {self.longest + t}: give it more capacity")
        return whole_blocks(self.longest + t)

    def advance(self, t: int) -> None:
        self.lengths += t
        self.longest += t

    def cut(self, lengths: list[int]) -> None:
        """Forget all but the first lengths[r] tokens of each row: padding, or text taken back."""
        on_gpu = self.lengths.is_cuda  # which then does not wait
        self.lengths.copy_(torch.tensor(lengths, pin_memory=on_gpu), non_blocking=on_gpu)
        self.longest = max(lengths)

    def copy_from(self, other: "KVCache", rows: list[int]) -> None:
        """Row r becomes what row rows[r] of another cache is."""
        for mine, its in zip(self.layers, other.layers, strict=True):
            mine.keys[:, :, : other.longest] = its.keys[rows, :, : other.longest]
            mine.values[:, :, : other.longest] = its.values[rows, :, : other.longest]
        self.cut(other.lengths[rows].tolist())

    def row(self, r: int) -> "KVCache":
        """Row r of this cache as a cache of its own, emptied, that writes into the same memory. `cut` the whole one afterwards:
        its `longest` does not follow."""
        one = copy.copy(self)
        one.layers = [LayerCache(layer.keys[r : r + 1], layer.values[r : r + 1]) for layer in self.layers]
        one.lengths = self.lengths[r : r + 1].zero_()
        one.longest = 0
        return one


def whole_blocks(n: int) -> int:
    return -(-n // BLOCK) * BLOCK
