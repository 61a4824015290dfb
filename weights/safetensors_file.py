"""Safetensors files, read tensor by tensor into memory that is already allocated.

The library's reader maps a file into memory, where the pages it touched stay until the last tensor is gone: at its peak
a model takes twice its size. Here a tensor goes from the file straight to its place in the model.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file."""

    path: Path
    dtype: str  # as the format spells it: a key of DTYPES, or a kind that no weight of ours has (integers, float8)
    shape: tuple[int, ...]
    start: int
    stop: int

    def copy_to(self, target: Tensor) -> None:
        """Fill a tensor of this shape, of any dtype and on any device; without a copy in between where it can be."""
        dtype = DTYPES[self.dtype]
        direct = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
        memory = target if direct else torch.empty(self.shape, dtype=dtype, device="cpu")
        with open(self.path, "rb") as file:
            file.seek(self.start)
            count = file.readinto(memory.view(-1).view(torch.uint8).numpy().data)
        if count != self.stop - self.start:
            raise ValueError(f"{self.path} changed while it was read: try again")
        if not direct:
            target.copy_(memory)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """What a file holds, from its header, checked against its size. Raises ValueError for a damaged file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is cut short, or no safetensors file ({size:,} bytes): fetch it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            found = {name: stored(path, 8 + length, described) for name, described in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} has a damaged header: fetch it again") from None
    end = max((tensor.stop for tensor in found.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{path} is cut short or damaged: it has {size:,} bytes of {end:,}: fetch it again")
    return found


def stored(path: Path, data: int, described: dict) -> StoredTensor:
    start, stop = described["data_offsets"]
    tensor = StoredTensor(path, described["dtype"], tuple(described["shape"]), data + start, data + stop)
    if tensor.dtype in DTYPES and math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize != stop - start:
        raise ValueError("a tensor's shape does not fit its bytes")
    return tensor
