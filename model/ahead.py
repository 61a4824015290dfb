"""Several steps of decoding before the host looks at what was chosen: a GPU must not wait for Python between two tokens.

A step (model, choice, append) is tensors alone, so CUDA can record it once for each number of keys that it reads, and replay it.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.cache import KVCache
from model.sampling import Chooser

if TYPE_CHECKING:
    from model.generation import Cached, Row

STEPS = 16  # a row that ends is continued in vain for fewer steps than this


class Ahead:
    """The ids that one step after the other would choose, STEPS at a time."""

    def __init__(self, scorer: "Cached", chooser: Chooser):
        self.scorer, self.chooser, kv = scorer, chooser, scorer.cache
        self.newest = torch.zeros_like(kv.lengths)[:, None]
        self.take = Recorded(self.step, kv) if kv.lengths.is_cuda else self.step
        self.found: deque[tuple[Tensor, list[int]]] = deque()

    def next(self, rows: list["Row"], left: int) -> tuple[Tensor, list[int]]:
        """Scores (b, vocab) and the id chosen in each row; `left` more steps may follow."""
        if not self.found:
            # What the host has to arrange (prompts, windows that slide) is done in the first of these steps.
            logits = self.scorer.logits(rows)
            steps = [(logits, self.chooser.choose(logits))]
            self.newest.copy_(steps[0][1][:, None])
            kv = self.scorer.cache
            room = min(kv.capacity, self.scorer.model.config.context_length) - kv.longest
            steps += [self.take() for _ in range(min(STEPS - 1, left, room))]
            chosen = torch.stack([ids for _, ids in steps]).tolist()  # the only wait for the device
            self.found.extend((logits, ids) for (logits, _), ids in zip(steps, chosen, strict=True))
        return self.found.popleft()

    def step(self) -> tuple[Tensor, Tensor]:
        logits = self.scorer.step(self.newest)[:, -1]
        chosen = self.chooser.choose(logits)
        self.newest.copy_(chosen[:, None])
        return logits, chosen


class Recorded:
    """A step as one CUDA graph for each number of keys read, instead of a launch for each kernel."""

    def __init__(self, step: Callable[[], tuple[Tensor, Tensor]], kv: KVCache):
        self.step, self.kv = step, kv
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self.met: set[int] = set()

    def __call__(self) -> tuple[Tensor, Tensor]:
        read, longest = self.kv.reach(1), self.kv.longest
        if read not in self.met:  # what is compiled or set up at its first use cannot be recorded
            self.met.add(read)
            return self.step()
        if read not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # computes nothing
                logits, chosen = self.step()
            self.graphs[read] = graph, (logits, chosen)
        graph, (logits, chosen) = self.graphs[read]
        graph.replay()
        self.kv.longest = longest + 1  # the host's own count; all else that a step changes is on the device
        return logits.clone(), chosen.clone()
