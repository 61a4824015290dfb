"""The loss: how surprised the model is by each next token."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data.batches import IGNORED
from model import Transformer

WHOLE = 1 << 25  # logits up to this many are held at once (128 MB in float32); beyond, the head runs over chunks of tokens


class NextTokenLoss(nn.Module):
    """(b, t) tokens and targets -> the sum of -ln p(target) in nats, and how many targets were not IGNORED.

    The one module that is compiled, and wrapped for several devices. A sum, not a mean, so that micro-batches and ranks
    with unequal numbers of targets add up to the loss of the whole batch. When vocab x tokens is large, the head and the
    softmax are computed a chunk at a time, and again in the backward pass, so that the logits of the whole batch never exist.
    """

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        features = self.model.features(tokens).flatten(0, 1)
        targets = targets.flatten()
        vocab = self.model.head.weight.size(0)
        if targets.numel() * vocab <= WHOLE:
            loss_sum = self.head_loss(features, targets)
        else:
            pieces = zip(features.split(WHOLE // 2 // vocab), targets.split(WHOLE // 2 // vocab), strict=True)
            losses = [checkpoint(self.head_loss, x, y, use_reentrant=False) for x, y in pieces]
            loss_sum = torch.stack(losses).sum()
        return loss_sum, (targets != IGNORED).sum()

    def head_loss(self, features: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.head(features)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def recompute_blocks(model: Transformer) -> None:
    """Keep only what goes into each block, and compute its inside again in the backward pass (Chen et al. 2016): activations
    of one block at a time, for a third more arithmetic."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
