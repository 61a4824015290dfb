"""What a model will see: python -m data [key=value ...], such as path=notes tokenizer=bytes or name=roneneldan/TinyStories."""

import dataclasses
import sys
from typing import Any

import numpy as np

from data.prepare import Corpus, prepare
from data.source import DataConfig
from data.token_file import TokenFile
from data.tokenizer import TokenizerConfig


def main(arguments: list[str]) -> None:
    settings = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    types = {field.name: str(field.type) for field in dataclasses.fields(DataConfig)}
    unknown = [key for key in settings if key not in {*types, "tokenizer", "vocab_size"}]
    if unknown:
        raise ValueError(f"{unknown[0]} is no setting: choose among tokenizer, vocab_size, {', '.join(types)}")
    tokenizer = TokenizerConfig(settings.pop("tokenizer", "bpe"), int(settings.pop("vocab_size", 4096)))
    data = DataConfig(**{key: read(value, types[key]) for key, value in settings.items()})
    show(prepare(data, tokenizer, context_length=1))


def read(text: str, kind: str) -> Any:
    if kind.startswith("bool"):
        return text.lower() in ("true", "1", "yes")
    if kind.startswith("int"):
        return int(text)
    if kind.startswith("float"):
        return float(text)
    return text.split(",") if kind == "Any" and "," in text else text


def show(corpus: Corpus) -> None:
    print(f"{corpus.folder}: tokenizer {corpus.tokenizer.name}, {corpus.tokenizer.n_vocab:,} ids")
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        ratio = tokens.n_bytes / max(1, tokens.n_tokens)
        print(
            f"{name:5}: {tokens.n_documents:,} documents, {tokens.n_tokens:,} tokens, {ratio:.2f} bytes a token, "
            f"longest document {longest(tokens, corpus.tokenizer.end_of_text):,} tokens"
        )
    for start in range(0, min(192, corpus.train.n_tokens), 64):
        row = corpus.train.read(start, min(start + 64, corpus.train.n_tokens))
        print(f"\ntokens {start} to {start + len(row)}: {row[:8].tolist()} ...\n{corpus.tokenizer.decode(row.tolist())}")


def longest(tokens: TokenFile, end_of_text: int) -> int:
    ends = [-1]
    start = 0
    for block in tokens.blocks():
        ends += (np.flatnonzero(block == end_of_text) + start).tolist()
        start += len(block)
    return int(np.diff([*ends, start]).max()) - 1


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
