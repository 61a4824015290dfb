"""What a model will see: python -m data [key=value ...], such as path=notes tokenizer=bytes or name=roneneldan/TinyStories."""

import dataclasses
import json
import sys
from typing import Any

import numpy as np

from data.prepare import Corpus, prepare
from data.source import DataConfig
from data.token_file import TokenFile
from data.tokenizer import TokenizerConfig


def main(arguments: list[str]) -> None:
    show(prepare(*requested(arguments), context_length=1))


def requested(arguments: list[str]) -> tuple[DataConfig, TokenizerConfig]:
    settings = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    types = {"tokenizer": str, "vocab_size": int, **{field.name: field.type for field in dataclasses.fields(DataConfig)}}
    if unknown := settings.keys() - types.keys():
        raise ValueError(f"{min(unknown)} is no setting: choose among {', '.join(types)}")
    values = {key: read(key, text, types[key]) for key, text in settings.items()}
    tokenizer = TokenizerConfig(values.pop("tokenizer", "bpe"), values.pop("vocab_size", 4096))
    return DataConfig(**values), tokenizer


def read(key: str, text: str, kind: Any) -> Any:
    if not text:
        raise ValueError(f"{key}= is empty: give it a value, or leave it out")
    if kind is Any:  # paths
        return text.split(",") if "," in text else text
    if kind in (str, str | None):
        return text
    try:
        value = json.loads(text.lower().replace("_", ""))
    except ValueError:
        value = text
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{key}={text} is no {getattr(kind, '__name__', kind)}")
    return value


def show(corpus: Corpus) -> None:
    print(f"{corpus.folder}: tokenizer {corpus.tokenizer.name}, {corpus.tokenizer.n_vocab:,} ids")
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        print(
            f"{name:5}: {tokens.n_documents:,} documents, {tokens.n_tokens:,} tokens, "
            f"{tokens.n_bytes / max(1, tokens.n_tokens):.2f} bytes a token, "
            f"longest document {longest(tokens, corpus.tokenizer.end_of_text):,} tokens"
        )
    for start in range(0, min(192, corpus.train.n_tokens), 64):
        row = corpus.train.read(start, min(start + 64, corpus.train.n_tokens))
        print(f"\ntokens {start} to {start + len(row)}: {row[:8].tolist()} ...\n{corpus.tokenizer.decode(row.tolist())}")


def longest(tokens: TokenFile, end_of_text: int) -> int:
    """Of the documents, without their end-of-text."""
    best = here = 0
    for block in tokens.blocks():
        ends = np.flatnonzero(block == end_of_text)
        if len(ends):
            best, here = max(best, here + int(ends[0]), int(np.diff(ends, prepend=ends[0]).max()) - 1), -int(ends[-1]) - 1
        here += len(block)
    return max(best, here)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
