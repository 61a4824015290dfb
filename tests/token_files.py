"""Token files for tests that need no text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.token_file import TokenFile, TokenWriter, token_dtype


def token_file(folder: Path, ids: Sequence[int] | np.ndarray, n_vocab: int = 256, split: str = "train") -> TokenFile:
    """A TokenFile that holds these ids, as if each stood for one byte of text."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype, ids = token_dtype(n_vocab), np.asarray(ids)
    TokenWriter(folder, split, dtype).append(ids)
    return TokenFile(folder, split, dtype, len(ids), n_bytes=len(ids), n_documents=1)
