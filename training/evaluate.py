"""How well the model predicts text it was not trained on, the same tokens each time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batches import IGNORED, Windows
from training.objective import NextTokenLoss
from training.ranks import Ranks


@dataclass
class Evaluation:
    loss: float  # nats a token
    perplexity: float
    bits_per_byte: float  # comparable between tokenizers
    n_targets: int

    def __str__(self) -> str:
        return f"validation loss {self.loss:.4f} | perplexity {self.perplexity:.2f} | {self.bits_per_byte:.4f} bits per byte"


def evaluate(objective: NextTokenLoss, windows: Windows, batch_size: int, ranks: Ranks, limit: int | None = None) -> Evaluation:
    """Mean loss over the first `limit` windows (None: all); no target is counted twice, and the ranks share the work.

    Bytes per token are those of the whole split, so with a limit bits per byte are an estimate."""
    device, was_training = next(objective.parameters()).device, objective.training
    batches = share_of(windows, min(limit or len(windows), len(windows)), batch_size, ranks)
    objective.eval()
    with torch.no_grad():
        sums = [torch.stack(objective(tokens.to(device), targets.to(device))) for tokens, targets in batches]
    objective.train(was_training)
    total, n = ranks.sum(torch.stack(sums).cpu().double().sum(0)).tolist()  # the losses, the targets
    loss = total / n
    n_bytes = windows.tokens.n_bytes * n / (windows.tokens.n_tokens - 1)
    return Evaluation(loss, math.exp(min(loss, 700.0)), total / math.log(2) / n_bytes, int(n))


def share_of(windows: Windows, count: int, batch_size: int, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches of the first `count` windows. All ranks get as many (running a model in parts takes all of them):
    what a rank lacks is filled with windows that do not count."""
    share = -(-count // ranks.world)
    first = ranks.rank * share
    for i in range(first, first + share, batch_size):
        at = torch.arange(i, min(i + batch_size, first + share))
        tokens, targets = windows.batch(at.clamp(max=count - 1).tolist())
        targets[at >= count] = IGNORED
        yield tokens, targets
