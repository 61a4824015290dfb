"""One decoding step as a CUDA graph: the host starts one recording, where it would start hundreds of kernels one by one.

What a recording does, it does with the same addresses each time: so all that changes from step to step (the newest ids, each
row's length, position and ids seen) stands in tensors that are written in place, and nothing asks the device for a number.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], tuple[Tensor, ...]]
Record = Callable[[Step], tuple[Callable[[], object], tuple[Tensor, ...]]]  # -> replay, and where the results then stand


def recorder(model: nn.Module, device: torch.device) -> Record | None:
    """How steps of this model are recorded; None: not at all. A replay would leave out what hooks do on the host."""
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return None if device.type != "cuda" or hooked else CudaGraphs(device)


class CudaGraphs:
    """Recordings that share their memory, since no two run at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool: Any = None

    def __call__(self, step: Step) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):  # other threads may do as they like
            results = step()
        return graph.replay, results


class Recorded:
    """`step()`, recorded once for each `shape()`, on whose value everything in it depends that is no tensor's content."""

    def __init__(self, step: Step, shape: Callable[[], int], record: Record | None):
        self.step, self.shape, self.record = step, shape, record
        self.seen: set[int] = set()
        self.recordings: dict[int, tuple[Callable[[], object], tuple[Tensor, ...]]] = {}

    def __call__(self) -> tuple[Tensor, ...]:
        shape = self.shape()
        if self.record is None or shape not in self.seen:
            self.seen.add(shape)  # libraries set themselves up when they meet a shape, which may not be recorded
            return self.step()
        if shape not in self.recordings:
            try:
                self.recordings[shape] = self.record(self.step)
            except RuntimeError as error:
                self.record = None
                warnings.warn(f"decoding goes on without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
                return self.step()
        replay, results = self.recordings[shape]
        replay()
        return tuple(result.clone() for result in results)  # the next replay writes over them
