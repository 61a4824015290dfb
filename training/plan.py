"""What a run will take, told before anyone pays for it: `dry_run=true`.

Memory is counted, not modelled: two optimizer steps run on fake tensors, which have shapes but no data, while every allocation is
watched. So it costs seconds, whatever the size of the model. Time is measured, in a few real steps.
"""

import os
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
from training.batches import Batches
from training.flops import flops_per_token
from training.objective import NextTokenLoss, recompute_blocks
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer
from training.ranks import Ranks
from training.reporting import clock, peak_memory
from training.update import Precision, accumulate

KINDS = ("weights", "gradients", "optimizer", "activations", "logits")
REMEDY = "Lower micro_batch_size, model.context_length or the model's size"
CHINCHILLA = 20  # tokens a parameter: about what a training budget is best spent on (Hoffmann et al. 2022)


@dataclass
class Plan:
    parameters: dict[str, int]  # by part of the model
    memory: dict[str, int]  # bytes, by kind, at the moment when they are most
    process: int  # bytes besides: what this process held before
    tokens: int  # over the whole run
    epochs: float
    flops: float  # over the whole run
    passing: int  # bytes: activations and logits, when they are most
    cache: int  # bytes a token and row of the KV cache, in float32
    free: int  # bytes that this device can still give

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) < self.free

    def __str__(self) -> str:
        n = sum(self.parameters.values())
        each = self.tokens / n
        return "\n".join(
            [
                *rows("parameters", self.parameters, lambda count: f"{count:,}"),
                f"tokens        {self.tokens:,}: {self.epochs:.2f} epochs, {each:.1f} a parameter (Chinchilla's: {CHINCHILLA})",
                f"arithmetic    {self.flops:.3g} floating-point operations",
                f"KV cache      {self.cache:,} bytes a token in float32",
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
    steps: int,
    weights: torch.dtype = torch.float32,
) -> Plan:
    """Memory is that of one device, whose weights have this dtype; the rest is that of all."""
    shapes = FakeTensorMode()
    with shapes, Allocations(config.vocab_size) as seen:
        with torch.device(precision.device), default_dtype(weights):
            model = Transformer(config)
        seen.are("weights", model.parameters())
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.are("gradients", [p.grad]))
        if recompute:
            recompute_blocks(model)
        objective, updates = NextTokenLoss(model), make_optimizer(optimizer, model)
        batch = torch.zeros(batches.micro, config.context_length, dtype=torch.long, device=precision.device)
        for _ in range(2):  # the optimizer's state comes into being in the first
            seen.passing = 0
            update(objective, updates, [(batch, batch)] * (batches.share // batches.micro), Ranks(), precision)
            seen.are("optimizer", tree_leaves(list(updates.state.values())))
    parameters = Counter[str]()
    for name, p in model.named_parameters():
        parameters[part_of(name)] += p.numel()
    memory = {kind: seen.peak.get(kind, 0) for kind in KINDS}
    sequences = steps * batches.share * batches.ranks.world
    tokens = sequences * config.context_length
    cache = 2 * config.n_layers * config.kv_heads * config.head_width * 4
    flops = tokens * flops_per_token(model)
    epochs, free = sequences / len(batches.windows), available(precision.device)
    return Plan(dict(parameters), memory, resident(), tokens, epochs, flops, seen.passing, cache, free)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def update(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[tuple[Tensor, Tensor]],
    ranks: Ranks,
    precision: Precision,
) -> None:
    """What a training step does, as far as it costs."""
    accumulate(objective, micro_batches, 1, ranks=ranks, seed=(0, 0), precision=precision)
    clip_gradients(objective.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


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


def prediction(steps: int, step: float, evaluations: int, evaluation: float, device: torch.device) -> str:
    """The time that a run takes whose steps and evaluations take so many seconds, and the memory that they took just now."""
    total = clock(steps * step + evaluations * evaluation)
    return (
        f"time          {total}: {steps:,} steps of {step:.3g} s, {evaluations:,} evaluations of {evaluation:.3g} s\n"
        f"measured      {mib(peak_memory(device))} at the peak, with what the allocator holds back"
    )


def part_of(name: str) -> str:
    kinds = {"norm": "norms", "attention": "attention", "mlp": "mlp", "position": "positions", "head": "head"}
    return next((part for word, part in kinds.items() if word in name.removeprefix("blocks.")), "embedding")


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


def available(device: torch.device) -> int:
    """Bytes that this process can still get."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        return free * 1024
    except OSError:
        return 1 << 62


def resident() -> int:
    """Bytes of main memory that this process holds (where the system tells)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory(torch.device("cpu"))
