"""Documents to a folder of tokens, going on where an interrupted build stopped."""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from data.progress import Report, progress_bar
from data.source import DataConfig, Source
from data.token_file import SHARD, TokenFile, TokenWriter, sync, token_dtype, write_atomically
from data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer, load_tokenizer, pieces

BATCH = 1 << 23  # characters tokenised together
FEW = 20  # of fewer documents than this, the end of the text is validated on
PEEK = 1000  # documents looked at, or more, before choosing those to validate on
BPE_SAMPLE = 100_000_000  # bytes of text that bpe trains on, at most
SIDECAR = "corpus.json"
PROGRESS = "progress.json"
PARTIAL = ".partial"  # ends the name of a folder that is being filled
END = ""  # stands behind the pieces of a document


def build(
    folder: Path,
    source: Source,
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    request: dict[str, Any],
    report: Report | None,
) -> None:
    """Fill folder.partial, and rename it when it is complete."""
    partial = folder.with_name(folder.name + PARTIAL)
    val = source.val()
    fraction = 0.0 if val else data.held_out
    with ThreadPoolExecutor(data.threads or cores()) as pool:
        try:
            if not (partial / PROGRESS).exists():
                begin(partial, source, tokenizer, fraction, data.max_tokens)
            builder = Builder(partial, pool, report)
            builder.add(source, "train", data.max_tokens)
            if val:
                builder.add(val, "val", max(1, int(data.max_tokens * data.held_out)) if data.max_tokens else None)
            elif builder.writers["val"].n_tokens == 0:
                builder.move_tail(fraction)
        except ValueError:  # the source or the settings must change
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise OSError(f"{partial} could not be written ({error.strerror}): make room there, or set data.cache_dir") from None
    content = {"request": request, "tokenizer": builder.tokenizer.fingerprint, "dtype": builder.dtype.name, "shard": SHARD}
    content |= {split: builder.count(split) for split in ("train", "val")}
    write_atomically(partial / SIDECAR, json.dumps(content, indent=1))
    sync(partial)
    shutil.rmtree(folder, ignore_errors=True)  # there is one only if it is damaged
    partial.rename(folder)
    sync(folder.parent)
    (folder / PROGRESS).unlink()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin(partial: Path, source: Source, tokenizer: TokenizerConfig | Tokenizer, fraction: float, max_tokens: int | None) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    below = choose_validation(source, fraction) if fraction else 0
    if isinstance(tokenizer, TokenizerConfig):
        tokenizer = build_tokenizer(tokenizer, lambda: bpe_sample(source, below, fraction, max_tokens))
    tokenizer.save(partial / "tokenizer")
    progress = {"below": below, "n_tokens": {"train": 0, "val": 0}, "after": (None, 0), "done": []}
    write_atomically(partial / PROGRESS, json.dumps(progress))


def choose_validation(source: Source, fraction: float) -> int:
    """Documents whose key is below this are for validation; 0 stands for the end of the text.

    As many as PEEK or 10 / fraction documents are counted, and the nearest whole number of them chosen. Of more, each is chosen
    with that probability: that it chooses none is out of the question (e^-10)."""
    few = FEW if source.share() is None else PEEK  # a stream is downloaded again
    peek = max(few, math.ceil(10 / fraction))
    keys = sorted(document.key for document in islice(source.documents(), peek))
    if len(keys) < FEW:
        return 0
    if len(keys) < peek:
        wanted = min(max(1, round(fraction * len(keys))), len(keys) - 1)
        return next((key for key in keys[wanted:] if key > keys[0]), 0)  # texts that are alike are chosen together
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


