"""One process or many: who am I, and what do we all agree on."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Ranks:
    """This process among `world`, as torchrun started them; alone if it did not."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> "Ranks":
        if "RANK" not in os.environ:
            return cls()
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0)))

    @property
    def main(self) -> bool:
        return self.rank == 0

    def start(self, device: torch.device) -> None:
        if self.world > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, value: Tensor) -> Tensor:
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def wrap(self, objective: nn.Module) -> nn.Module:
        if self.world == 1:
            return objective
        return nn.parallel.DistributedDataParallel(objective)

    def exchanging(self, objective: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged after the last micro-batch only."""
        if isinstance(objective, nn.parallel.DistributedDataParallel) and not last:
            return objective.no_sync()
        return nullcontext()
