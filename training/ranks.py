"""One process or many, as torchrun started them: who am I, what do we agree on, and how the model is spread over us."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from training.objective import NextTokenLoss

T = TypeVar("T")
LOST = "another rank has ended: the report below says how; resume=... goes on from the last checkpoint"
PATIENCE = timedelta(minutes=30)  # with a silent rank, as while rank 0 saves; a dead one is noticed at once
FOREVER = timedelta(days=30)  # rank 0 prepares the data


@dataclass
class Ranks:
    """This process among `world`; alone if nobody started it as one of several."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among those of this machine: which of its GPUs is mine
    store: dist.Store | None = None  # a word between ranks that are not at the same point of the program
    turns: int = 0

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Meet the others. CPU tensors travel by gloo, those on GPUs by NCCL."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls()
        store, rank, world = next(dist.rendezvous("env://"))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world, timeout=PATIENCE)
        return cls(rank, world, int(os.environ.get("LOCAL_RANK", 0)), store)

    @property
    def main(self) -> bool:
        """The one that prints and writes."""
        return self.rank == 0

    def stop(self) -> None:
        """Leave together: launchers end the other ranks when one has left because of a signal, and rank 0 may be saving."""
        if self.store is not None:
            self.highest(0)
            dist.destroy_process_group()

    def first_to_fail(self) -> bool:
        """Whether to tell about an error that ends the run: the first rank that meets one does, the others end silently."""
        try:
            return self.store is None or self.store.add("failed", 1) == 1
        except RuntimeError:  # the store is gone, with the process that kept it: that one was first
            return False

    def main_first(self, make: Callable[[], T]) -> T:
        """What `make` returns, made on rank 0 before the others begin, so that they find what it has left on disk."""
        if self.store is None:
            return make()
        self.turns += 1
        if not self.main:
            self.store.wait([f"turn {self.turns}"], FOREVER)
        try:
            return make()
        finally:
            self.store.set(f"turn {self.turns}", "")  # after an error too: the others then meet it themselves

    def agree(self, value: T) -> T:
        """Rank 0's value, on every rank; none goes on before all have come here."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values[0]

    def sum(self, value: Tensor) -> Tensor:
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def highest(self, number: int) -> int:
        """The largest of the ranks' numbers, on every rank."""
        if self.world == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def wrap(self, objective: NextTokenLoss, parallel: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The objective on its device, as training calls it. `ddp`: each rank holds all of it (Li et al. 2020)."""
        if device.type not in ("cuda", "cpu") and self.world > 1:
            raise ValueError(f"device={device.type} cannot talk to the {self.world - 1} other rank(s): use cuda or cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if parallel == "fsdp" and self.world > 1:
            return shard(objective, self.world, device, dtype)
        objective.to(device)
        if self.world == 1:
            return objective
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(objective, ids, gradient_as_bucket_view=True)

    def exchanging(self, objective: Any, last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged after the last micro-batch only."""
        if isinstance(objective, DistributedDataParallel):
            return nullcontext() if last else objective.no_sync()
        if hasattr(objective, "set_requires_gradient_sync"):
            objective.set_requires_gradient_sync(last)
        return nullcontext()

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` with whole tensors in place of parts, on rank 0; every rank has to call this, the others get no values."""

        def gathered(value: Any) -> Any:
            value = whole(value)
            return None if not self.main else value.cpu() if isinstance(value, Tensor) else value

        return tree_map(gathered, state)


# Tensors and modules in parts are told by what they can do: importing torch.distributed.tensor takes a second that one
# process need not spend.


def shard(objective: NextTokenLoss, world: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """FSDP2: each rank holds its part of weights, gradients and optimizer state; whole are only the weights of the block that
    runs, and of the next (Rajbhandari et al. 2020, stage 3; Zhao et al. 2023)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if dtype == torch.float16:
        raise ValueError("dtype=float16 needs its loss scaled, which parallel=fsdp does not do: use bfloat16, or parallel=ddp")
    mixed = device.type == "cuda" and dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(dtype, torch.float32) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (world,))
    for part in (*objective.model.blocks, objective):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return objective


def lost_a_rank(error: BaseException) -> bool:
    """Whether this is what the ranks meet that were waiting for one that has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@contextmanager
def callable_in_parts(objective: Any) -> Iterator[None]:
    """Lets a model's modules be called one by one, as generation does; every rank has to make the same calls."""
    spread = hasattr(objective, "unshard")
    if spread:
        objective.unshard()
    yield
    if spread:
        objective.reshard()


def whole(value: Any) -> Any:
    """All of a tensor of which each rank holds a part, once every rank has asked; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def part_like(value: Tensor, like: Any) -> Tensor:
    """Of `value`, which every rank holds whole, what this rank holds of `like`, on its device."""
    value = value.to(like.device)
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
