"""Documents to token files, once: the same text, settings and tokenizer find the same files again.

They are built in `<folder>.partial`, where an interrupted preparation goes on, and that is renamed when complete.
"""

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from data.build import PROGRESS, Builder, bpe_sample, choose_validation
from data.files import Files
from data.progress import Progress, Report, to_stderr
from data.source import DataConfig, Source
from data.stdlib import StandardLibrary
from data.token_file import SHARD, TokenFile, sync, token_dtype, write_atomically
from data.tokenizer import BPE_PATTERN, Tokenizer, TokenizerConfig, build_tokenizer, load_tokenizer

SIDECAR = "corpus.json"
PARTIAL = ".partial"  # ends the name of a folder that is being filled
FORMAT = 1  # of the files; part of every request


@dataclass
class Corpus:
    tokenizer: Tokenizer
    train: TokenFile
    val: TokenFile
    folder: Path
    reused: bool


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig | Tokenizer, context_length: int, report: Report | None = None
) -> Corpus:
    """Notices and progress go to `report`, else to stderr.

    Raises ValueError or OSError, of one line, for data that cannot be had or is too little for one window.
    """
    say = report or to_stderr
    source = open_source(data)
    if source.notice:
        say(source.notice)
    request = {"format": FORMAT, "source": source.identity, "tokenizer": describe(tokenizer)}
    request |= {"val_fraction": data.held_out, "max_tokens": data.max_tokens}
    cache = Path(data.cache_dir)
    corpus = find(cache, request, say)
    if corpus is None:
        name = f"{slug(source.label)}-{tokenizer.name}-{xxhash.xxh3_64_hexdigest(json.dumps(request).encode())}"
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{name}.lock", say):
            corpus = find(cache, request, say)  # made by the process that we waited for?
            if corpus is None:
                build(cache / name, data, tokenizer, source, request, Progress(f"tokenising {source.label}", report))
                corpus = load(cache / name, reused=False)
    say(summary(corpus))
    remedy = "use more text or a shorter context"
    require(corpus.train, context_length, remedy)
    require(corpus.val, context_length, f"raise data.val_fraction={data.held_out}, {remedy}")
    return corpus


def open_source(config: DataConfig) -> Source:
    if config.kind == "hub":
        from data.hub import HubDataset  # imports the slow `datasets`

        return HubDataset(config, config.split)
    if config.kind == "files":
        return Files(config.path, config.text_column, config.val_path)
    return StandardLibrary()


def describe(tokenizer: TokenizerConfig | Tokenizer) -> Any:
    """Equal for equal ids, and known before any training."""
    if not isinstance(tokenizer, TokenizerConfig):
        return tokenizer.fingerprint
    return [tokenizer.name, tokenizer.vocab_size, BPE_PATTERN] if tokenizer.name == "bpe" else [tokenizer.name]


def slug(label: str) -> str:
    return re.sub(r"[^\w.-]+", "-", label).strip("-.")[:60] or "text"


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
        if sidecar.parent.suffix == PARTIAL:
            continue
        made = json.loads(sidecar.read_text())
        for known in (made["request"]["tokenizer"], made["tokenizer"]):
            if {**made["request"], "tokenizer": known} == request:
                try:
                    return load(sidecar.parent, reused=True)
                except ValueError as error:
                    say(f"{error}: preparing it again")
    return None


def load(folder: Path, reused: bool) -> Corpus:
    made = json.loads((folder / SIDECAR).read_text())
    tokenizer = load_tokenizer(folder / "tokenizer")
    train, val = (
        TokenFile(folder, split, token_dtype(tokenizer.n_vocab), **made[split], shard=made["shard"]) for split in ("train", "val")
    )
    return Corpus(tokenizer, train, val, folder, reused)


def build(
    folder: Path,
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    source: Source,
    request: dict[str, Any],
    shown: Progress,
) -> None:
    partial = folder.with_name(folder.name + PARTIAL)
    val = source.val()
    fraction = 0.0 if val else data.held_out
    try:
        progress = resume(partial) or begin(partial, source, tokenizer, fraction, data.max_tokens)
        with ThreadPoolExecutor(data.threads or cores()) as pool:
            builder = Builder(partial, load_tokenizer(partial / "tokenizer"), pool, progress, shown)
            builder.add(source, "train", data.max_tokens)
            if val:
                builder.add(val, "val", max(1, int(data.max_tokens * data.held_out)) if data.max_tokens else None)
            elif builder.writers["val"].n_tokens == 0:
                builder.move_tail(fraction)
        source.check()
    except ValueError:  # the source or the settings must change, so nothing can go on from here
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        shown.close()
    content = {"request": request, "tokenizer": builder.tokenizer.fingerprint, "dtype": builder.dtype.name, "shard": SHARD}
    content |= {split: builder.count(split) for split in ("train", "val")}
    write_atomically(partial / SIDECAR, json.dumps(content, indent=1))
    (partial / PROGRESS).unlink()
    sync(partial)
    shutil.rmtree(folder, ignore_errors=True)  # there is one only if it is damaged
    partial.rename(folder)
    sync(folder.parent)


def begin(
    partial: Path, source: Source, tokenizer: TokenizerConfig | Tokenizer, fraction: float, max_tokens: int | None
) -> dict[str, Any]:
    shutil.rmtree(partial, ignore_errors=True)
    below = choose_validation(source, fraction) if fraction else 0
    if isinstance(tokenizer, TokenizerConfig):
        tokenizer = build_tokenizer(tokenizer, lambda: bpe_sample(source, below, fraction, max_tokens))
    tokenizer.save(partial / "tokenizer")
    return {"below": str(below), "n_tokens": {"train": 0, "val": 0}, "resume": ((None, 0), 0), "done": []}


def resume(partial: Path) -> dict[str, Any] | None:
    """The progress of an interrupted build, if all that it recorded is there."""
    try:
        progress = json.loads((partial / PROGRESS).read_text())
        itemsize = token_dtype(load_tokenizer(partial / "tokenizer").n_vocab).itemsize
    except (OSError, ValueError):
        return None
    for split, n_tokens in progress["n_tokens"].items():
        if sum(path.stat().st_size for path in partial.glob(f"{split}.*bin")) < n_tokens * itemsize:
            return None
    return progress


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summary(corpus: Corpus) -> str:
    parts = [
        f"{tokens.n_tokens:,} {name} tokens ({tokens.n_documents:,} documents, {tokens.n_bytes / 1e6:.1f} MB)"
        for name, tokens in (("training", corpus.train), ("validation", corpus.val))
    ]
    verb = "reusing" if corpus.reused else "prepared"
    return f"{verb} {corpus.folder}: {', '.join(parts)}, {corpus.tokenizer.n_vocab:,} different tokens"


def require(tokens: TokenFile, context_length: int, remedy: str) -> None:
    if tokens.n_tokens < context_length + 1:
        raise ValueError(
            f"{tokens.paths[0]} holds {tokens.n_tokens} tokens; model.context_length={context_length} "
            f"needs at least {context_length + 1}: {remedy}"
        )
