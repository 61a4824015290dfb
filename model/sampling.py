"""From scores to one next id a row.

Shapes: b rows, vocab ids. A row's draw depends on its own scores, its seed and its position only: not on its neighbours in
the batch, nor on how many draws were made before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Sampling:
    """How the next id is chosen; the defaults draw from the model's own distribution. Applied in the order of the fields.

    repetition_penalty  divide the positive and multiply the negative scores of ids already in the text (Keskar et al. 2019);
                        1: off
    temperature         divide all scores (0: take the best, whatever the seed); 1: off
    top_k               keep the k best (Fan et al. 2018); 0: off
    top_p               keep the smallest set of best ids whose probabilities sum to p (Holtzman et al. 2020); 1: off
    min_p               keep ids at least min_p times as probable as the best (Nguyen et al. 2024); 0: off
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, fits, range_ in (
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or above"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)} must be {range_}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # below this the best id has all the probability float32 can tell apart

    def choose(self, logits: Tensor, seen: Tensor | None, seeds: Tensor, at: Tensor) -> Tensor:
        """logits (b, vocab), seen (b, vocab) True for ids in the text so far, seeds and positions (b,) -> ids (b,)."""
        logits = penalise(logits.float(), seen, self.repetition_penalty)
        if self.greedy:
            return logits.argmax(dim=-1)
        return draw(self.probabilities(logits), uniform(seeds, at))

    def probabilities(self, logits: Tensor) -> Tensor:
        """(b, vocab) penalised logits -> the distribution drawn from, zero outside what the filters keep."""
        logits = logits / self.temperature
        logits = keep_top_k(logits, self.top_k)
        logits = keep_top_p(logits, self.top_p)
        return keep_min_p(logits, self.min_p).softmax(dim=-1)


def penalise(logits: Tensor, seen: Tensor | None, penalty: float) -> Tensor:
    if penalty == 1 or seen is None:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    if k == 0 or k >= logits.size(-1):
        return logits
    values, ids = logits.topk(k, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    if p == 1:
        return logits
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # an id is needed as long as those before it do not reach p
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, ordered.masked_fill(before >= p, -torch.inf))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    if p == 0:
        return logits
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """The id in whose slice of [0, 1) the number u (b,) falls: exact sampling by one uniform number a row."""
    ends = probabilities.double().cumsum(dim=-1)
    ids = torch.searchsorted(ends, (u * ends[:, -1])[:, None], right=True).squeeze(-1)
    last = (ends < ends[:, -1:]).sum(dim=-1)  # rounding never lifts u past the last id that has a slice
    return torch.minimum(ids, last)


def uniform(seeds: Tensor, at: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, each a function of (seed, position): SplitMix64's output function (Steele et al. 2014)."""
    z = mix(mix(seeds) + at)
    return (z >> 11 & (1 << 53) - 1).double() / (1 << 53)


def mix(z: Tensor) -> Tensor:
    """A bijection of 64-bit integers whose output bits each depend on all input bits."""
    z = z + signed(0x9E3779B97F4A7C15)
    z = (z ^ shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ shift(z, 31)


def shift(z: Tensor, n: int) -> Tensor:
    """Logical shift right: torch's >> of an int64 copies the sign."""
    return z >> n & (1 << 64 - n) - 1


def signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant
