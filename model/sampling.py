"""From scores to one next id a row.

Shapes: b rows, vocab ids. A row's draw depends on its own scores, its seed and its position only: not on its
neighbours in the batch, nor on how many draws were made before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Sampling:
    """How the next id is chosen; the defaults draw from the model's own distribution. Applied in this order:

    repetition_penalty  r: the score s of an id already in the text becomes s / r if s > 0, s r otherwise
                        (Keskar et al. 2019); 1: off
    temperature         T: every score becomes s / T (Ackley et al. 1985); 0: the best id, whatever the seed;
                        1: off
    top_k               keep the k best ids (Fan et al. 2018); 0: off
    top_p               keep the fewest best ids whose probabilities sum to p or more (Holtzman et al. 2020);
                        1: off
    min_p               keep ids at least min_p times as probable as the best (Nguyen et al. 2024); 0: off
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, fits, needed in (
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "from 0.001 to 1000 (1: off)"),
            ("temperature", 0 <= self.temperature < inf, "0 (greedy) or above"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)} must be {needed}")

    def choose(self, logits: Tensor, seen: Tensor | None, seeds: Tensor, at: Tensor) -> Tensor:
        """logits (b, vocab), ids in the text so far (b, vocab), seeds and positions (b,) -> ids (b,)."""
        logits = penalise(logits.float(), seen, self.repetition_penalty)
        if self.temperature < 1e-5:  # the best id has all the probability that float32 can tell apart
            return logits.argmax(dim=-1)
        return draw(self.probabilities(logits), uniform(seeds, at))

    def probabilities(self, logits: Tensor) -> Tensor:
        """(b, vocab) penalised scores -> the distribution drawn from, zero outside what the filters keep."""
        logits = logits / self.temperature
        logits = keep_top_k(logits, self.top_k)
        logits = keep_top_p(logits, self.top_p)
        return keep_min_p(logits, self.min_p).softmax(dim=-1)


class Chooser:
    """A sampling with what it must know of each row: seed, position and the ids seen."""

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        vocab_size: int,
        n_vocab: int | None,
        device: torch.device,
    ):
        if device.type == "mps":
            device = torch.device("cpu")  # Metal has no float64
        self.sampling, self.n_vocab = sampling, n_vocab
        self.seeds = torch.tensor([signed(seed) for seed in seeds], device=device)
        self.at = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            for r, prompt in enumerate(prompts):
                self.seen[r, list(prompt)] = True

    def choose(self, logits: Tensor) -> Tensor:
        """(b, vocab) -> ids (b,), -1 where the scores are NaN or infinite. Writes -inf over scores of ids that stand for nothing,
        n_vocab and up."""
        if self.n_vocab is not None:
            logits[:, self.n_vocab :] = -inf
        logits = logits.to(self.seeds.device)
        finite = logits.amax(dim=-1).isfinite()
        ids = self.sampling.choose(logits, self.seen, self.seeds, self.at).where(finite, 0)
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        self.at += 1
        return ids.where(finite, -1)


def penalise(logits: Tensor, seen: Tensor | None, penalty: float) -> Tensor:
    if penalty == 1 or seen is None:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    if k == 0 or k >= logits.size(-1):
        return logits
    values, ids = logits.topk(k, dim=-1)
    return torch.full_like(logits, -inf).scatter(-1, ids, values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    if p == 1:
        return logits
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    reached = probabilities.cumsum(dim=-1) - probabilities >= p  # by those before it
    reached[..., 0] = False  # the best stays, even for a p that is 0 in float32
    return torch.full_like(logits, -inf).scatter(-1, ids, ordered.masked_fill(reached, -inf))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    if p == 0:
        return logits
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -inf)


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """The id in whose slice of [0, 1) the number u (b,) falls: exact sampling by one uniform number a row."""
    ends = probabilities.double().cumsum(dim=-1)
    return torch.searchsorted(ends, (u * ends[:, -1])[:, None], right=True).squeeze(-1)


def uniform(seeds: Tensor, at: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, position), in float64: SplitMix64's hash (Steele et al. 2014)."""
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


def signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
