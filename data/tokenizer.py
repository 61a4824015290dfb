"""Text to token ids and back. Our own tokenizers are tiktoken encodings; a foreign one is in foreign_tokenizer.py.

Ids never depend on how a text arrives: `pieces` cuts any text at places chosen by its characters alone, and
encode, encode_batch and the preparation of a corpus all encode these pieces.
"""

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tiktoken
import xxhash

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tiktoken.json"
AZURE = "https://openaipublic.blob.core.windows.net/"
NAMED = {  # the files that tiktoken downloads for each encoding
    "gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    "cl100k_base": ("encodings/cl100k_base.tiktoken",),
    "o200k_base": ("encodings/o200k_base.tiktoken",),
}
# GPT-4's split, with digits in pairs (better for small vocabularies) and bounded runs of blanks (an unbounded
# run followed by a letter overflows the regex engine's stack).
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s{1,512}(?!\S)|\s{1,512}"
)
PIECE = 1 << 17  # characters
# Between a letter or digit and a blank every pattern above starts a new token, so cutting there changes no id.
CUT = re.compile(r"[^\W_](?=\s)")


@dataclass
class TokenizerConfig:
    """vocab_size counts every id, end-of-text included. Only bpe reads it."""

    name: str = "bpe"
    vocab_size: int | None = 4096

    def __post_init__(self) -> None:
        known = ["bytes", "bpe", *NAMED]
        if self.name not in known:
            raise ValueError(f"tokenizer.name={self.name} is unknown: choose one of {', '.join(known)}")
        if self.name == "bpe" and (self.vocab_size is None or self.vocab_size < 257):
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} is too small for bpe: "
                "256 bytes and end-of-text need at least 257"
            )


class Tokenizer(Protocol):
    name: str
    n_vocab: int  # every id is below it
    end_of_text: int
    prefix: list[int]  # ids that the tokenizer's makers put before every text (Llama's <s>); ours have none
    cuttable: bool  # encode(a) + encode(b) == encode(a + b) where `pieces` cuts

    @property
    def fingerprint(self) -> str: ...  # equal if and only if the same ids are produced

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """With special=False, text that spells a special token is ordinary text. Lone surrogates become U+FFFD."""
        ...

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[np.ndarray]: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this id adds inside a text (U+FFFD for an id below n_vocab that stands for nothing)."""
        ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None: ...


def pieces(parts: Iterable[str]) -> Iterator[str]:
    """Cut one text, given in parts, into pieces of at most PIECE characters, wherever the parts begin and end."""
    text = ""
    for part in parts:
        text, start = text + part, 0
        while len(text) - start > PIECE:
            end = last_cut(text, start, start + PIECE)
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def packets(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in groups of some PIECE / 2 characters, each a task worth handing to a thread."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= PIECE // 2:
            yield group
            group, size = [], 0
    if group:
        yield group


def last_cut(text: str, start: int, end: int) -> int:
    """The last harmless cut in text[start:end], else the end (a run without blanks: one word is cut in two)."""
    for low in (end - 4096, start):
        cut = max((match.end() for match in CUT.finditer(text, low, end)), default=None)
        if cut is not None:
            return cut
    return end


def well_formed(text: str) -> str:
    """The text with lone surrogates, which no UTF-8 can hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class ByteTokenizer:
    """One id per UTF-8 byte."""

    name = "bytes"
    n_vocab = 257
    end_of_text = 256
    cuttable = True
    fingerprint = "bytes"

    def __init__(self) -> None:
        self.prefix: list[int] = []

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if not special:
            return list(well_formed(text).encode())
        ids: list[int] = []
        for i, part in enumerate(text.split(END_OF_TEXT)):
            ids += [self.end_of_text] * (i > 0) + self.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        return [np.frombuffer(well_formed(text).encode(), np.uint8) for text in texts]

    def token_bytes(self, token: int) -> bytes:
        check_id(self, token)
        return END_OF_TEXT.encode() if token == self.end_of_text else bytes([token])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.token_bytes(token) for token in as_list(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        ranks = {bytes([i]): i for i in range(256)}
        save_tiktoken(folder, self.name, "(?s:.)", ranks, {END_OF_TEXT: self.end_of_text})


class TiktokenTokenizer:
    cuttable = True

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.name = encoding.name
        self.n_vocab = encoding.n_vocab
        self.end_of_text = encoding.eot_token
        self.prefix: list[int] = []

    @cached_property
    def fingerprint(self) -> str:
        encoding = self.encoding
        ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
        spelled = repr((encoding._pat_str, ranks, sorted(encoding._special_tokens.items())))
        return xxhash.xxh3_128_hexdigest(spelled.encode())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if special:
            return self.encoding.encode(well_formed(text), allowed_special="all")
        return join(self._encode(list(pieces([well_formed(text)])))).tolist()

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """tiktoken releases the interpreter's lock, so threads use every core."""
        cut = [list(pieces([well_formed(text)])) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            encoded = chain.from_iterable(pool.map(self._encode, packets(chain.from_iterable(cut))))
            return [join(list(islice(encoded, len(group)))) for group in cut]

    def _encode(self, group: list[str]) -> list[np.ndarray]:
        return [self.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in group]

    def token_bytes(self, token: int) -> bytes:
        check_id(self, token)
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:
            return "\ufffd".encode()

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, as_list(ids)))

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        encoding = self.encoding
        save_tiktoken(
            folder, self.name, encoding._pat_str, encoding._mergeable_ranks, encoding._special_tokens
        )


