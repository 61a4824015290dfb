"""Which tokens a training step sees: window = f(seed, position), where position counts the windows consumed so far."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.token_file import TokenFile

IGNORED = -100  # a target that counts nowhere
ROUNDS = 8


def permute(indices: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a keyed permutation of range(n) sends the indices, in O(1) memory: a Feistel network (Luby and Rackoff,
    1988) over the next power of four, walked along its cycles until it comes back into range(n)."""
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64)
    out = indices.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        out[outside] = left << half | right
        outside = outside[out[outside] >= n]
    return out.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """32 bits, each of which depends on every bit of x (two multiply-and-fold rounds, as in murmur's finaliser)."""
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0x94D049BB133111EB)
    return x >> np.uint64(32)


class Windows:
    """Windows of context_length tokens and the tokens that follow each of them.

    Every id but the first is a target exactly once an epoch: windows follow one another, and the last one ends at
    the last token, ignoring the targets that the one before it covers. seed=None gives them in order.
    """

    def __init__(self, tokens: TokenFile, context_length: int, seed: int | None) -> None:
        tokens.require(context_length)
        self.tokens, self.context_length, self.seed = tokens, context_length, seed
        self.n_targets = tokens.n_tokens - 1
        self.n_windows = -(-self.n_targets // context_length)

    def __len__(self) -> int:
        return self.n_windows

    def order(self, positions: np.ndarray) -> np.ndarray:
        """The window at each position: every epoch of len(self) positions has every window, in another order."""
        epochs, windows = positions // self.n_windows, positions % self.n_windows
        if self.seed is None:
            return windows
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permute(windows[here], self.n_windows, self.seed, int(epoch))
        return windows

    def batch(self, positions: Sequence[int] | range) -> tuple[Tensor, Tensor]:
        """(tokens, targets), int64 of shape (len(positions), context_length)."""
        length, last = self.context_length, self.n_targets - self.context_length
        rows = np.empty((len(positions), length + 1), np.int64)
        windows = self.order(np.asarray(positions, np.int64))
        for row, window in zip(rows, windows.tolist(), strict=True):
            start = min(window * length, last)
            row[:] = self.tokens.read(start, start + length + 1)
        ids = torch.from_numpy(rows)
        targets = ids[:, 1:].clone()
        targets[torch.from_numpy(windows == self.n_windows - 1), : (self.n_windows - 1) * length - last] = IGNORED
        return ids[:, :-1].clone(), targets