class Builder:
    """Tokenises sources into folder/train.bin and folder/val.bin; progress.json tells what has reached the disk."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, report: Report | None) -> None:
        self.folder, self.pool, self.report = folder, pool, report
        self.progress = json.loads((folder / PROGRESS).read_text())
        self.tokenizer = load_tokenizer(folder / "tokenizer")
        self.dtype = token_dtype(self.tokenizer.n_vocab)
        self.writers = {split: TokenWriter(folder, split, self.dtype, n) for split, n in self.progress["n_tokens"].items()}
        # The bytes of text that each id stands for.
        self.sizes = np.array([len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.n_vocab)])
        self.sizes[self.tokenizer.end_of_text] = 0

    def add(self, source: Source, split: str, limit: int | None) -> None:
        """Tokenise a source, up to `limit` tokens, into that split; documents chosen for validation go to val."""
        if split in self.progress["done"]:
            return

        def written() -> int:
            return sum(self.writers[name].n_tokens for name in {split, "val"})

        stream = self._pieces(source, split)
        with progress_bar(f"tokenising {source.label}", self.report, written()) as bar:
            # Most tokens have a character or more, so little is read beyond the limit.
            while (room := (limit or 1 << 62) - written()) > 0 and (batch := take(stream, min(BATCH, room))):
                self._write(batch, room)
                share = source.share()
                bar.total = limit or (share and written() / share)
                bar.update(written() - bar.n)
                self._save()
        self._save(after=(None, 0), done=[*self.progress["done"], split])

    def _pieces(self, source: Source, split: str) -> Iterator[tuple[str, str]]:
        """(text, its split). progress["after"] tells where the next one is: so many pieces behind a state of the source."""
        state, skip = self.progress["after"]
        below, n = self.progress["below"], 0
        for document in source.documents(state):
            if document.state is not state:
                state, skip, n = document.state, 0, 0
            for index, text in enumerate(chain(self.tokenizer.cut(document.parts), [END])):
                if text or index:  # of an empty document nothing is kept, not even its end
                    n += 1
                    if n > skip:
                        self.progress["after"] = (state, n)
                        yield text, "val" if document.key < below else split

    def _write(self, batch: list[tuple[str, str]], room: int) -> None:
        """At most `room` tokens: the document that fills it is cut there."""
        ready: dict[str, list[np.ndarray]] = {split: [np.empty(0, self.dtype)] for split in self.writers}
        end = np.array([self.tokenizer.end_of_text])
        encoded = self.tokenizer.encode_batch([text for text, _ in batch], self.pool)
        for (text, split), ids in zip(batch, encoded, strict=True):
            part = (end if text == END else ids)[:room]
            ready[split].append(part)
            room -= len(part)
        for split, parts in ready.items():
            self.writers[split].append(np.concatenate(parts))

    def _save(self, **changes: Any) -> None:
        for split, writer in self.writers.items():
            self.progress["n_tokens"][split] = writer.n_tokens
        self.progress |= changes
        write_atomically(self.folder / PROGRESS, json.dumps(self.progress))

    def move_tail(self, fraction: float) -> None:
        """Make the last `fraction` of the text's bytes the validation split; a token across the cut stays before it."""
        train, val = self.writers["train"], self.writers["val"]
        before, cut, seen = int(self.count("train")["n_bytes"] * (1 - fraction)), 0, 0
        tokens = TokenFile(self.folder, "train", self.dtype, train.n_tokens)
        for block in tokens.blocks():
            ends = seen + np.cumsum(self.sizes[block])
            # An end-of-text has no bytes, and stays with its document.
            cut += int(np.count_nonzero(ends - self.sizes[block] + (block != self.tokenizer.end_of_text) <= before))
            seen = ends[-1]
        for block in tokens.blocks(cut):
            val.append(block)
        train.n_tokens = cut
        self._save()
        train.truncate(cut)

    def count(self, split: str) -> dict[str, int]:
        tokens, end = TokenFile(self.folder, split, self.dtype, self.writers[split].n_tokens), self.tokenizer.end_of_text
        n_bytes, n_documents, last = 0, 0, end
        for block in tokens.blocks():
            n_bytes += int(self.sizes[block].sum())
            n_documents += int((block == end).sum())
            last = block[-1]
        return {"n_tokens": tokens.n_tokens, "n_bytes": n_bytes, "n_documents": n_documents + int(last != end)}


def take(stream: Iterator[tuple[str, str]], characters: int) -> list[tuple[str, str]]:
    batch: list[tuple[str, str]] = []
    while characters > 0 and (piece := next(stream, None)):
        batch.append(piece)
        characters -= max(1, len(piece[0]))
    return batch
