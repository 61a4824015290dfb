"""One optimizer update, in the parts that the loop names."""

import math

import torch
from torch import Tensor, nn

from training.ranks import Ranks


class NonFinite(ValueError):
    """The loss or the gradient is NaN or infinite; the weights have not been touched."""


def accumulate(
    objective: nn.Module,
    micro_batches: list[tuple[Tensor, Tensor]],
    n_targets: int,
    *,
    ranks: Ranks,
    seed: tuple[int, int],
    precision: "Precision",
) -> Tensor:
    """Add the gradient of the global mean loss to the weights; return that loss, a scalar.

    Each micro-batch contributes its sum over the targets of the whole batch, on all ranks, so that it does not matter how the
    batch was split. `seed` is (run's seed, step): with the rank and the micro-batch it decides dropout, and nothing else does.
    """
    total = torch.zeros((), device=micro_batches[0][0].device)
    for i, (tokens, targets) in enumerate(micro_batches):
        torch.manual_seed(fold(*seed, ranks.rank, i))
        with ranks.exchanging(objective, last=i == len(micro_batches) - 1):
            with precision.autocast():
                loss_sum, _ = objective(tokens, targets)
            precision.scaler.scale(loss_sum * (ranks.world / n_targets)).backward()  # ranks average their gradients
        total = total + loss_sum.detach()
    return ranks.sum(total) / n_targets


def fold(*numbers: int) -> int:
    """One 63-bit seed of several numbers, each of which changes it."""
    seed = 0
    for number in numbers:
        seed = (seed * 6364136223846793005 + number + 1442695040888963407) % (1 << 63)
        seed ^= seed >> 29
    return seed


class Precision:
    """What the matrix products run in, and float16's loss scaler (which does nothing for other dtypes)."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def autocast(self) -> torch.autocast:
        """Weights stay as they are; matrix products run in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def require_finite(loss: float, norm: float, step: int, scaler: torch.amp.GradScaler) -> None:
    """Raise NonFinite before the update. A float16 gradient may overflow now and then: the scaler skips it and scales down."""
    if math.isfinite(loss) and (math.isfinite(norm) or (scaler.is_enabled() and scaler.get_scale() > 1)):
        return
    what, cause = (
        ("loss", "the forward pass overflowed") if not math.isfinite(loss) else ("gradient", "the backward pass overflowed")
    )
    raise NonFinite(
        f"step {step + 1}: the {what} is not finite (loss {loss:.4g}, gradient norm {norm:.4g}): {cause}; the weights were not "
        "touched. Try a lower optimizer.lr, a longer schedule.warmup_steps, or dtype=float32"
    )
