"""Autoregressive generation: score the text so far, choose one id, append it, repeat.

Rows are independent: each gives what it would give alone. Shapes: b rows, vocab ids.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model.cache import KVCache
from model.decoding import Compiled
from model.recording import Recorded, recorder
from model.sampling import Chooser, Sampling
from model.transformer import Transformer

OVERFLOWS = ("slide", "stop")


@dataclass
class Step:
    """One new id a row.

    `ids[r]` is None once row r has ended; `ended[r]` says why: "stop", "context" (it is full), "length"
    (max_new_tokens reached), or None. `logits` (b, vocab) are the scores that the ids were chosen from,
    before penalties and filters.
    """

    ids: list[int | None]
    ended: list[str | None]
    logits: Tensor


@dataclass
class Row:
    """What the model sees of a text: its newest tokens, at most `context_length`."""

    window: list[int]
    ended: str | None = None

    def append(self, token: int, context_length: int) -> None:
        """A window that would outgrow the context keeps its last half, and goes on from there."""
        self.window.append(token)
        if len(self.window) > context_length:
            self.window = self.window[-max(1, context_length // 2) :]


def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
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
    compile: bool = False,
) -> Iterator[Step]:
    """Continue every prompt (ids) by up to max_new_tokens, one step at a time.

    seeds      one a row; a single number s stands for s, s + 1, ...
    n_vocab    ids from here on are never chosen (a head padded beyond the tokenizer)
    stop_ids   a row ends with the first of these (which is its last id)
    until      called with (row, id) for every other new id; True ends the row
    overflow   "slide": a full window keeps its last half and goes on; "stop": a row that fills it ends
    use_cache  False: every step reads the whole window again
    compile    the cached step is compiled when it is first taken: seconds then, and faster from there on

    A prompt longer than the context keeps its last tokens, with a warning. Raises ValueError for an empty
    prompt, an id the model does not know, and with overflow="stop" for a prompt that fills the context.
    """
    check(model, prompts, max_new_tokens, overflow)
    if compile and not use_cache:
        raise ValueError("compile=True compiles the step that reads the cache: leave use_cache=False out")
    seeds = range(seeds, seeds + len(prompts)) if isinstance(seeds, int) else seeds
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one each, or a single number")
    rows = [Row(list(prompt[-model.config.context_length :])) for prompt in prompts]
    weight = model.embed.weight
    chooser = Chooser(sampling or Sampling(), prompts, seeds, weight.size(0), n_vocab, weight.device)
    writer = Cached(model, chooser, rows, max_new_tokens, compile) if use_cache else Recomputed(model, chooser)
    return run(writer, rows, max_new_tokens, set(stop_ids), until, overflow)


def check(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int, overflow: str) -> None:
    vocab, context = model.embed.weight.size(0), model.config.context_length
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow={overflow} is not one of {', '.join(OVERFLOWS)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0")
    if not prompts:
        raise ValueError("there is no prompt: give at least one")
    for prompt in prompts:
        if not prompt:
            raise ValueError("a prompt is empty: start it with the end-of-text id, for example")
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise ValueError(f"a prompt has ids {min(prompt)} to {max(prompt)}; the model's end at {vocab - 1}")
        if overflow == "stop" and len(prompt) >= context:
            raise ValueError(
                f"a prompt has {len(prompt)} tokens, which fill the context of {context}: "
                "shorten it, or let the window slide (overflow=slide)"
            )
        if len(prompt) > context:
            warnings.warn(f"of a prompt's {len(prompt)} tokens the model sees the last {context}", stacklevel=3)


def run(
    writer: "Recomputed | Cached",
    rows: list[Row],
    max_new_tokens: int,
    stop_ids: set[int],
    until: Callable[[int, int], bool] | None,
    overflow: str,
) -> Iterator[Step]:
    context, modules = writer.model.config.context_length, list(writer.model.modules())
    following: Chosen | None = None
    for n in range(1, max_new_tokens + 1):
        # A device need not wait until the host has read its last ids; but a window that slides, the host must have seen. (The
        # prompts' step comes alone: its ids should not wait for the start of another.)
        room = all(row.ended is not None or len(row.window) < context for row in rows)
        ahead = writer.runs_ahead and 1 < n < max_new_tokens and room
        with evaluating(modules):
            chosen = following or writer.write(rows, ahead=0)
            following = writer.write(rows, ahead=1) if ahead else None
        ids: list[int | None] = [None] * len(rows)
        for r, (row, token) in enumerate(zip(rows, chosen.read(), strict=True)):
            if row.ended is not None:
                continue
            ids[r] = token
            row.append(token, context)
            if token in stop_ids or (until is not None and until(r, token)):
                row.ended = "stop"
            elif overflow == "stop" and len(row.window) >= context:
                row.ended = "context"
            elif n == max_new_tokens:
                row.ended = "length"
        yield Step(ids, [row.ended for row in rows], chosen.logits)
        if all(row.ended is not None for row in rows):
            return


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards every module is in the mode it was in."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class Chosen:
    """Ids (b,) on their way from the device, and the scores (b, vocab) that they were chosen from."""

    def __init__(self, ids: Tensor, logits: Tensor):
        self.ids, self.logits = ids.to("cpu", non_blocking=ids.is_cuda, copy=True), logits
        self.arrived = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None

    def read(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        ids: list[int] = self.ids.tolist()
        if min(ids) < 0:
            raise ValueError("the model's scores are NaN or infinite: try dtype=float32, or an earlier checkpoint")
        return ids


class Recomputed:
    """Reads each row's window whole for every token: what the cache is tested against."""

    runs_ahead = False

    def __init__(self, model: Transformer, chooser: Chooser):
        self.model, self.chooser = model, chooser

    def write(self, rows: list[Row], ahead: int) -> Chosen:
        logits = last_logits(self.model, [row.window for row in rows], None)
        return Chosen(self.chooser.choose(logits), logits)


