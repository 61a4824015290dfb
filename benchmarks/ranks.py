"""Several ranks on this machine's CPU: what a step takes in time, memory and bytes sent, measured against training/plan_ranks.py.

`unshare --net sh -c "ip link set lo up; python -m benchmarks.ranks"` (as root) counts the bytes of these processes alone;
without `unshare`, those of all programs that talk over the loopback device meanwhile.
"""

import gc
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import forget_peak, resident, store
from model import ModelConfig, Transformer
from training.objective import NextTokenLoss
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer
from training.plan_ranks import plan_ranks
from training.ranks import Ranks
from training.update import Precision, accumulate

CPU = torch.device("cpu")
CONFIG = ModelConfig(vocab_size=4096, context_length=64, n_layers=8, n_heads=8, d_model=384, tie_embeddings=False)
CASES = [(1, "ddp", 1), *((2, p, m) for p in ("ddp", "fsdp") for m in (1, 2)), (4, "ddp", 1), (4, "fsdp", 1)]
SPEED = ModelConfig(vocab_size=4096, context_length=256, n_layers=4, n_heads=4, d_model=192, d_ff=512)


class Trainee:
    def __init__(self, config: ModelConfig, ranks: Ranks, parallel: str):
        torch.manual_seed(0)
        self.ranks, self.model = ranks, Transformer(config)
        self.wrapped = ranks.wrap(NextTokenLoss(self.model), parallel, CPU, torch.float32)
        self.optimizer = make_optimizer(OptimizerConfig(), self.model)
        self.precision = Precision(CPU, torch.float32)
        self.config = config

    def step(self, micro_batches: int, sequences: int, exchange: bool = True) -> None:
        """`sequences` in each micro-batch."""
        ids = torch.randint(0, self.config.vocab_size or 0, (sequences, self.config.context_length + 1))
        batches = [(ids[:, :-1], ids[:, 1:])] * micro_batches
        n_targets = ids[:, 1:].numel() * micro_batches * self.ranks.world
        if exchange:
            accumulate(self.wrapped, batches, n_targets, ranks=self.ranks, seed=(0, 0), precision=self.precision)
        else:
            with self.ranks.exchanging(self.wrapped, last=False):
                self.wrapped(*batches[0])[0].backward()
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def sent() -> int:
    """Bytes that have left by the loopback device."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split(":")[1].split()[8])


def memory_and_bytes(ranks: Ranks, parallel: str, micro_batches: int) -> dict[str, Any]:
    steps = 3
    Trainee(replace(CONFIG, n_layers=1, d_model=64), ranks, parallel).step(micro_batches, 1)  # loads what is used first now
    gc.collect()
    before = resident()
    trainee = Trainee(CONFIG, ranks, parallel)
    trainee.step(micro_batches, 1)
    meet(ranks)
    forget_peak()
    began = sent()
    for _ in range(steps):
        trainee.step(micro_batches, 1)
    meet(ranks)
    measured = {"memory": resident("VmHWM") - before, "sent": (sent() - began) / steps / ranks.world}
    n = sum(p.numel() for p in trainee.model.parameters())
    none = {"ddp": 0, "fsdp": 0}  # next to nothing, with one short sequence
    plans = plan_ranks(CONFIG, ranks.world, optimizer=8 * n, activations=none, micro_batches=micro_batches, gathered_bytes=4)
    plan = plans[parallel]
    if parallel == "fsdp":  # gloo sums before it scatters
        plan.sent += (ranks.world - 1) / ranks.world * 4 * n
    return {"measured": measured, "planned": {"memory": plan.memory, "sent": plan.sent}, "parameters": n}


def meet(ranks: Ranks) -> None:
    if ranks.world > 1:
        dist.barrier()


def speed(ranks: Ranks, rounds: int = 7) -> dict[str, float]:
    """Seconds a step, of 8 sequences in all unless it says half; each rank has one thread."""
    alone, ddp, fsdp = Trainee(SPEED, Ranks(), "ddp"), Trainee(SPEED, ranks, "ddp"), Trainee(SPEED, ranks, "fsdp")
    first = ranks.main
    contestants = {
        "1 rank": lambda: first and alone.step(1, 8),  # type: ignore[func-returns-value]
        "1 rank, 2 threads": lambda: first and on_two_threads(alone),  # type: ignore[func-returns-value]
        "1 rank, half the batch": lambda: first and alone.step(1, 4),  # type: ignore[func-returns-value]
        "2 ranks, no exchange": lambda: ddp.step(1, 4, exchange=False),
        "2 ranks, ddp": lambda: ddp.step(1, 4),
        "2 ranks, fsdp": lambda: fsdp.step(1, 4),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            for _ in range(2):
                meet(ranks)
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
    return {name: median(times[2:]) for name, times in seconds.items()} | {
        f"{name}, fastest": min(times) for name, times in seconds.items()
    }


def on_two_threads(trainee: Trainee) -> None:
    torch.set_num_threads(2)
    trainee.step(1, 8)
    torch.set_num_threads(1)


def work(rank: int, world: int, port: int, answers: Any, what: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = Ranks.from_environment()
    found = globals()[what](ranks, *args)
    ranks.stop()
    if rank == 0:
        answers.put(found)


def on_ranks(world: int, port: int, what: str, *args: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=work, args=(rank, world, port, answers, what, args)) for rank in range(world)]
    for process in processes:
        process.start()
    found = answers.get(timeout=300)
    for process in processes:
        process.join()
    return found


def main() -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # what is freed goes back to the system
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    port = 29700
    for world, parallel, micro_batches in CASES:
        port += 1
        case = {"ranks": world, "parallel": parallel, "micro-batches": micro_batches}
        rows.append(case | on_ranks(world, port, "memory_and_bytes", parallel, micro_batches))
        print(rows[-1], flush=True)
    seconds = on_ranks(2, port + 1, "speed")
    print(seconds)
    store("ranks", rows, {"seconds a step": seconds})


if __name__ == "__main__":
    main()
