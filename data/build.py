"""Documents to two token files, going on where an interrupted build stopped."""

import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.progress import Progress
from data.source import Position, Source
from data.token_file import TokenFile, TokenWriter, token_dtype, write_atomically
from data.tokenizer import Tokenizer, pieces

BATCH = 1 << 23  # characters tokenised together
PEEK = 1000  # documents looked at before choosing those to validate on
FEW = 20  # of fewer documents than this, the end of the text is validated on
BPE_SAMPLE = 100_000_000  # bytes of text that bpe trains on, at most
SAVE_EVERY = 5.0  # seconds
PROGRESS = "progress.json"


def choose_validation(source: Source, fraction: float) -> int:
    """Documents whose key is below this are for validation; 0 stands for the end of the text."""
    peek = PEEK if source.size else FEW  # a stream is downloaded again
    keys = sorted(document.key for document in islice(source.documents(), peek))
    if len(keys) < FEW:
        return 0
    if len(keys) < peek:
        return keys[min(max(1, round(fraction * len(keys))), len(keys) - 1)]
    return int(fraction * 2**128)


def bpe_sample(source: Source, below: int, fraction: float, max_tokens: int | None) -> Iterator[str]:
    """The first BPE_SAMPLE bytes of the training documents, and nothing that will be validated on."""
    left = BPE_SAMPLE
    if max_tokens is not None:  # a token has a byte or more, so this much of the text will be used
        left = min(left, int(max_tokens * (1 - fraction)))
    if below == 0 and fraction > 0:
        size = sum(len(part.encode()) for document in source.documents() for part in document.parts)
        left = min(left, int(size * (1 - fraction)))
    for document in source.documents():
        for piece in pieces(document.parts) if document.key >= below else ():
            encoded = piece.encode()
            yield encoded[:left].decode(errors="ignore")
            left -= len(encoded)
            if left <= 0:
                return


class Piece(NamedTuple):
    text: str
    split: str
    ends: bool  # the document ends with it
    resume: tuple[Position, int]  # what to read after it: documents from there, but for so many pieces of the first


class Builder:
    """Tokenises sources into folder/train.bin and folder/val.bin; progress.json tells what has reached the disk."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, pool: ThreadPoolExecutor, progress: dict[str, Any], shown: Progress
    ) -> None:
        self.folder, self.tokenizer, self.pool, self.progress, self.shown = folder, tokenizer, pool, progress, shown
        self.dtype = token_dtype(tokenizer.n_vocab)
        self.writers = {split: TokenWriter(folder, split, self.dtype, progress["n_tokens"][split]) for split in ("train", "val")}

    def add(self, source: Source, split: str, limit: int | None) -> None:
        """Tokenise a source, up to `limit` tokens, into that split; documents chosen for validation go to val."""
        if split in self.progress["done"]:
            return
        written = self.progress["n_tokens"]
        room = limit - written["val"] - (written["train"] if split == "train" else 0) if limit else 1 << 62
        saved = time.monotonic()
        self._show(source, limit)
        stream, n_characters, n_tokens = self._pieces(source, split), 1, 1
        while room and (batch := take(stream, min(BATCH, 1 + room * n_characters // n_tokens))):
            before, room = room, self._write(batch, room)
            n_characters, n_tokens = sum(len(piece.text) for piece in batch), before - room
            self._show(source, limit)
            if time.monotonic() - saved >= SAVE_EVERY:
                self._save(resume=batch[-1].resume)
                saved = time.monotonic()
        self._save(resume=((None, 0), 0), done=[*self.progress["done"], split])

    @cached_property
    def sizes(self) -> np.ndarray:
        """The bytes of text that each id stands for."""
        sizes = np.array([len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.n_vocab)])
        sizes[self.tokenizer.end_of_text] = 0
        return sizes

    def _save(self, **changes: Any) -> None:
        for split, writer in self.writers.items():
            writer.sync()
            self.progress["n_tokens"][split] = writer.n_tokens
        self.progress |= changes
        write_atomically(self.folder / PROGRESS, json.dumps(self.progress))

    def _show(self, source: Source, limit: int | None) -> None:
        done, size = sum(writer.n_tokens for writer in self.writers.values()), limit or source.size
        self.shown.show(done, (done if limit else source.position) / size if size else None)

    def _pieces(self, source: Source, split: str) -> Iterator[Piece]:
        below = int(self.progress["below"])
        after, skip = self.progress["resume"]
        for document in source.documents(after):
            texts = pieces(document.parts) if self.tokenizer.cuttable else filter(None, ["".join(document.parts)])
            for index, (text, ends) in enumerate(with_last(texts)):
                if index >= skip:
                    resume = (document.after, 0) if ends else (after, index + 1)
                    yield Piece(text, "val" if document.key < below else split, ends, resume)
            after, skip = document.after, 0

    def _write(self, batch: list[Piece], room: int) -> int:
        """The room that is left for further tokens; the document that fills it is cut there."""
        end = np.array([self.tokenizer.end_of_text])
        ready: dict[str, list[np.ndarray]] = {split: [np.empty(0, self.dtype)] for split in self.writers}
        encoded = self.tokenizer.encode_batch([piece.text for piece in batch], self.pool)
        for piece, ids in zip(batch, encoded, strict=True):
            for part in (ids, end) if piece.ends else (ids,):
                ready[piece.split].append(part[:room])
                room -= len(part[:room])
        for split, arrays in ready.items():
            self.writers[split].append(np.concatenate(arrays))
        return room

    def move_tail(self, fraction: float) -> None:
        """Make the last `fraction` of the text the validation split."""
        train, val = self.writers["train"], self.writers["val"]
        tokens = TokenFile(self.folder, "train", self.dtype, train.n_tokens)
        cut = tail_start(tokens, self.sizes, self.tokenizer.end_of_text, fraction)
        for block in tokens.blocks(cut):
            val.append(block)
        val.sync()
        train.truncate(cut)  # a build killed after this finds fewer tokens than it saved, and starts again

    def count(self, split: str) -> dict[str, int]:
        tokens = TokenFile(self.folder, split, self.dtype, self.writers[split].n_tokens)
        end = self.tokenizer.end_of_text
        n_bytes = n_documents = 0
        last = end
        for block in tokens.blocks():
            n_bytes += int(self.sizes[block].sum())
            n_documents += int((block == end).sum())
            last = int(block[-1])
        return {"n_tokens": tokens.n_tokens, "n_bytes": n_bytes, "n_documents": n_documents + (last != end)}


def take(stream: Iterator[Piece], characters: int) -> list[Piece]:
    batch: list[Piece] = []
    while characters > 0 and (piece := next(stream, None)):
        batch.append(piece)
        characters -= len(piece.text)
    return batch


def with_last(items: Iterable[str]) -> Iterator[tuple[str, bool]]:
    iterator = iter(items)
    item = next(iterator, None)
    while item is not None:
        following = next(iterator, None)
        yield item, following is None
        item = following


def tail_start(tokens: TokenFile, sizes: np.ndarray, end_of_text: int, fraction: float) -> int:
    """The first token that begins at or after 1 - fraction of the text's bytes."""
    before = int(sum(int(sizes[block].sum()) for block in tokens.blocks()) * (1 - fraction))
    start = 0
    for block in tokens.blocks():
        ends = np.cumsum(sizes[block])
        if ends[-1] >= before:
            start += int(np.searchsorted(ends, before)) + (before > 0)
            break
        before -= int(ends[-1])
        start += len(block)
    is_end = start < tokens.n_tokens and int(tokens.read(start, start + 1)[0]) == end_of_text
    return start + is_end  # an end-of-text stays with its document
