"""Token ids on disk: flat little-endian uint16 or uint32 shards, `train.bin`, `train.1.bin`, ..."""

import os
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

SHARD = 1 << 28  # tokens


def token_dtype(n_vocab: int) -> np.dtype:
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")


def shard_path(folder: Path, split: str, shard: int) -> Path:
    return folder / (f"{split}.{shard}.bin" if shard else f"{split}.bin")


@dataclass
class Counts:
    n_tokens: int = 0
    n_bytes: int = 0  # of the text as UTF-8; end-of-text ids have none
    n_documents: int = 0
    longest: int = 0  # tokens of the longest document

    asdict = asdict


class TokenFile:
    """The tokens of one split, memory-mapped."""

    def __init__(self, folder: Path, split: str, counts: Counts, dtype: np.dtype, shard: int = SHARD) -> None:
        self.path = shard_path(folder, split, 0)
        self.n_tokens, self.n_bytes, self.n_documents = counts.n_tokens, counts.n_bytes, counts.n_documents
        self.longest = counts.longest
        self.dtype = dtype
        self.starts = list(range(0, max(1, self.n_tokens), shard))
        self.shards = [self._map(shard_path(folder, split, i), i) for i in range(len(self.starts))]

    def _map(self, path: Path, shard: int) -> np.ndarray:
        end = self.starts[shard + 1] if shard + 1 < len(self.starts) else self.n_tokens
        expected = end - self.starts[shard]
        if not path.is_file() or path.stat().st_size != expected * self.dtype.itemsize:
            raise ValueError(f"{path} is damaged: it should hold {expected} tokens")
        if not expected:
            return np.empty(0, self.dtype)  # an empty file cannot be mapped
        return np.asarray(np.memmap(path, self.dtype, "r"))  # plain arrays are sliced faster

    def read(self, start: int, stop: int) -> np.ndarray:
        """ids[start:stop], a view of the file where one shard holds them all."""
        first = bisect_right(self.starts, start) - 1
        parts = []
        while start < stop:
            offset = start - self.starts[first]
            part = self.shards[first][offset : offset + stop - start]
            assert len(part), f"tokens {start} to {stop} of {self.n_tokens}"
            parts.append(part)
            start, first = start + len(part), first + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])


class TokenWriter:
    """Appends to the shards of one split, going on from `counts`; what lies behind them on the disk is dropped."""

    def __init__(self, folder: Path, split: str, counts: Counts, dtype: np.dtype, shard: int = SHARD) -> None:
        self.folder, self.split, self.counts, self.dtype, self.shard = folder, split, counts, dtype, shard
        self.truncate(counts.n_tokens)

    def truncate(self, n_tokens: int) -> None:
        last = n_tokens // self.shard
        for path in self.folder.glob(f"{self.split}.*bin"):
            number = int(path.name.split(".")[1]) if path.name.count(".") == 2 else 0
            if number > last:
                path.unlink()
        self.file = shard_path(self.folder, self.split, last).open("ab")
        size = n_tokens % self.shard * self.dtype.itemsize
        if self.file.tell() < size:
            raise EOFError(f"{self.file.name} is shorter than recorded")
        self.file.truncate(size)
        self.room = self.shard - n_tokens % self.shard

    def append(self, ids: np.ndarray) -> None:
        while len(ids) >= self.room:
            self.file.write(ids[: self.room].astype(self.dtype).tobytes())
            self.counts.n_tokens += self.room
            ids = ids[self.room :]
            self.sync()
            self.file.close()
            self.file = shard_path(self.folder, self.split, self.counts.n_tokens // self.shard).open("wb")
            self.room = self.shard
        self.file.write(ids.astype(self.dtype).tobytes())
        self.counts.n_tokens += len(ids)
        self.room -= len(ids)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
