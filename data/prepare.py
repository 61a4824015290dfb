"""Documents to token files, once: `prepare` gives the same Corpus for the same text, settings and tokenizer.

Everything is built in `<folder>.partial`, from which an interrupted preparation goes on, and renamed when complete.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from data.build import PROGRESS, Builder, bpe_sample, choose_validation, new_progress, write_atomically
from data.files import Files
from data.progress import Progress, Report, to_stderr
from data.source import DataConfig, Source
from data.stdlib import StandardLibrary
from data.token_file import SHARD, Counts, TokenFile, token_dtype
from data.tokenizer import BPE_PATTERN, Tokenizer, TokenizerConfig, build_tokenizer, load_tokenizer

FORMAT = 1
SIDECAR = "corpus.json"


@dataclass
class Corpus:
    tokenizer: Tokenizer
    train: TokenFile
    val: TokenFile
    folder: Path
    reused: bool


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    context_length: int,
    report: Report | None = None,
) -> Corpus:
    """Notices and progress go to `report`, else to stderr.

    Raises ValueError or OSError, in one line, for data that cannot be had or that is too little for one window.
    """
    say = report or to_stderr
    train, val = open_source(data)
    for notice in filter(None, [train.notice, val.notice if val else ""]):
        say(notice)
    request = {"format": FORMAT, "source": describe(data, train, val), "tokenizer": describe_tokenizer(tokenizer)}
    corpus = find(Path(data.cache_dir), request, say)
    if corpus is None:
        folder = Path(data.cache_dir, f"{slug(train.label)}-{tokenizer.name}-{digest(request)}")
        with lock(folder, say):
            corpus = find(Path(data.cache_dir), request, say)  # made by the process that we waited for
            if corpus is None:
                build(folder, data, tokenizer, (train, val), request, Progress(f"tokenising {train.label}", report))
                corpus = load(folder, reused=False)
    say(summary(corpus))
    require(corpus.train, context_length, "use more text or a shorter context")
    require(corpus.val, context_length, f"raise data.val_fraction={data.val_fraction}, or use more text or a shorter context")
    return corpus


def open_source(config: DataConfig) -> tuple[Source, Source | None]:
    """The documents to train on and, where the source has its own, those to validate on."""
    if config.kind == "hub":
        from data.hub import open_hub  # imports the slow `datasets`

        return open_hub(config)
    if config.kind == "stdlib":
        return StandardLibrary(), None
    val = Files(config.val_path, config.text_column, "data.val_path") if config.val_path is not None else None
    return Files(config.path, config.text_column, "data.path"), val


def describe(data: DataConfig, train: Source, val: Source | None) -> dict[str, Any]:
    """All that decides which documents end where."""
    return {
        "train": train.identity,
        "val": val.identity if val else data.val_fraction,
        "max_tokens": data.max_tokens,
    }


def describe_tokenizer(tokenizer: TokenizerConfig | Tokenizer) -> Any:
    if not isinstance(tokenizer, TokenizerConfig):
        return tokenizer.fingerprint
    settings = {"name": tokenizer.name}
    return settings | ({"vocab_size": tokenizer.vocab_size, "pattern": BPE_PATTERN} if tokenizer.name == "bpe" else {})


def digest(request: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(request, sort_keys=True).encode())[:12]


def slug(label: str) -> str:
    return re.sub(r"[^\w.-]+", "-", label).strip("-.")[:60] or "text"


def find(cache: Path, request: dict[str, Any], say: Report) -> Corpus | None:
    """A complete corpus made by an equal request, or whose tokenizer turned out equal."""
    for sidecar in sorted(cache.glob(f"*/{SIDECAR}")):
        made = json.loads(sidecar.read_text())
        same_tokenizer = request["tokenizer"] in (made["request"]["tokenizer"], made["tokenizer"])
        if {**made["request"], "tokenizer": 0} == {**request, "tokenizer": 0} and same_tokenizer:
            try:
                return load(sidecar.parent, reused=True)
            except ValueError as error:
                say(f"{error}: preparing it again")
    return None


def load(folder: Path, reused: bool) -> Corpus:
    made = json.loads((folder / SIDECAR).read_text())
    tokenizer = load_tokenizer(folder / "tokenizer")
    train, val = (
        TokenFile(folder, name, Counts(**made[name]), token_dtype(tokenizer.n_vocab), made["shard_tokens"])
        for name in ("train", "val")
    )
    return Corpus(tokenizer, train, val, folder, reused)


@contextmanager
def lock(folder: Path, say: Report) -> Iterator[None]:
    """One process at a time; the lock of a process that died is free."""
    path = folder.with_name(folder.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is preparing {folder}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            break
        file.close()  # its last holder has removed it
    try:
        yield
    finally:
        path.unlink()
        file.close()


def build(
    folder: Path,
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    sources: tuple[Source, Source | None],
    request: dict[str, Any],
    shown: Progress,
) -> None:
    train, val = sources
    fraction = data.val_fraction if val is None else 0.0
    partial = folder.with_name(folder.name + ".partial")
    progress = resume(partial)
    if progress is None:
        shutil.rmtree(partial, ignore_errors=True)
        split = choose_validation(train, fraction)
        if isinstance(tokenizer, TokenizerConfig):
            tokenizer = build_tokenizer(tokenizer, lambda: bpe_sample(train, split, fraction, data.max_tokens))
        tokenizer.save(partial / "tokenizer")
        progress = new_progress(split)
    builder = Builder(partial, load_tokenizer(partial / "tokenizer"), data.threads or cores(), progress)
    builder.add(train, "train", data.max_tokens, shown)
    if val is not None:
        builder.add(val, "val", max(1, int(data.max_tokens * data.val_fraction)) if data.max_tokens else None, shown)
    elif builder.counts["val"].n_tokens == 0:
        builder.move_tail(fraction)
    shown.close()
    for source in filter(None, sources):
        source.check()
    builder.close()
    write_sidecar(partial, request, builder)
    if folder.exists():  # damaged, or nobody would be building it
        shutil.rmtree(folder)
    partial.rename(folder)
    sync_folder(folder.parent)


def resume(partial: Path) -> dict[str, Any] | None:
    """The progress of an interrupted build, if all that it recorded is there."""
    try:
        progress = json.loads((partial / PROGRESS).read_text())
        size = {name: sum(p.stat().st_size for p in partial.glob(f"{name}.*bin")) for name in ("train", "val")}
        itemsize = token_dtype(load_tokenizer(partial / "tokenizer").n_vocab).itemsize
    except (OSError, ValueError):
        return None
    whole = all(size[name] >= progress["counts"][name]["n_tokens"] * itemsize for name in size)
    return progress if whole else None


def write_sidecar(partial: Path, request: dict[str, Any], builder: Builder) -> None:
    tokenizer = builder.tokenizer
    content = {
        "request": request,
        "tokenizer": tokenizer.fingerprint,
        "n_vocab": tokenizer.n_vocab,
        "dtype": builder.dtype.name,
        "shard_tokens": SHARD,
        "empty_documents": builder.progress["empty"],
    } | {name: asdict(counts) for name, counts in builder.counts.items()}
    write_atomically(partial / SIDECAR, json.dumps(content, indent=1))
    (partial / PROGRESS).unlink(missing_ok=True)
    sync_folder(partial)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summary(corpus: Corpus) -> str:
    parts = [
        f"{split.n_tokens:,} {name} tokens ({split.n_documents:,} documents, {split.n_bytes / 1e6:.1f} MB)"
        for name, split in (("training", corpus.train), ("validation", corpus.val))
    ]
    verb = "reusing" if corpus.reused else "prepared"
    return f"{verb} {corpus.folder}: {', '.join(parts)}, vocabulary {corpus.tokenizer.n_vocab:,}"


def require(tokens: TokenFile, context_length: int, remedy: str) -> None:
    if tokens.n_tokens < context_length + 1:
        raise ValueError(
            f"{tokens.path} holds {tokens.n_tokens} tokens; model.context_length={context_length} "
            f"needs at least {context_length + 1}: {remedy}"
        )
