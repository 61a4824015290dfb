"""Where the numbers live, how wide they are, and how they are computed: alike each time."""

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from model.decoding import why

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cuda", "mps", "cpu")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
REMEDY = "Lower micro_batch_size, model.context_length or the model's size"


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes the best there is; a device asked for by name is used or refused, never replaced."""
    kind, _, number = name.partition(":")
    if kind not in DEVICES or (":" in name and not (number.isdecimal() and kind != "auto")):
        raise ValueError(f"device={name} is not one of {', '.join(DEVICES)} (or cuda:1 and so on)")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if kind == "auto":
        kind = name = next(kind for kind, found in there.items() if found)
    if not there[kind]:
        raise ValueError(f"device={name} was asked for, but this torch ({torch.__version__}) finds none: use device=auto or cpu")
    if kind == "cuda" and int(number or local_rank) >= torch.cuda.device_count():
        raise ValueError(f"device={name} was asked for, but there are only {torch.cuda.device_count()} such devices")
    return torch.device(f"cuda:{local_rank}" if name == "cuda" else name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it faster (CUDA; CPUs that say so), float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name} is not one of auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type != "cuda":
        raise ValueError(f"dtype=float16 needs CUDA; on {device.type} use float32 or bfloat16")
    return DTYPES[name]


def fast_bfloat16(device: torch.device) -> bool:
    capabilities = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def set_up(device: torch.device, compiled: bool) -> None:
    """The same inputs give the same bits, as an exact resume needs: eager CPU code does that of its own accord, CUDA's fast
    kernels and torch.compile's (embedding's backward, several threads) only when asked. And glibc keeps what a step frees for the
    next one: handing it back to the kernel and asking again costs a small model a tenth of its time in page faults."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(device.type == "cuda" or compiled, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def try_compiled(objective: nn.Module, step: nn.Module, batch: tuple[Tensor, Tensor], autocast: torch.autocast) -> str:
    """Compile `objective` now, not in the first step. Where no compiler works it stays as it was: returns why, else ""."""
    objective.compile()
    reason = ""
    try:
        with autocast:
            loss, _ = step(*batch)
        loss.backward()
    except RuntimeError as error:  # the kinds that torch.compile raises
        objective._compiled_call_impl = None
        reason = why(error)
    step.zero_grad(set_to_none=True)
    return reason


def out_of_memory(error: BaseException) -> bool:
    """torch has a type for this on devices with a memory of their own; on a CPU, words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on the device, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still get (where the system tells)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    return int(known.read_text().split("MemAvailable:")[1].split()[0]) * 1024 if known.exists() else 1 << 62


def resident() -> int:
    """Bytes of main memory that this process holds (where the system tells, else: held at most)."""
    known = Path("/proc/self/statm")
    pages = int(known.read_text().split()[1]) if known.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE") or peak_memory(torch.device("cpu"))
