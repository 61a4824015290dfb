"""Autoregressive generation: score the text so far, choose one id, append it, repeat.

Rows are independent: each gives what it would give alone. Shapes: b rows, vocab ids.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache import KVCache
from model.sampling import Sampling
from model.transformer import Transformer

OVERFLOWS = ("slide", "stop")


@dataclass
class Step:
    """One new id a row. `ids[r]` is None once row r has ended; `ended[r]` says why: "stop", "context", "length", or None.

    `logits` (b, vocab) are the model's own scores for the ids just chosen, before penalties and filters.
    """

    ids: list[int | None]
    ended: list[str | None]
    logits: Tensor


@dataclass
class Row:
    """A text, and where the window that the model sees begins: at most `context_length` tokens back."""

    ids: list[int]
    start: int = 0
    ended: str | None = None

    @property
    def window(self) -> list[int]:
        return self.ids[self.start :]

    def append(self, token: int, context_length: int) -> None:
        """A window that would outgrow the context keeps its last half, and goes on from there."""
        self.ids.append(token)
        if len(self.ids) - self.start > context_length:
            self.start = len(self.ids) - max(1, context_length // 2)


def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options) -> list[list[int]]:
    """The new ids of each row; prompts of unequal length are fine. The options are those of `stream`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, max_new_tokens, **options):
        for row, token in zip(rows, step.ids, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seeds: int | Sequence[int] = 0,
    n_vocab: int | None = None,
    stop_ids: Sequence[int] = (),
    until: Callable[[int, int], bool] | None = None,
    overflow: str = "slide",
    use_cache: bool = True,
) -> Iterator[Step]:
    """Continue every prompt (ids) by up to max_new_tokens, one step at a time.

    seeds      one a row; a single number s stands for s, s + 1, ...
    n_vocab    ids from here on are never chosen (a head padded beyond the tokenizer)
    stop_ids   a row ends with the first of these (which is its last id)
    until      called with (row, id) for every new id; True ends the row
    overflow   "slide": a full window keeps its last half and goes on; "stop": the row ends when its text fills the context

    Raises ValueError for an empty prompt, an id the model does not know, or a prompt that fills the context when overflow=stop.
    """
    rows = [Row(list(prompt)) for prompt in prompts]
    check(model, rows, max_new_tokens, overflow)
    seeds = [seeds + r for r in range(len(rows))] if isinstance(seeds, int) else list(seeds)
    if len(seeds) != len(rows):
        raise ValueError(f"{len(seeds)} seeds for {len(rows)} prompts: give one a prompt, or a single number")
    for row in rows:
        row.start = max(0, len(row.ids) - model.config.context_length)
    chooser = Chooser(model, rows, sampling or Sampling(), seeds, n_vocab)
    scorer = Cached(model, rows, max_new_tokens) if use_cache else Recomputed(model)
    return run(model, rows, max_new_tokens, scorer, chooser, set(stop_ids), until, overflow)


