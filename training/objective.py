"""The loss: how surprised the model is by each next token."""

from functools import partial
from typing import Any

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
    with unequal numbers of targets add up to the loss of the whole batch. With `end_of_text`, documents are kept apart.
    """

    def __init__(self, model: Transformer, end_of_text: int | None = None):
        super().__init__()
        self.model, self.end_of_text = model, end_of_text

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        features = self.model.features(tokens, end_of_text=self.end_of_text).flatten(0, 1)
        targets = targets.flatten()
        vocab = self.model.head.weight.size(0)
        if targets.numel() * vocab <= WHOLE:
            loss_sum = cross_entropy(self.model.head(features), targets)
        else:
            loss_sum = ChunkedLoss.apply(features, self.model.head.weight, targets, max(1, WHOLE // 2 // vocab))
        return loss_sum, (targets != IGNORED).sum()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """In float32 at least, summed."""
    return F.cross_entropy(wide(logits), targets, ignore_index=IGNORED, reduction="sum")


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ChunkedLoss(torch.autograd.Function):
    """The head and the cross-entropy of `rows` tokens at a time, so that the logits of the whole batch never exist.

    Nothing is computed twice: the gradient of a sum of losses by its logits is softmax(logits) - onehot(target), known as soon as
    the logits are, so each chunk goes on to the gradients of features and head at once.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        loss_sum = wide(features.new_zeros(()))
        gradients = (torch.empty_like(features), torch.zeros_like(wide(weight))) if any(ctx.needs_input_grad) else None
        for start in range(0, len(targets), rows):
            here = slice(start, start + rows)
            x, y = features[here], targets[here]
            logits = F.linear(x, weight)
            loss_sum += cross_entropy(logits, y)
            if gradients is not None:
                surprise = wide(logits).softmax(dim=-1)
                surprise.scatter_add_(1, y.clamp(min=0)[:, None], torch.full_like(surprise[:, :1], -1))
                surprise = surprise.masked_fill_((y == IGNORED)[:, None], 0).to(logits.dtype)
                gradients[0][here] = surprise @ weight
                gradients[1].add_(surprise.mT @ x)
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *(gradient * one for one in ctx.saved_tensors), None, None


def recompute_blocks(model: Transformer) -> None:
    """Keep only what goes into each block, and compute its inside again in the backward pass (Chen et al. 2016): activations
    of one block at a time, for a third more arithmetic."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
