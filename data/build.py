"""Documents to two token files, going on where an interrupted build stopped."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data.progress import Progress
from data.source import Document, Source
from data.token_file import Counts, TokenFile, TokenWriter, token_dtype
from data.tokenizer import Tokenizer, pieces

BATCH = 1 << 23  # characters tokenised at a time
PEEK = 1000  # documents looked at before choosing those to validate on
FEW = 20  # fewer documents than this are validated on their end
BPE_SAMPLE = 100_000_000  # bytes of text that bpe trains on, at most
SAVE_EVERY = 5.0  # seconds
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Split:
    """Documents whose key is below `below` are for validation; if none is, the end of the text."""

    below: int
    tail: bool


def choose_validation(source: Source, fraction: float) -> Split:
    """A fraction of 0 chooses nothing: validation has a source of its own."""
    if fraction == 0:
        return Split(0, tail=False)
    keys = sorted(document.key for document in islice(source.documents(), PEEK))
    if len(keys) < FEW:
        return Split(0, tail=True)
    if len(keys) < PEEK:
        return Split(keys[max(1, round(fraction * len(keys)))], tail=False)
    return Split(int(fraction * 2**128), tail=False)


def bpe_sample(source: Source, split: Split, fraction: float, max_tokens: int | None) -> Iterator[str]:
    """The beginning of the training documents: never text that will be validated on (a token has a byte or more)."""
    left = BPE_SAMPLE
    if max_tokens is not None:
        left = min(left, int(max_tokens * (1 - fraction)))
    if split.tail:
        size = sum(utf8_length(part) for document in source.documents() for part in document.parts)
        left = min(left, int(size * (1 - fraction)))
    for document in source.documents():
        for piece in pieces(document.parts) if document.key >= split.below else ():
            yield piece.encode()[:left].decode(errors="ignore")
            left -= utf8_length(piece)
            if left <= 0:
                return


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@dataclass(slots=True)
class Piece:
    text: str
    split: str
    index: int  # in its document
    last: bool  # of its document
    before: tuple[dict | None, int]  # how to go on with this document,
    after: tuple[dict | None, int]  # and with the next


class Builder:
    """Tokenises sources into folder/train.bin and folder/val.bin; `progress.json` is what has reached the disk."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, threads: int, progress: dict[str, Any]) -> None:
        self.folder, self.tokenizer, self.threads, self.progress = folder, tokenizer, threads, progress
        self.counts = {name: Counts(**progress["counts"][name]) for name in ("train", "val")}
        self.dtype = token_dtype(tokenizer.n_vocab)
        self.writers = {name: TokenWriter(folder, name, self.counts[name], self.dtype) for name in self.counts}

    def add(self, source: Source, name: str, limit: int | None, shown: Progress) -> None:
        """Tokenise a source, up to `limit` tokens, into the split `name` (the documents chosen for it, into val)."""
        if name in self.progress["done"]:
            return
        saved = time.monotonic()
        for batch in self._batches(source, name):
            texts = [piece.text for piece in batch]
            full = self._write(batch, self.tokenizer.encode_batch(texts, self.threads), limit)
            n_tokens = self.counts["train"].n_tokens + self.counts["val"].n_tokens
            size = limit or source.size
            shown.show(sum(map(utf8_length, texts)), (n_tokens if limit else source.position) / size if size else None)
            if full:
                break
            if time.monotonic() - saved >= SAVE_EVERY:
                last = batch[-1]
                self.progress["after"] = last.after if last.last else last.before
                self.progress["pieces"] = 0 if last.last else last.index + 1
                self.save()
                saved = time.monotonic()
        self.progress |= {"done": [*self.progress["done"], name], "after": (None, 0), "pieces": 0, "open": 0}
        self.save()

    def save(self) -> None:
        for name, writer in self.writers.items():
            writer.sync()
            self.progress["counts"][name] = asdict(self.counts[name])
        write_atomically(self.folder / PROGRESS, json.dumps(self.progress))

    def _batches(self, source: Source, name: str) -> Iterator[list[Piece]]:
        batch: list[Piece] = []
        size = 0
        for piece in self._pieces(source, name):
            batch.append(piece)
            size += len(piece.text) + 100  # so that empty documents fill a batch, too
            if size >= BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _pieces(self, source: Source, name: str) -> Iterator[Piece]:
        below = int(self.progress["below"])
        before, skip = self.progress["after"], self.progress["pieces"]
        for document in source.documents(before):
            split = "val" if document.key < below else name
            texts = self._texts(document)
            text, index = next(texts, ""), 0
            while True:
                following = next(texts, None)
                if index >= skip:
                    yield Piece(text, split, index, following is None, before, document.after)
                if following is None:
                    break
                text, index = following, index + 1
            before, skip = document.after, 0

    def _texts(self, document: Document) -> Iterator[str]:
        return pieces(document.parts) if self.tokenizer.cuttable else iter(["".join(document.parts)])

    def _write(self, batch: list[Piece], encoded: list[np.ndarray], limit: int | None) -> bool:
        """Whether `limit` tokens were reached, the last document being cut there."""
        end = np.array([self.tokenizer.end_of_text])
        room = limit - sum(c.n_tokens for c in self.counts.values()) if limit else 1 << 62
        ready: dict[str, list[np.ndarray]] = {name: [] for name in self.writers}
        for piece, ids in zip(batch, encoded, strict=True):
            counts = self.counts[piece.split]
            if len(ids) > room:
                ids = ids[:room]
                counts.n_bytes += len(self.tokenizer.decode_bytes(ids))
            else:
                counts.n_bytes += utf8_length(piece.text)
            ready[piece.split].append(ids)
            self.progress["open"] += len(ids)
            room -= len(ids)
            ends = piece.last and self.progress["open"] > 0 and room > 0
            if ends:
                ready[piece.split].append(end)
                room -= 1
            if ends or (room == 0 and self.progress["open"]):
                counts.n_documents += 1
                counts.longest = max(counts.longest, self.progress["open"])
                self.progress["open"] = 0
            elif piece.last:
                self.progress["empty"] += 1
            if room == 0:
                break
        for name, arrays in ready.items():
            self.writers[name].append(np.concatenate([np.empty(0, self.dtype), *arrays]))
        return room == 0


    def move_tail(self, fraction: float) -> None:
        """Make the last `fraction` of the text the validation split, up to a token's boundary."""
        counts = self.counts["train"]
        self.save()
        tokens = TokenFile(self.folder, "train", counts, self.dtype)
        cut, n_bytes = tail_start(tokens, self.tokenizer, counts.n_bytes - int(counts.n_bytes * (1 - fraction)))
        ends = 0
        for start in range(cut, tokens.n_tokens, BATCH):
            ids = tokens.read(start, min(start + BATCH, tokens.n_tokens))
            ends += int((ids == self.tokenizer.end_of_text).sum())
            self.writers["val"].append(ids)
        val = self.counts["val"]
        val.n_bytes, val.longest = n_bytes, min(counts.longest, val.n_tokens)
        val.n_documents = ends + int(tokens.n_tokens > cut and int(ids[-1]) != self.tokenizer.end_of_text)
        inside = cut > 0 and int(tokens.read(cut - 1, cut)[0]) != self.tokenizer.end_of_text
        counts.n_bytes, counts.n_documents = counts.n_bytes - n_bytes, counts.n_documents - val.n_documents + inside
        counts.n_tokens, counts.longest = cut, min(counts.longest, cut)
        self.writers["train"].truncate(cut)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.sync()
            writer.file.close()


def tail_start(tokens: TokenFile, tokenizer: Tokenizer, n_bytes: int) -> tuple[int, int]:
    """Where the longest tail of at most n_bytes of text starts, and its bytes."""
    lengths = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_vocab)])
    lengths[tokenizer.end_of_text] = 0
    start, found = tokens.n_tokens, 0
    while start > 0:
        low = max(0, start - BATCH)
        sizes = np.cumsum(lengths[tokens.read(low, start)][::-1])
        inside = int(np.searchsorted(sizes, n_bytes - found, side="right"))
        found += int(sizes[inside - 1]) if inside else 0
        start -= inside
        if start > low:
            break
    while start < tokens.n_tokens and tokens.read(start, start + 1)[0] == tokenizer.end_of_text:
        start += 1
    return start, found


def new_progress(split: Split) -> dict[str, Any]:
    counts = {"train": asdict(Counts()), "val": asdict(Counts())}
    return {
        "below": str(split.below), "tail": split.tail, "counts": counts, "done": [], "after": (None, 0),
        "pieces": 0, "open": 0, "empty": 0,
    }  # fmt: skip


def write_atomically(path: Path, content: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
