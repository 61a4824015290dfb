"""The learning rate over a run, as a share of its peak."""

import math
from dataclasses import dataclass


@dataclass(kw_only=True)
class ScheduleConfig:
    """`cosine`: half a cosine from the peak to `final` (Loshchilov and Hutter 2017). `wsd`: warm up, stay, then go down to
    `final` in a straight line over the last `decay_fraction` of the steps (Hägele et al. 2024)."""

    name: str = "cosine"
    warmup_steps: int = 100
    final: float = 0.1  # share of the peak where the schedule ends, one step after the last
    decay_fraction: float = 0.5  # wsd only

    def __post_init__(self) -> None:
        if self.name not in ("cosine", "wsd"):
            raise ValueError(f"schedule.name={self.name} is not one of cosine, wsd")
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps={self.warmup_steps} must be at least 0")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final={self.final} must be from 0 to 1")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"schedule.decay_fraction={self.decay_fraction} must be above 0 and at most 1")


def learning_rate_share(config: ScheduleConfig, step: int, steps: int) -> float:
    """What step number `step` (from 0) of `steps` multiplies the peak learning rate by."""
    warmup = (step + 1) / max(1, config.warmup_steps)
    if config.name == "cosine":
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        left = (1 + math.cos(math.pi * min(1.0, max(0.0, done)))) / 2
    else:
        left = max(0.0, (steps - step) / max(1.0, config.decay_fraction * steps))
    return min(1.0, warmup, config.final + (1 - config.final) * left)
