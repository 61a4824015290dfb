"""What a run will take, told before anyone pays for it: `dry_run=true`.

Memory is counted, not modelled: two optimizer steps run on fake tensors, which have shapes but no data, while every allocation is
watched. So it costs seconds, whatever the size of the model. Time is measured, in a few real steps.
"""

import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import ModelConfig, Transformer
from training.batches import Batch, Batches
from training.device import REMEDY, free_memory, peak_memory, resident
from training.flops import flops_per_token
from training.objective import NextTokenLoss, recompute_blocks
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer
from training.ranks import Ranks
from training.reporting import clock
from training.update import Precision, accumulate

KINDS = ("weights", "gradients", "optimizer", "activations", "logits")
PARTS = {"norm": "norms", "attention": "attention", "mlp": "mlp", "position": "positions", "head": "head", "": "embedding"}
CHINCHILLA = 20  # tokens a parameter: about what a training budget is best spent on (Hoffmann et al. 2022)


@dataclass
class Plan:
    parameters: dict[str, int]  # by part of the model
    memory: dict[str, int]  # bytes, by kind, at the moment when they are most
    passing: int  # bytes: activations and logits, when they are most
    process: int  # bytes besides: what this process held before
    free: int  # bytes that this device can still give
    cache: int  # bytes a token and row of the KV cache, in float32
    tokens: int  # over the steps that it has still to take, as are the next two
    epochs: float
    flops: float

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) < self.free

    def __str__(self) -> str:
        each = self.tokens / sum(self.parameters.values())
        return "\n".join(
            [
                *rows("parameters", self.parameters, lambda count: f"{count:,}"),
                f"tokens        {self.tokens:,}: {self.epochs:.2f} epochs, {each:.1f} a parameter (Chinchilla's: {CHINCHILLA})",
                f"arithmetic    {self.flops:.3g} floating-point operations",
                f"KV cache      {self.cache:,} bytes a token and row in float32",
                *rows("memory at its peak", self.memory | {"process": self.process}, mib),
                f"free          {mib(self.free)}" + ("" if self.fits else f": too little. {REMEDY}"),
            ]
        )


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def rows(title: str, parts: dict[str, int], spelled: Callable[[int], str]) -> list[str]:
    cells = {**{f"  {part}": spelled(n) for part, n in parts.items()}, "  in all": spelled(sum(parts.values()))}
    width = max(map(len, cells.values()))
    return [title, *(f"{part:<14}{cell:>{width}}" for part, cell in cells.items())]


def make_plan(
    config: ModelConfig,
    optimizer: OptimizerConfig,
    batches: Batches,
    precision: Precision,
    recompute: bool,
    separate_documents: bool,
    steps: int = 1,
    weights: torch.dtype = torch.float32,
) -> Plan:
    """Memory is that of one device, whose weights have this dtype; the rest is that of all."""
    process, free = resident(), free_memory(precision.device)
    precision = Precision(precision.device, precision.dtype)  # with a scaler of its own: what is made here is fake
    with FakeTensorMode(), Allocations(config.vocab_size) as seen:
        with precision.device, default_dtype(weights):
            model = Transformer(config)
        seen.are("weights", model.parameters())
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.are("gradients", [p.grad]))
        if recompute:
            recompute_blocks(model)
        objective, updates = NextTokenLoss(model, 0 if separate_documents else None), make_optimizer(optimizer, model)
        batch = torch.zeros(batches.micro, config.context_length, dtype=torch.long, device=precision.device)
        for n in (1, min(2, batches.share // batches.micro)):  # a third micro-batch adds nothing to the second
            seen.passing = 0
            update(objective, updates, [(batch, batch)] * n, Ranks(), precision)  # the optimizer's state begins in the first
            seen.are("optimizer", tree_leaves(list(updates.state.values())))
    parameters = Counter[str]()
    for name, p in model.named_parameters():
        inside = name.removeprefix("blocks.")
        parameters[next(part for word, part in PARTS.items() if word in inside)] += p.numel()
    memory = {kind: seen.peak.get(kind, 0) for kind in KINDS}
    sequences = steps * batches.share * batches.ranks.world
    tokens, epochs = sequences * config.context_length, sequences / len(batches.windows)
    cache = 2 * config.n_layers * config.kv_heads * config.head_width * 4
    return Plan(dict(parameters), memory, seen.passing, process, free, cache, tokens, epochs, tokens * flops_per_token(model))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def update(
    objective: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[Batch], ranks: Ranks, precision: Precision
) -> None:
    """What a training step does, as far as it costs."""
    accumulate(objective, micro_batches, 1, ranks=ranks, seed=(0, 0), precision=precision)
    clip_gradients(objective.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def timed(work: Callable[[], Any], ranks: Ranks, budget: float = 10.0) -> float:
    """Median seconds, after one call to warm up: of 5 to 30 calls, as many as the budget (in seconds) allows. All ranks make as
    many."""
    work()
    seconds: list[float] = []
    while ranks.highest(int(len(seconds) < 5 or (len(seconds) < 30 and sum(seconds) < budget))):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def prediction(steps: int, step: float, eval_every: int, evaluation: float, device: torch.device) -> str:
    """The time that a run takes whose steps and evaluations take so many seconds, and the memory that they took just now."""
    evaluations = -(-steps // eval_every)
    total = clock(steps * step + evaluations * evaluation)
    return (
        f"time          {total}: {steps:,} steps of {step:.3g} s, {evaluations:,} evaluations of {evaluation:.3g} s\n"
        f"measured      {mib(peak_memory(device))} at the peak, with what the allocator holds back"
    )


class Allocations(TorchDispatchMode):
    """What is allocated while it is active: bytes by kind, and what they were when their sum was largest."""

    def __init__(self, vocab: int | None):
        super().__init__()
        self.vocab, self.kinds = vocab, weakref.WeakKeyDictionary[Any, list[str]]()
        self.live, self.peak, self.passing = Counter[str](), dict[str, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.kinds:
                self.add(tensor.untyped_storage(), "logits" if tensor.shape[-1:] == (self.vocab,) else "activations")
        return out

    def add(self, storage: Any, kind: str) -> None:
        self.kinds[storage] = is_now = [kind]
        size = storage.nbytes()
        self.live[kind] += size
        self.passing = max(self.passing, self.live["activations"] + self.live["logits"])
        weakref.finalize(storage, lambda: self.live.subtract({is_now[0]: size}))
        if sum(self.live.values()) > sum(self.peak.values()):
            self.peak = {kind: size for kind, size in self.live.items() if size}

    def are(self, kind: str, tensors: Any) -> None:
        """Tell what some of the tensors are."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self.kinds:
                self.live[self.kinds[storage][0]] -= storage.nbytes()
                self.live[kind] += storage.nbytes()
                self.kinds[storage][0] = kind
