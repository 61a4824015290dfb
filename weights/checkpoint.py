"""Checkpoints: one folder each, complete or absent.

    checkpoints/step-00000500/   model.safetensors, config.json, tokenizer files, trainer.pt
    checkpoints/latest, best     relative links, always to a complete checkpoint

A folder is written under a temporary name, synced, and renamed; a link is made under a temporary name and renamed. Whatever
moment a process dies at, `latest` names a whole checkpoint. Nothing here can run code: safetensors, JSON, `weights_only=True`.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.tokenizer import Tokenizer, load_tokenizer
from model import ModelConfig, Transformer

FORMAT = "sprout"
PREFIXES = ("_orig_mod.", "module.", "model.")  # left by torch.compile, DistributedDataParallel and NextTokenLoss


def save(
    folder: Path,
    model_config: ModelConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    trainer: dict[str, Any],
    about: dict[str, Any],
) -> None:
    """Write a complete checkpoint at `folder` or nothing. `trainer` is what resuming needs; `about` is for people and tools."""

    def write(temporary: Path) -> None:
        if model_config.tie_embeddings:
            weights.pop("head.weight", None)
        tensors = {name: w.detach().cpu().contiguous() for name, w in weights.items()}
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        described = {"format": FORMAT, "model": asdict(model_config), **about}
        (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        tokenizer.save(temporary)
        torch.save(trainer, temporary / "trainer.pt")

    write_folder(folder, write)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Run `write` in a temporary folder beside `folder`, sync it to disk, and give it its name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        write(temporary)
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        if folder.exists():  # the same step again, after a resume from before it: equal to the bit, so replace it
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative link to its neighbour `target`, in one step."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)


def steps(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".tmp" and (path / "trainer.pt").exists())


def find(path: Path) -> Path:
    """The checkpoint folder meant by a run, a `checkpoints` folder, a link or a checkpoint itself."""
    for candidate in (path, path / "latest", path / "checkpoints" / "latest"):
        if (candidate / "model.safetensors").exists() or (candidate / "config.json").exists():
            return candidate
    raise FileNotFoundError(
        f"{path} holds no checkpoint: give a run (runs/...), one of its checkpoints, or a Hugging Face folder"
    )


def newest(runs: Path = Path("runs")) -> Path:
    """The run whose latest checkpoint is the youngest."""
    found = [(link.stat().st_mtime, link.parent.parent) for link in runs.glob("**/checkpoints/latest") if link.exists()]
    if not found:
        raise FileNotFoundError(
            f"no run with a checkpoint in {runs}/: train one with `python train.py`, or give --checkpoint"
        )
    return max(found)[1]


def is_ours(folder: Path) -> bool:
    return read_config(folder).get("format") == FORMAT


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        described = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {folder} is no checkpoint") from None
    except ValueError as error:
        raise ValueError(damaged(path, error)) from None
    return described


def model_config(folder: Path) -> ModelConfig:
    known = {field.name for field in fields(ModelConfig)}
    values = read_config(folder)["model"]
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{folder / 'config.json'} has model keys this version does not know: {', '.join(unknown)}")
    return ModelConfig(**values)


def load_model(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Transformer:
    """The model of one of our checkpoints, in its own dtype unless told otherwise."""
    model = Transformer(model_config(folder))
    weights = read_weights(folder / "model.safetensors", device)
    dtype = dtype or weights["embed.weight"].dtype
    model.to(device=device, dtype=dtype)
    assign(model, weights, folder / "model.safetensors")
    return model


def assign(model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
    """Copy weights into a model; names must match exactly, apart from prefixes that wrappers leave."""
    weights = {strip(name): w for name, w in weights.items()}
    own = model.state_dict()
    if model.config.tie_embeddings:
        own.pop("head.weight")
        weights.pop("head.weight", None)
    for what, names in (("lacks", own.keys() - weights.keys()), ("has unknown", weights.keys() - own.keys())):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ValueError(f"{source} {what} weights: {some}{' ...' if len(names) > 3 else ''} ({len(names)} in all)")
    for name, w in own.items():
        if w.shape != weights[name].shape:
            raise ValueError(f"{source}: {name} is {tuple(weights[name].shape)}, the model needs {tuple(w.shape)}")
        w.copy_(weights[name])


def strip(name: str) -> str:
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name.replace("._orig_mod.", ".")


def read_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: use another checkpoint of the run") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(damaged(path, error)) from None


def read_trainer(folder: Path) -> dict[str, Any]:
    path = folder / "trainer.pt"
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: {folder} can be sampled or given to init_from, not resumed"
        ) from None
    except Exception as error:  # a damaged file raises one of many types
        raise ValueError(damaged(path, error)) from None


def damaged(path: Path, error: Exception) -> str:
    """One line that names the file, and an older complete checkpoint if there is one."""
    others = [other for other in steps(path.parent.resolve().parent) if other != path.parent.resolve()]
    remedy = f"use the older {others[-1]}" if others else "no other checkpoint lies beside it"
    return f"{path} is damaged ({' '.join(str(error).split())[:120]}): {remedy}"


def load(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Transformer, Tokenizer]:
    return load_model(folder, device, dtype), load_tokenizer(folder)