class Cached:
    """The same with a cache: the prompts at once, then one token a row and step, which does not leave the device."""

    def __init__(self, model: Transformer, chooser: Chooser, rows: list[Row], max_new_tokens: int, compile: bool = False):
        self.model = model
        self.cache = cache = model.new_cache(len(rows), max(len(row.window) for row in rows) + max_new_tokens)
        forward: Callable[[Tensor], Tensor] = Compiled(model, cache) if compile else partial(model, cache=cache)
        device = cache.lengths.device
        newest = torch.zeros(len(rows), 1, dtype=torch.long, device=device)

        def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
            ids = chooser.choose(logits)
            newest.copy_(ids.clamp(min=0)[:, None])
            return ids, logits

        def step() -> tuple[Tensor, Tensor]:
            logits = forward(newest)[:, -1]
            cache.longest -= 1  # a recording may be given up, and `cut` says before each step how long the rows are
            return choose(logits)

        # Neither holds this object, which holds them: else the cache would stay until Python looks for cycles.
        self.choose = choose
        # A token with nothing before it is written another way.
        self.step = Recorded(step, lambda: cache.longest and cache.reach(1), recorder(model, device))
        self.runs_ahead = device.type == "cuda"
        self.lengths: list[int] = []  # of the windows that the cache holds, but for their newest token

    def write(self, rows: list[Row], ahead: int) -> Chosen:
        """The next id of each row, whose window is to get `ahead` more that are still on their way."""
        lengths = [len(row.window) - 1 + (ahead if row.ended is None else 0) for row in rows]
        if not self.lengths:
            ids, logits = self.choose(self.prefill([row.window for row in rows]))
        else:
            for r, row in enumerate(rows):
                if row.ended is None and lengths[r] != self.lengths[r] + 1:
                    self.refill(r, row.window[:-1])
            # All but the newest token is in. (What a row that has ended goes on to write, nobody reads.)
            self.cache.cut(lengths)
            ids, logits = self.step()
        self.lengths = lengths
        return Chosen(ids, logits)

    def prefill(self, windows: list[list[int]]) -> Tensor:
        """Prompts that are alike, those of several samples, are read once."""
        places = {window: n for n, window in enumerate(dict.fromkeys(map(tuple, windows)))}
        if len(places) == len(windows):
            return last_logits(self.model, windows, self.cache)
        once = self.model.new_cache(len(places), max(map(len, windows)))
        logits = last_logits(self.model, [list(window) for window in places], once)
        rows = [places[tuple(window)] for window in windows]
        self.cache.copy_from(once, rows)
        return logits[rows]

    def refill(self, r: int, window: list[int]) -> None:
        """The window has slid: its tokens have new positions, so their keys and values are computed anew."""
        cache = self.cache.row(r)
        if window:
            self.model.features(torch.tensor([window], device=cache.lengths.device), cache)


def last_logits(model: Transformer, windows: list[list[int]], cache: KVCache | None) -> Tensor:
    """(b, vocab) scores after each window. Shorter ones are padded at their end, where no token sees it."""
    device = model.embed.weight.device
    lengths = [len(window) for window in windows]
    padded = [window + [0] * (max(lengths) - len(window)) for window in windows]
    features = model.features(torch.tensor(padded, device=device), cache)
    if cache is not None:
        cache.cut(lengths)
    last = features[torch.arange(len(windows), device=device), torch.tensor(lengths, device=device) - 1]
    return model.head(last)
