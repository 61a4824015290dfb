"""One optimizer step's sequences, split over ranks and micro-batches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from data.batches import Windows
from training.objective import IGNORED
from training.ranks import Ranks


def check_batch(batch_size: int, micro_batch_size: int | None, world: int) -> int:
    """The micro-batch size, or a ValueError that names the numbers which do not divide."""
    if batch_size % world:
        raise ValueError(f"batch_size={batch_size} does not divide over {world} ranks: use a multiple of {world}")
    share = batch_size // world
    micro = share if micro_batch_size is None else micro_batch_size
    if micro > share or share % micro:
        whole = f"batch_size={batch_size} over {world} rank(s)"
        raise ValueError(f"micro_batch_size={micro} does not divide the {share} sequences of each rank, {whole}: use a divisor")
    return micro


class Batches:
    """`at(position)`: this rank's micro-batches of the global batch that starts there, and the global number of targets."""

    def __init__(self, windows: Windows, batch_size: int, micro_batch_size: int, ranks: Ranks, device: torch.device):
        self.windows, self.micro, self.ranks, self.device = windows, micro_batch_size, ranks, device
        self.share = batch_size // ranks.world

    def at(self, position: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
        first = position + self.ranks.rank * self.share
        tokens, targets = self.windows.batch(range(first, first + self.share))
        n_targets = self.ranks.sum((targets != IGNORED).sum())
        return list(self.split(tokens, targets)), int(n_targets)

    def split(self, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for pair in zip(tokens.split(self.micro), targets.split(self.micro), strict=True):
            if self.device.type == "cuda":
                pair = (pair[0].pin_memory(), pair[1].pin_memory())
            yield pair[0].to(self.device, non_blocking=True), pair[1].to(self.device, non_blocking=True)
