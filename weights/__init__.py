"""Models as files: our own checkpoints, and those of the Hugging Face stack."""

from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from model import ModelConfig, Transformer
from weights import checkpoint, hub, huggingface
from weights.huggingface_config import read_config


def load(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """A model and its tokenizer from a run, a checkpoint, a Hugging Face folder, or else the name of a model on the hub.

    The dtype defaults to that of the file. Raises FileNotFoundError or ValueError, in one line, for what cannot be loaded.
    """
    folder = locate(path)
    return (checkpoint if checkpoint.is_ours(folder) else huggingface).load(folder, device, dtype)


def locate(path: str | Path) -> Path:
    """The folder that holds the files of what `load` loads."""
    return checkpoint.find(Path(path)) if Path(path).exists() else hub.fetch(str(path))


def model_config(path: str | Path) -> ModelConfig:
    folder = locate(path)
    return checkpoint.model_config(folder) if checkpoint.is_ours(folder) else read_config(folder)[1]
