"""Where the numbers live, and how wide they are."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cuda", "mps", "cpu")


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes the best there is; a device asked for by name is used or refused, never replaced."""
    kind = name.split(":")[0]
    if kind not in DEVICES:
        raise ValueError(f"device={name} is not one of {', '.join(DEVICES)}")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if kind == "auto":
        kind = name = next(kind for kind, found in there.items() if found)
    if not there[kind]:
        raise ValueError(
            f"device={name} was asked for, but this torch ({torch.__version__}) finds none: use device=auto or cpu"
        )
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
    capabilities = (
        torch.cpu.get_capabilities() if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities") else {}
    )
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
