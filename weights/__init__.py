"""Models as files: our own checkpoints, and those of the Hugging Face stack."""

from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from model import Transformer
from weights import checkpoint, hub, huggingface


def load(
    path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Transformer, Tokenizer]:
    """A model and its tokenizer from a run, a checkpoint, a Hugging Face folder, or else the name of a model on the hub.

    The dtype defaults to that of the file. Raises FileNotFoundError or ValueError, in one line, for what cannot be loaded.
    """
    if Path(path).exists():
        folder = checkpoint.find(Path(path))
    else:
        folder = hub.fetch(str(path))
    source = checkpoint if checkpoint.is_ours(folder) else huggingface
    return source.load(folder, device, dtype)
