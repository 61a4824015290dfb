"""Token ids on disk: flat little-endian uint16 or uint32 shards, `train.bin`, `train.1.bin`, ..."""

import mmap
import os
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

import numpy as np

SHARD = 1 << 28  # tokens
BLOCK = 1 << 22  # tokens looked at together


def token_dtype(n_vocab: int) -> np.dtype:
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")


def shard_path(folder: Path, split: str, index: int) -> Path:
    return folder / (f"{split}.{index}.bin" if index else f"{split}.bin")


class TokenFile:
    """The tokens of one split, memory-mapped. n_bytes is the size of their text as UTF-8, without end-of-text."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, n_tokens: int, n_bytes: int = 0, n_documents: int = 0, shard: int = SHARD
    ) -> None:
        self.n_tokens, self.n_bytes, self.n_documents, self.shard = n_tokens, n_bytes, n_documents, shard
        sizes = [min(shard, n_tokens - start) for start in range(0, n_tokens, shard)] or [0]
        self.paths = [shard_path(folder, split, index) for index in range(len(sizes))]
        self.shards = [map_ids(path, dtype, size) for path, size in zip(self.paths, sizes, strict=True)]

    def require(self, context_length: int, remedy: str = "use more text or a shorter context") -> None:
        if self.n_tokens < context_length + 1:
            raise ValueError(
                f"{self.paths[0]} holds {self.n_tokens} tokens; model.context_length={context_length} "
                f"needs at least {context_length + 1}: {remedy}"
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """ids[start:stop], for 0 <= start <= stop <= n_tokens; a view of the file where one shard holds them."""
        assert 0 <= start <= stop <= self.n_tokens
        index = min(start // self.shard, len(self.shards) - 1)
        part = self.shards[index][start - index * self.shard : stop - index * self.shard]
        return part if len(part) == stop - start else np.concatenate([part, self.read(start + len(part), stop)])

    def blocks(self, start: int = 0) -> Iterator[np.ndarray]:
        """All ids from `start` on, read and not mapped: a look at a huge file must not fill the memory."""
        for index, (path, ids) in enumerate(zip(self.paths, self.shards, strict=True)):
            for first in range(max(start - index * self.shard, 0), len(ids), BLOCK):
                yield np.fromfile(path, ids.dtype, BLOCK, offset=first * ids.itemsize)


def map_ids(path: Path, dtype: np.dtype, n_tokens: int) -> np.ndarray:
    if not path.is_file() or path.stat().st_size != n_tokens * dtype.itemsize:
        raise ValueError(f"{path} is damaged: it should hold {n_tokens} tokens")
    if n_tokens == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # else the system reads ahead, on some machines 8 MB for every window
    return np.frombuffer(mapped, dtype)


class TokenWriter:
    """Appends to the shards of one split, behind the first n_tokens that they hold."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, n_tokens: int = 0, shard: int = SHARD) -> None:
        self.folder, self.split, self.dtype, self.shard = folder, split, dtype, shard
        self.truncate(n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first n_tokens."""
        self.n_tokens = n_tokens
        self._path().touch()
        os.truncate(self._path(), n_tokens % self.shard * self.dtype.itemsize)
        later = (shard_path(self.folder, self.split, index) for index in count(n_tokens // self.shard + 1))
        for path in takewhile(Path.exists, later):
            path.unlink()

    def append(self, ids: np.ndarray) -> None:
        """The ids are on the disk when it returns."""
        while len(ids):
            within = self.n_tokens % self.shard
            part, ids = ids[: self.shard - within], ids[self.shard - within :]
            with self._path().open("ab" if within else "wb") as file:
                file.write(part.astype(self.dtype).tobytes())
            sync(self._path())
            self.n_tokens += len(part)

    def _path(self) -> Path:
        return shard_path(self.folder, self.split, self.n_tokens // self.shard)


def sync(path: Path) -> None:
    """Wait until the disk has the file or the names in the folder."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_atomically(path: Path, content: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content)
    sync(temporary)
    temporary.replace(path)
