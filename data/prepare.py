"""Text to token files, once: the same text, settings and tokenizer find the same files again."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from data.build import PARTIAL, SIDECAR, build
from data.files import Files, find_files
from data.progress import Report, to_stderr
from data.source import DataConfig, Source
from data.stdlib import module_files
from data.token_file import TokenFile, token_dtype
from data.tokenizer import BPE_PATTERN, Tokenizer, TokenizerConfig, load_tokenizer

FORMAT = 2  # of the files; part of every request


@dataclass
class Corpus:
    tokenizer: Tokenizer
    train: TokenFile
    val: TokenFile
    folder: Path
    reused: bool

    def __str__(self) -> str:
        parts = [
            f"{tokens.n_tokens:,} {name} tokens ({tokens.n_documents:,} documents, {tokens.n_bytes / 1e6:.1f} MB)"
            for name, tokens in (("training", self.train), ("validation", self.val))
        ]
        verb = "reusing" if self.reused else "prepared"
        return f"{verb} {self.folder}: {', '.join(parts)}, {self.tokenizer.n_vocab:,} different tokens"


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig | Tokenizer, context_length: int, report: Report | None = None
) -> Corpus:
    """Notices and progress go to `report`, else to stderr.

    Raises ValueError or OSError, of one line, for data that cannot be had or is too little for one window.
    """
    say = report or to_stderr
    source = open_source(data, say)
    request = {"format": FORMAT, "source": source.identity, "tokenizer": describe(tokenizer)}
    request |= {"val_fraction": data.held_out, "max_tokens": data.max_tokens}
    cache, label = Path(data.cache_dir), re.sub(r"[^\w.-]+", "-", source.label).strip("-.")[:60] or "text"
    corpus = find(cache, request, say)
    if corpus is None:
        folder = cache / f"{label}-{tokenizer.name}-{xxhash.xxh3_64_hexdigest(json.dumps(request).encode())}"
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{folder.name}.lock", say):
            corpus = find(cache, request, say)  # made by the process that we waited for?
            if corpus is None:
                build(folder, source, data, tokenizer, request, report)
                corpus = load(folder, reused=False)
        if others := sorted(path.name for path in cache.glob(f"{label}-*") if path.is_dir() and path != folder):
            say(f"{cache} also holds {', '.join(others)}, of other texts or settings: remove what you do not need")
    say(str(corpus))
    corpus.train.require(context_length)
    corpus.val.require(context_length, f"raise data.val_fraction={data.held_out}, use more text or a shorter context")
    return corpus


def open_source(config: DataConfig, say: Report) -> Source:
    if config.kind == "hub":
        from data.hub import HubDataset  # imports the slow `datasets`

        return HubDataset(config, config.split)
    if config.kind == "stdlib":
        return Files(module_files(), label="stdlib")
    val = None if config.val_path is None else Files(find_files(config.val_path, "data.val_path", say), config.text_column)
    return Files(find_files(config.path, "data.path", say), config.text_column, val=val)


def describe(tokenizer: TokenizerConfig | Tokenizer) -> Any:
    """Equal for equal ids, and known before any training."""
    if not isinstance(tokenizer, TokenizerConfig):
        return tokenizer.fingerprint
    return [tokenizer.name, tokenizer.vocab_size, BPE_PATTERN] if tokenizer.name == "bpe" else [tokenizer.name]


def locked(path: Path, say: Report) -> Any:
    """One process at a time; the system frees the lock of one that dies."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is preparing this data ({path}): waiting for it")
        return lock.acquire()


def find(cache: Path, request: dict[str, Any], say: Report) -> Corpus | None:
    """A complete corpus made by an equal request, or by one whose tokenizer turned out equal."""
    for sidecar in sorted(cache.glob(f"*/{SIDECAR}")):
        try:
            made = json.loads(sidecar.read_text())
            equal = any({**made["request"], "tokenizer": t} == request for t in (made["request"]["tokenizer"], made["tokenizer"]))
        except (ValueError, KeyError, TypeError):
            say(f"{sidecar} is damaged, or not ours: it is left alone")
            continue
        if equal and sidecar.parent.suffix != PARTIAL:
            try:
                return load(sidecar.parent, reused=True)
            except ValueError as error:
                say(f"{error}: preparing it again")
    return None


def load(folder: Path, reused: bool) -> Corpus:
    made = json.loads((folder / SIDECAR).read_text())
    tokenizer = load_tokenizer(folder / "tokenizer")
    dtype = token_dtype(tokenizer.n_vocab)
    train, val = (TokenFile(folder, split, dtype, **made[split], shard=made["shard"]) for split in ("train", "val"))
    return Corpus(tokenizer, train, val, folder, reused)