def as_list(ids: Sequence[int]) -> list[int]:
    return ids if isinstance(ids, list) else np.asarray(ids, dtype=np.int64).tolist()


def join(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint32), *arrays])


def check_id(tokenizer: Tokenizer, token: int) -> None:
    if not 0 <= token < tokenizer.n_vocab:
        raise ValueError(f"token id {token} is outside the {tokenizer.n_vocab} ids of tokenizer {tokenizer.name}")


def save_tiktoken(
    folder: Path, name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]
) -> None:
    in_order = sorted(ranks, key=ranks.__getitem__)
    assert [ranks[token] for token in in_order] == list(range(len(ranks)))
    content: dict[str, Any] = {"name": name, "pattern": pattern, "special_tokens": special}
    content["ranks"] = [base64.b64encode(token).decode() for token in in_order]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_NAME).write_text(json.dumps(content))


def load_tokenizer(folder: Path) -> Tokenizer:
    """What `save` wrote, or the tokenizer.json of a Hugging Face model."""
    folder = Path(folder)
    if (folder / FILE_NAME).is_file():
        content = json.loads((folder / FILE_NAME).read_text())
        if content["name"] == "bytes":
            return ByteTokenizer()
        ranks = {base64.b64decode(token): rank for rank, token in enumerate(content["ranks"])}
        return TiktokenTokenizer(
            tiktoken.Encoding(
                content["name"],
                pat_str=content["pattern"],
                mergeable_ranks=ranks,
                special_tokens=content["special_tokens"],
            )
        )
    if (folder / "tokenizer.json").is_file():
        from data.foreign_tokenizer import ForeignTokenizer  # needs the optional `tokenizers`

        return ForeignTokenizer.load(folder)
    raise ValueError(f"{folder} holds no tokenizer: neither {FILE_NAME} nor tokenizer.json")


def build_tokenizer(config: TokenizerConfig, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """`texts` is called by bpe only, which trains on what it gives."""
    if config.name == "bytes":
        return ByteTokenizer()
    if config.name == "bpe":
        assert config.vocab_size is not None
        return train_bpe(texts(), config.vocab_size)
    return named_tokenizer(config.name)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """At most vocab_size ids: fewer if the texts hold fewer pairs worth merging. The same texts give the same ids."""
    import rustbpe  # needed only here

    trainer = rustbpe.Tokenizer()
    cut = (piece for text in texts for piece in pieces([well_formed(text)]))
    trainer.train_from_iterator(cut, vocab_size - 1, buffer_size=256, pattern=BPE_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return TiktokenTokenizer(
        tiktoken.Encoding(
            "bpe", pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
        )
    )


def named_tokenizer(name: str) -> Tokenizer:
    """tiktoken's encoding of that name, from its cache or, with a network, from its makers."""
    for path in NAMED[name]:
        require_file(name, AZURE + path)
    return TiktokenTokenizer(tiktoken.get_encoding(name))


def require_file(name: str, url: str) -> None:
    """tiktoken downloads without a time limit, so see first whether the file is there or can be had."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    stored = Path(cache, hashlib.sha1(url.encode()).hexdigest())
    if cache and stored.is_file():
        return
    import requests  # tiktoken's own, slow to import

    try:
        requests.head(url, timeout=5).raise_for_status()
    except requests.RequestException as error:
        raise ValueError(
            f"tokenizer.name={name} needs {url}, which cannot be downloaded ({type(error).__name__}): store it as "
            f"{stored.name} in the folder that TIKTOKEN_CACHE_DIR names, or use tokenizer=bytes or tokenizer=bpe"
        ) from None
