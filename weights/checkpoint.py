"""Checkpoints: one folder each, complete or absent.

    checkpoints/step-00000500/   model.safetensors, config.json, tokenizer files, trainer.pt
    checkpoints/latest, best     relative links, always to a complete checkpoint

A folder is written under a temporary name, synced, and renamed; a link is made under a temporary name and renamed. Whatever
moment a process dies at, `latest` names a whole checkpoint. Nothing here can run code: safetensors, JSON, `weights_only=True`.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import xxhash
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
    tied = {"head.weight"} if model_config.tie_embeddings else set()
    tensors = {name: w.detach().cpu().contiguous() for name, w in weights.items() if name not in tied}

    def write(temporary: Path) -> None:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        described = {"format": FORMAT, "model": asdict(model_config), **about}
        (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        tokenizer.save(temporary)
        with open(temporary / "trainer.pt", "wb") as file:  # opened here: torch would hide why a write fails
            torch.save({**trainer, "digest": digest(tensors)}, file)

    write_folder(folder, write)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Run `write` in a temporary folder beside `folder`, sync it to disk, and give it its name."""
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        with writing(folder):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write(temporary)
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            if folder.exists():  # the same step again, after a resume from before it
                shutil.rmtree(folder)
            temporary.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong while `path` is written is told in one line that names it (torch and safetensors wrap OSErrors)."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(cause, "strerror", None) or " ".join(str(error).split())[:120]
        raise OSError(f"{path} could not be written ({reason}): make room there, or choose another place") from error


def write_text(path: Path, text: str) -> None:
    """All of the text or, if that fails, what the file held before."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        temporary.write_text(text)
        sync(temporary)
        os.replace(temporary, path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative link to its neighbour `target`, in one step."""
    temporary = link.with_name(link.name + ".tmp")
    with writing(link):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        os.replace(temporary, link)


def steps(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".tmp" and (path / "trainer.pt").exists())


def find(path: Path) -> Path:
    """The checkpoint folder meant by a run, a `checkpoints` folder, a link or a checkpoint itself."""
    for candidate in (path, path / "latest", path / "checkpoints" / "latest", *steps(path / "checkpoints")[-1:]):
        if (candidate / "model.safetensors").exists() or (candidate / "config.json").exists():
            return candidate
    raise FileNotFoundError(
        f"{path} holds no checkpoint: give a run (runs/...), one of its checkpoints, or a Hugging Face folder"
    )


def newest(runs: Path = Path("runs")) -> Path:
    """The run whose latest checkpoint is the youngest."""
    found = [(link.stat().st_mtime, link.parent.parent) for link in runs.glob("**/checkpoints/latest") if link.exists()]
    if not found:
        raise FileNotFoundError(f"no run with a checkpoint in {runs}/: train one with `python train.py`, or give --checkpoint")
    return max(found)[1]


def is_ours(folder: Path) -> bool:
    return read_config(folder).get("format") == FORMAT


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {folder} is no checkpoint") from None
    except (ValueError, TypeError) as error:
        raise ValueError(damaged(path, error)) from None


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
    model.to(device=device, dtype=dtype or weights["embed.weight"].dtype)
    assign(model, weights, folder / "model.safetensors")
    return model


def assign(model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
    """Copy weights into a model; the names must match exactly."""
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


def read_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file, without the prefixes that wrappers leave before their names."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names = file.keys()
            return {bare(name): file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: use another checkpoint of the run") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(damaged(path, error)) from None


def bare(name: str) -> str:
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name.replace("._orig_mod.", ".")


def digest(weights: dict[str, Tensor]) -> str:
    """A checksum of all weights, whatever order they come in."""
    hashed = xxhash.xxh3_128()
    for name in sorted(weights):
        hashed.update(weights[name].flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def read_trainer(folder: Path) -> dict[str, Any]:
    """What resuming needs besides the weights; raises ValueError, too, if the weights are not those it was saved with."""
    path = folder / "trainer.pt"
    try:
        if (bad := zipfile.ZipFile(path).testzip()) is not None:  # torch does not look at the checksums
            raise ValueError(f"its part {bad} has a wrong checksum")
        trainer = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {folder} can be sampled or given to init_from, not resumed") from None
    except Exception as error:  # a damaged file raises one of many types
        raise ValueError(damaged(path, error)) from None
    weights = folder / "model.safetensors"
    if trainer.pop("digest") != digest(read_weights(weights)):
        raise ValueError(damaged(weights, ValueError("its checksum is wrong")))
    return trainer


def damaged(path: Path, error: Exception) -> str:
    """One line that names the file and, if there is one, the newest other checkpoint that is whole."""
    own, others = path.parent.resolve().name, reversed(steps(path.parent.parent))
    good = next((other for other in others if other.name != own and is_whole(other)), None)
    remedy = f"{good} is whole, use that" if good else "no other checkpoint lies beside it"
    return f"{path} is damaged ({' '.join(str(error).split())[:120]}): {remedy}"


def is_whole(folder: Path) -> bool:
    try:
        with safe_open(folder / "model.safetensors", framework="pt"), zipfile.ZipFile(folder / "trainer.pt") as trainer:
            return trainer.testzip() is None and bool(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
        return False


def load(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[Transformer, Tokenizer]:
    return load_model(folder, device, dtype), load_tokenizer(folder)