def check(model: Transformer, rows: list[Row], max_new_tokens: int, overflow: str) -> None:
    vocab, context = model.config.vocab_size, model.config.context_length
    assert vocab is not None
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow={overflow} is not one of {', '.join(OVERFLOWS)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0")
    for r, row in enumerate(rows):
        if not row.ids:
            raise ValueError(f"prompt {r} is empty: start it with the end-of-text id, for example")
        if not 0 <= min(row.ids) <= max(row.ids) < vocab:
            raise ValueError(f"prompt {r} has ids {min(row.ids)} to {max(row.ids)}; the model knows 0 to {vocab - 1}")
        if overflow == "stop" and len(row.ids) >= context:
            raise ValueError(
                f"prompt {r} has {len(row.ids)} tokens, which fill the context of {context}: "
                "shorten it, or let the window slide (overflow=slide)"
            )
        if len(row.ids) > context:
            warnings.warn(f"prompt {r} has {len(row.ids)} tokens: the model sees its last {context}", stacklevel=3)


def run(
    model: Transformer,
    rows: list[Row],
    max_new_tokens: int,
    scorer: "Cached | Recomputed",
    chooser: "Chooser",
    stop_ids: set[int],
    until: Callable[[int, int], bool] | None,
    overflow: str,
) -> Iterator[Step]:
    context = model.config.context_length
    for n in range(1, max_new_tokens + 1):
        with evaluating(model):
            logits = scorer.logits(rows)
            chosen = chooser.choose(logits)
        ids: list[int | None] = [None] * len(rows)
        for r, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            if row.ended is not None:
                continue
            ids[r] = token
            row.append(token, context)
            if token in stop_ids or (until is not None and until(r, token)):
                row.ended = "stop"
            elif overflow == "stop" and len(row.ids) >= context:
                row.ended = "context"
            elif n == max_new_tokens:
                row.ended = "length"
        yield Step(ids, [row.ended for row in rows], logits)
        if all(row.ended is not None for row in rows):
            return


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """No dropout and no gradients inside; the model's mode is as before afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class Chooser:
    """Scores -> ids, with each row's seed, position and the ids it has seen."""

    def __init__(self, model: Transformer, rows: list[Row], sampling: Sampling, seeds: list[int], n_vocab: int | None):
        device, vocab = model.embed.weight.device, model.config.vocab_size
        self.rows, self.sampling, self.n_vocab = rows, sampling, n_vocab
        self.seeds = torch.tensor([signed_64(seed) for seed in seeds], device=device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            assert vocab is not None
            self.seen = torch.zeros(len(rows), vocab, dtype=torch.bool, device=device)
            for r, row in enumerate(rows):
                self.seen[r, row.ids] = True

    def choose(self, logits: Tensor) -> list[int]:
        if self.n_vocab is not None:
            logits = logits.clone()
            logits[:, self.n_vocab :] = -torch.inf
        at = torch.tensor([len(row.ids) for row in self.rows], device=logits.device)
        ids = self.sampling.choose(logits, self.seen, self.seeds, at)
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        return ids.tolist()


def signed_64(seed: int) -> int:
    """Any integer as the int64 with the same low 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


class Recomputed:
    """Without a cache: every window whole, at every step. What the cache is tested against."""

    def __init__(self, model: Transformer):
        self.model = model

    def logits(self, rows: list[Row]) -> Tensor:
        return last_logits(self.model, [row.window for row in rows], None)


class Cached:
    """With a cache: the prompts at once, then one token a row and step."""

    def __init__(self, model: Transformer, rows: list[Row], max_new_tokens: int):
        self.model = model
        self.cache = model.new_cache(len(rows), max(len(row.window) for row in rows) + max_new_tokens)
        self.starts: list[int] = []  # of the windows that the cache holds

    def logits(self, rows: list[Row]) -> Tensor:
        if not self.starts:
            logits = last_logits(self.model, [row.window for row in rows], self.cache)
        else:
            for r, row in enumerate(rows):
                if row.start != self.starts[r] and row.ended is None:
                    self.refill(r, row.window[:-1])
            self.cache.cut([len(row.window) - 1 for row in rows])  # all but the newest token is in; an ended row repeats its last
            newest = torch.tensor([row.ids[-1:] for row in rows], device=self.cache.lengths.device)
            logits = self.model.head(self.model.features(newest, self.cache))[:, -1]
        self.starts = [row.start for row in rows]
        return logits

    def refill(self, r: int, window: list[int]) -> None:
        """The window has slid: what it holds stands at new positions, so its keys and values are computed anew."""
        cache = self.cache.row(r)
        if window:
            self.model.features(torch.tensor([window], device=cache.lengths.device), cache)


def last_logits(model: Transformer, windows: list[list[int]], cache: KVCache | None) -> Tensor:
    """(b, vocab) scores after each window. Shorter windows are padded at their end, where no token before can see it."""
    device = model.embed.weight.device
    lengths = [len(window) for window in windows]
    padded = [window + [0] * (max(lengths) - len(window)) for window in windows]
    features = model.features(torch.tensor(padded, device=device), cache)
    if cache is not None:
        cache.cut(lengths)
    last = features[torch.arange(len(windows), device=device), torch.tensor(lengths, device=device) - 1]
    return model.head(last)
