"""One decoding step as a CUDA graph: the host starts one recording, where it would start hundreds of kernels one by one.

What a recording does, it does with the same addresses each time: so all that changes from step to step (the newest ids, each
row's length, position and ids seen) stands in tensors that are written in place, and nothing asks the device for a number.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

Work = Callable[[], tuple[Tensor, ...]]
Recording = tuple[Callable[[], object], tuple[Tensor, ...]]  # what replays it, and where its results then stand


def recorder(model: nn.Module, device: torch.device) -> Callable[[Work], Recording] | None:
    """How steps of this model are recorded; None: not at all. A replay would leave out what hooks do on the host; and a
    recording that fails may take along the state of CUDA's random numbers, which training needs."""
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return None if device.type != "cuda" or hooked or model.training else CudaGraphs(device)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: a pool's memory is used again on its own stream only, and libraries keep a workspace for each."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Recordings that share their memory, since no two run at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool: Any = None

    def __call__(self, work: Work) -> Recording:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        recording = torch.cuda.graph(graph, self.pool, side_stream(self.device), capture_error_mode="thread_local")
        # torch does not return to the stream before it when a recording fails: the outer `stream` does.
        with torch.cuda.device(self.device), torch.cuda.stream(before), recording:
            results = work()
        self.pool = graph.pool()
        return graph.replay, results


class Recorded:
    """`work()`, recorded once for each `shape()`, on whose value everything in it depends that is no tensor's content."""

    def __init__(self, work: Work, shape: Callable[[], int], record: Callable[[Work], Recording] | None):
        self.work, self.shape, self.record = work, shape, record
        self.seen: set[int] = set()
        self.recordings: dict[int, Recording] = {}

    def __call__(self) -> tuple[Tensor, ...]:
        shape = self.shape()
        if self.record is None or shape not in self.seen:
            self.seen.add(shape)  # libraries set themselves up when they meet a shape, which may not be recorded
            return self.work()
        if shape not in self.recordings:
            try:
                self.recordings[shape] = self.record(self.work)
            except RuntimeError as error:
                self.record = None
                warnings.warn(f"decoding goes on without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
                return self.work()
        replay, results = self.recordings[shape]
        replay()
        return tuple(result.clone() for result in results)  # the next replay writes over them
