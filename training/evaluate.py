"""How well the model predicts text it was not trained on: the same tokens each time, all of them."""

import math
from dataclasses import dataclass

import torch

from data.batches import Windows
from training.objective import NextTokenLoss
from training.ranks import Ranks


@dataclass
class Evaluation:
    loss: float  # nats a token
    perplexity: float
    bits_per_byte: float  # comparable between tokenizers
    n_targets: int


def evaluate(
    objective: NextTokenLoss, windows: Windows, batch_size: int, ranks: Ranks, limit: int | None = None
) -> Evaluation:
    """Mean loss over the first `limit` windows (None: all), which do not overlap; the ranks share the work."""
    device = next(objective.parameters()).device
    count = len(windows) if limit is None else min(limit, len(windows))
    mine = range(ranks.rank, count, ranks.world)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    n_targets = torch.zeros((), dtype=torch.long, device=device)
    was_training = objective.training
    objective.eval()
    try:
        with torch.no_grad():
            for i in range(0, len(mine), batch_size):
                tokens, targets = windows.batch(mine[i : i + batch_size])
                loss, n = objective(tokens.to(device), targets.to(device))
                loss_sum += loss
                n_targets += n
    finally:
        objective.train(was_training)
    total, n = ranks.sum(loss_sum).item(), int(ranks.sum(n_targets).item())
    loss = total / n
    n_bytes = windows.tokens.n_bytes * n / (windows.tokens.n_tokens - 1)
    return Evaluation(loss, math.exp(min(loss, 700.0)), total / math.log(2) / n_bytes, n)
