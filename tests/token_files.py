"""Token files for tests that need no text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.token_file import Counts, TokenFile, TokenWriter, token_dtype


def token_file(folder: Path, ids: Sequence[int] | np.ndarray, n_vocab: int = 256, split: str = "train") -> TokenFile:
    """A TokenFile that holds these ids, as if each stood for one byte of text."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = TokenWriter(folder, split, Counts(), token_dtype(n_vocab))
    writer.append(np.asarray(ids))
    writer.sync()
    writer.file.close()
    counts = writer.counts
    counts.n_bytes, counts.n_documents = counts.n_tokens, 1
    return TokenFile(folder, split, counts, token_dtype(n_vocab))
