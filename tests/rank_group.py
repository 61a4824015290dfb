"""Processes that meet as torchrun's do, without a torch import for each of them."""

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "numpy", "hydra", "train"]
PRELOAD += ["matplotlib.backends.backend_agg", "matplotlib.figure"]
PATIENCE = 150  # seconds that a process may keep the others waiting


class Team:
    """One process's place among `size`, which can meet several times, each time as many of them as it takes."""

    def __init__(self, rank: int, size: int, barrier: Any, port: Any):
        self.rank, self.size, self.barrier, self.port = rank, size, barrier, port

    @contextlib.contextmanager
    def of(self, world: int) -> Iterator[bool]:
        """Sets what torchrun sets. True for the first `world` processes; the others wait until these are done."""
        if self.rank == 0:
            self.port.value = free_port()
        self.barrier.wait(PATIENCE)
        os.environ.update(WORLD_SIZE=str(world), RANK=str(self.rank), LOCAL_RANK=str(self.rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port.value))
        yield self.rank < world
        if dist.is_initialized():
            dist.destroy_process_group()
        self.barrier.wait(PATIENCE)


def on_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(team, *args)` returned in each process. AssertionError with the traceback of the first that failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    answers, barrier, port = context.Queue(), context.Barrier(size), context.Value("i", 0)
    teams = [Team(rank, size, barrier, port) for rank in range(size)]
    processes = [context.Process(target=run, args=(team, answers, work, args), daemon=True) for team in teams]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < size:
            rank, error, value = answers.get(timeout=2 * PATIENCE)
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = value
    finally:
        for process in processes:
            process.join(1 if len(found) == size else 0)
            process.kill()
    return [found[rank] for rank in range(size)]


def run(team: Team, answers: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answers.put((team.rank, None, work(team, *args)))
    except BaseException:
        answers.put((team.rank, traceback.format_exc(), None))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
