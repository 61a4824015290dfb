"""One optimizer update, in the parts that the loop names."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from training.batches import Batch
from training.ranks import Ranks


class Precision:
    """What the matrix products run in, and float16's loss scaler (which does nothing for other dtypes)."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def autocast(self) -> torch.autocast:
        """Weights stay as they are; matrix products run in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the weights, and forget the gradients."""
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


def accumulate(
    objective: nn.Module, micro_batches: list[Batch], n_targets: int, *, ranks: Ranks, seed: tuple[int, int], precision: Precision
) -> Tensor:
    """Add the gradient of the global mean loss to the weights; return that loss, a scalar.

    Each micro-batch contributes its sum over the targets of the whole batch, on all ranks, so that it does not matter how the
    batch was split. `seed` is (run's seed, step): with the rank and the micro-batch it decides dropout, and nothing else does.
    """
    total = torch.zeros((), device=micro_batches[0][0].device)
    draw = torch.default_generator if precision.device.type == "cpu" else torch  # the latter looks for GPUs, each time
    for i, (tokens, targets) in enumerate(micro_batches):
        draw.manual_seed(int(np.random.SeedSequence((*seed, ranks.rank, i)).generate_state(1, np.uint64)[0]))
        with ranks.exchanging(objective, last=i == len(micro_batches) - 1):
            with precision.autocast():
                loss_sum, _ = objective(tokens, targets)
            precision.scaler.scale(loss_sum * (ranks.world / n_targets)).backward()  # ranks average their gradients
        total = total + loss_sum.detach()
    return ranks.sum(total) / n_targets


def require_finite(loss: float, norm: float, step: int, scaler: torch.amp.GradScaler) -> None:
    """Raise ValueError before the update. A float16 gradient may overflow now and then: the scaler skips it and scales down."""
    if math.isfinite(loss) and (math.isfinite(norm) or (scaler.is_enabled() and scaler.get_scale() > 1)):
        return
    what, way = ("gradient", "backward") if math.isfinite(loss) else ("loss", "forward")
    raise ValueError(
        f"step {step + 1}: the {what} is not finite (loss {loss:.4g}, gradient norm {norm:.4g}): the {way} pass overflowed; the "
        "weights were not touched. Try a lower optimizer.lr, a longer schedule.warmup_steps, or dtype=float32"
    )
