"""One optimizer step's sequences, split over ranks and micro-batches."""

import torch
from torch import Tensor

from data.batches import IGNORED, Windows
from training.ranks import Ranks

Batch = tuple[Tensor, Tensor]  # tokens and targets, (b, t) each


def check_batch(batch_size: int, micro_batch_size: int | None, world: int) -> int:
    """The micro-batch size, or a ValueError that names the numbers which do not divide."""
    if batch_size % world:
        raise ValueError(f"batch_size={batch_size} does not divide over {world} ranks: use a multiple of {world}")
    share = batch_size // world
    micro = micro_batch_size or share
    if share % micro:
        whole = f"batch_size={batch_size} over {world} rank(s)"
        raise ValueError(f"micro_batch_size={micro} does not divide the {share} sequences of each rank, {whole}: use a divisor")
    return micro


class Batches:
    """`at(position)`: this rank's micro-batches of the global batch that starts there, and the global number of targets."""

    def __init__(self, windows: Windows, batch_size: int, micro_batch_size: int, ranks: Ranks, device: torch.device):
        self.windows, self.micro, self.ranks, self.device = windows, micro_batch_size, ranks, device
        self.share = batch_size // ranks.world

    def at(self, position: int) -> tuple[list[Batch], int]:
        first = position + self.ranks.rank * self.share
        tokens, targets = self.windows.batch(range(first, first + self.share))
        n_targets = int(self.ranks.sum((targets != IGNORED).sum()))
        pieces = zip(tokens.split(self.micro), targets.split(self.micro), strict=True)
        return [(self.on_device(tokens), self.on_device(targets)) for tokens, targets in pieces], n_targets

    def on_device(self, ids: Tensor) -> Tensor:
        return ids.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else ids.to(self.device)
