"""Checkpoints: one folder each, complete or absent.

    checkpoints/step-00000500/   model.safetensors, config.json, tokenizer files, trainer.pt
    checkpoints/latest, best     relative links, always to a complete checkpoint

A folder is written under a temporary name, synced, and renamed; a link is made under a temporary name and renamed. Whatever
moment a process dies at, `latest` names a whole checkpoint. Nothing here can run code: safetensors, JSON, `weights_only=True`.
"""

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.token_file import sync, write_atomically
from data.tokenizer import Tokenizer
from model import ModelConfig

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
    with new_folder(folder) as temporary:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        described = {"format": FORMAT, "model": asdict(model_config), **about}
        (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        tokenizer.save(temporary)
        with open(temporary / "trainer.pt", "wb") as file:  # opened here: torch would hide why a write fails
            torch.save({**trainer, "digest": digest(tensors)}, file)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` to write into; then it is synced to disk, and given its name."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.", suffix=".tmp") as place:
            temporary = Path(place, folder.name)
            temporary.mkdir()
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            if folder.exists():  # the same step again, after a resume from before it
                shutil.rmtree(folder)
            temporary.rename(folder)
            sync(folder.parent)


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
    with writing(path):
        write_atomically(path, text)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative link to its neighbour `target`, in one step."""
    temporary = link.with_name(link.name + ".tmp")
    with writing(link):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        os.replace(temporary, link)


def steps(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    return sorted(file.parent for file in folder.glob("step-*/trainer.pt") if re.fullmatch(r"step-\d+", file.parent.name))


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


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {path.parent} holds no model") from None
    except (ValueError, TypeError) as error:
        raise ValueError(damaged(path, error)) from None


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    shape: list[int]
    dtype: str  # as the format spells it

    def read(self) -> Tensor:
        """The library maps a file to memory until its last tensor is gone: it is opened for this one alone."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)


def stored(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds, of which only the header is read."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return {name: Stored(path, name, part.get_shape(), part.get_dtype()) for name, part in found.items()}
    except FileNotFoundError:
        remedy = "fetch it, or choose a model that has it (other formats are not read)"
        if any(path.parent.glob("pytorch_model*.bin")):
            remedy = (
                "pytorch_model.bin is a pickle, which can run code when it is read: convert it, if you trust it, with "
                "transformers' AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        raise ValueError(f"{path} is missing: {remedy}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(damaged(path, error)) from None


def read_weights(path: Path) -> dict[str, Tensor]:
    return {bare(name): tensor.read() for name, tensor in stored(path).items()}


def bare(name: str) -> str:
    """The name without what wrappers leave before it."""
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
        if not isinstance(trainer, dict) or not {"digest", "progress", "optimizer"} <= trainer.keys():
            raise ValueError("it is not the state of a run")
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
    remedy = f"{good} is whole, use that" if good else "fetch it again (no other checkpoint lies beside it)"
    return f"{path} is damaged ({' '.join(str(error).split())[:120]}): {remedy}"


def is_whole(folder: Path) -> bool:
    try:
        with safe_open(folder / "model.safetensors", framework="pt"), zipfile.ZipFile(folder / "trainer.pt") as trainer:
            return trainer.testzip() is None and bool(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
        return False
