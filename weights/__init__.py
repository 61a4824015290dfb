"""Models as files: our own checkpoints, and those of the Hugging Face stack."""

from pathlib import Path

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from model import ModelConfig, Transformer
from weights import checkpoint, hub
from weights.huggingface import read_model
from weights.huggingface_config import read_config


def load(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """A model and its tokenizer from a run, a checkpoint, a Hugging Face folder, or else the name of a model on the hub.

    The model is in eval mode, in the dtype of its file if none is given. Raises FileNotFoundError or ValueError, in one line, for
    what cannot be loaded.
    """
    folder = locate(path)
    return read_model(folder, device, dtype).eval(), load_tokenizer(folder)


def locate(path: str | Path) -> Path:
    """The folder that holds the files of what `load` loads."""
    return checkpoint.find(Path(path)) if Path(path).exists() else hub.fetch(str(path))


def model_config(path: str | Path) -> ModelConfig:
    """The architecture of what `load` loads."""
    return read_config(locate(path))[1]


def tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of what `load` loads."""
    return load_tokenizer(locate(path))
