"""Token ids on disk: flat little-endian uint16 or uint32 shards, `train.bin`, `train.1.bin`, ..."""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
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
        self,
        folder: Path,
        split: str,
        dtype: np.dtype,
        n_tokens: int,
        n_bytes: int = 0,
        n_documents: int = 0,
        shard: int = SHARD,
    ) -> None:
        self.n_tokens, self.n_bytes, self.n_documents = n_tokens, n_bytes, n_documents
        self.starts = list(range(0, n_tokens, shard)) or [0]
        self.paths = [shard_path(folder, split, index) for index in range(len(self.starts))]
        self.maps, self.shards = [], []
        for path, start in zip(self.paths, self.starts, strict=True):
            expected = min(shard, n_tokens - start)
            if not path.is_file() or path.stat().st_size != expected * dtype.itemsize:
                raise ValueError(f"{path} is damaged: it should hold {expected} tokens")
            if expected:  # an empty file cannot be mapped
                with path.open("rb") as file:
                    self.maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self.shards.append(np.frombuffer(self.maps[-1] if expected else b"", dtype))

    def expect_random_reads(self) -> None:
        """Else the system reads ahead, on some machines 8 MB for every window."""
        for shard in self.maps:
            shard.madvise(mmap.MADV_RANDOM)

    def read(self, start: int, stop: int) -> np.ndarray:
        """ids[start:stop], for 0 <= start <= stop <= n_tokens; a view of the file where one shard holds them."""
        assert 0 <= start <= stop <= self.n_tokens
        index = bisect_right(self.starts, start) - 1
        part = self.shards[index][start - self.starts[index] : stop - self.starts[index]]
        if len(part) == stop - start:
            return part
        return np.concatenate([part, self.read(start + len(part), stop)])

    def blocks(self, start: int = 0) -> Iterator[np.ndarray]:
        """All ids from `start` on, read and not mapped: a look at a huge file must not fill the memory."""
        for path, first, shard in zip(self.paths, self.starts, self.shards, strict=True):
            for low in range(max(start - first, 0), len(shard), BLOCK):
                yield np.fromfile(path, shard.dtype, BLOCK, offset=low * shard.itemsize)


class TokenWriter:
    """Appends to the shards of one split, after the first n_tokens that the disk holds."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, n_tokens: int = 0, shard: int = SHARD) -> None:
        self.folder, self.split, self.dtype, self.shard = folder, split, dtype, shard
        self.truncate(n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first n_tokens."""
        self.n_tokens = n_tokens
        self._last().touch()
        for path in self.folder.glob(f"{self.split}.*bin"):
            index = int(path.suffixes[0][1:]) if len(path.suffixes) == 2 else 0
            room = min(max(n_tokens - index * self.shard, 0), self.shard)
            if index and not room:
                path.unlink()
            elif path.stat().st_size > room * self.dtype.itemsize:
                os.truncate(path, room * self.dtype.itemsize)

    def append(self, ids: np.ndarray) -> None:
        while len(ids):
            room = self.shard - self.n_tokens % self.shard
            with self._last().open("ab") as file:
                file.write(ids[:room].astype(self.dtype).tobytes())
            self.n_tokens += len(ids[:room])
            if len(ids) >= room:
                sync(shard_path(self.folder, self.split, self.n_tokens // self.shard - 1))
            ids = ids[room:]

    def sync(self) -> None:
        if self._last().exists():
            sync(self._last())

    def _last(self) -> Path:
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
