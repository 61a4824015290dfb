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
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import tiktoken
import xxhash

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tiktoken.json"
BYTES = {bytes([byte]): byte for byte in range(256)}
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
MOST = 1 << 24  # ids
PIECE = 1 << 17  # characters
SHARES = 64  # of a batch of texts, each a task for a thread
# The last place where a new token starts in every encoding above, so that cutting there changes no id: of all that
# is no blank, a token goes on with line ends only, and only after punctuation. (Blanks of Unicode: Python's \s has four more.)
CUT = re.compile(r"(?s:.*)(?:\S(?=[^\S\r\n\x1c-\x1f])|[^\W_](?=[\r\n]))")


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
                f"tokenizer.vocab_size={self.vocab_size} is too small for bpe: 256 bytes and end-of-text need at least 257"
            )
        if self.name == "bpe" and self.vocab_size is not None and self.vocab_size > MOST:
            raise ValueError(f"tokenizer.vocab_size={self.vocab_size} is too much for bpe: at most {MOST}")


class Tokenizer(Protocol):
    name: str
    n_vocab: int  # every id is below it
    end_of_text: int
    prefix: list[int]  # ids that a foreign model expects before every text (Llama's <s>)
    ends: list[int]  # the ids that end a text: end_of_text, and whatever else a chat model says when it has done

    def spelled(self) -> str:
        """Everything that decides the ids, but for end_of_text."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal if and only if the same texts give the same ids."""
        return xxhash.xxh3_128_hexdigest(f"{self.end_of_text} {self.spelled()}".encode())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """With special=False, text that spells a special token is ordinary text. A lone surrogate is read as U+FFFD."""

    def encode_batch(self, texts: Sequence[str], pool: ThreadPoolExecutor) -> list[np.ndarray]:
        """The ids of each text, found with every thread of the pool."""

    def cut(self, parts: Iterable[str]) -> Iterator[str]:
        """A text, given in parts, as pieces that may be encoded one by one: in one piece, unless a tokenizer knows better."""
        yield from filter(None, ["".join(parts)])

    def token_bytes(self, token: int) -> bytes:
        """What the id adds inside a text: U+FFFD for an id below n_vocab that stands for nothing."""

    def save(self, folder: Path) -> None: ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, np.asarray(ids, np.int64).tolist()))

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")


def pieces(parts: Iterable[str]) -> Iterator[str]:
    """Cut one text, given in parts, into pieces of at most PIECE characters, wherever the parts begin and end."""
    text = ""
    for part in parts:
        text, start = text + part, 0
        while len(text) - start > PIECE:
            found = CUT.match(text, start, start + PIECE)
            end = found.end() if found else start + PIECE  # no blank: one word is cut in two
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def well_formed(text: str) -> str:
    """The text with lone surrogates, which no UTF-8 can hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class TiktokenTokenizer(Tokenizer):
    def __init__(self, name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> None:
        self.name, self.pattern, self.ranks, self.special = name, pattern, ranks, special
        self.own = threading.local()
        self.n_vocab = self.encoding.n_vocab
        self.end_of_text = special[END_OF_TEXT]
        self.prefix, self.ends = [], [self.end_of_text]

    @property
    def encoding(self) -> tiktoken.Encoding:
        """This thread's own. An encoding is fast only in the thread that used it first (its regex keeps that thread's
        scratch space outside a lock): with two threads, two of them are 1.5 times as fast as one."""
        if not hasattr(self.own, "encoding"):
            self.own.encoding = tiktoken.Encoding(
                self.name, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=self.special
            )
        return self.own.encoding

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if special:
            return self.encoding.encode(well_formed(text), allowed_special="all")
        return self._ids(text).tolist()

    def encode_batch(self, texts: Sequence[str], pool: ThreadPoolExecutor) -> list[np.ndarray]:
        found = [np.empty(0, np.uint32)] * len(texts)
        shares = (texts[i::SHARES] for i in range(SHARES))
        for i, share in enumerate(pool.map(lambda share: list(map(self._ids, share)), shares)):
            found[i::SHARES] = share
        return found

    def _ids(self, text: str) -> np.ndarray:
        """tiktoken releases the interpreter's lock meanwhile."""
        found = [self.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces([well_formed(text)])]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint32), *found])

    def cut(self, parts: Iterable[str]) -> Iterator[str]:
        return pieces(parts)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token id {token} is outside the {self.n_vocab} ids of tokenizer {self.name}")
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:
            return "\ufffd".encode()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(self.spelled())

    def spelled(self) -> str:
        """JSON; a token's rank is its place in the list."""
        tokens = sorted(self.ranks, key=self.ranks.__getitem__)
        assert [self.ranks[token] for token in tokens] == list(range(len(tokens)))
        ranks = [base64.b64encode(token).decode() for token in tokens]
        return json.dumps({"name": self.name, "pattern": self.pattern, "special_tokens": self.special, "ranks": ranks})


def load_tokenizer(folder: Path) -> Tokenizer:
    """What `save` wrote, or the tokenizer.json of a Hugging Face model. Raises ValueError for what is missing or damaged."""
    path = next((folder / name for name in (FILE_NAME, "tokenizer.json") if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder} holds no tokenizer: neither {FILE_NAME} nor tokenizer.json")
    try:
        if path.name == FILE_NAME:
            content = json.loads(path.read_text())
            ranks = {base64.b64decode(token): rank for rank, token in enumerate(content["ranks"])}
            return TiktokenTokenizer(content["name"], content["pattern"], ranks, content["special_tokens"])
        from data.foreign_tokenizer import ForeignTokenizer  # imports `tokenizers`, which few runs need

        return ForeignTokenizer(folder)
    except Exception as error:  # damaged files raise many types, `tokenizers` Exception itself
        if type(error) is ValueError and path.name != FILE_NAME:  # ours
            raise
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        remedy = "fetch them again, or use another checkpoint"
        raise ValueError(f"{path}, or a file that belongs to it, is damaged ({found}): {remedy}") from None


def build_tokenizer(config: TokenizerConfig, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """Only bpe asks for the texts, and trains on them."""
    if config.name == "bytes":
        return TiktokenTokenizer("bytes", "(?s:.{1,64})", BYTES, {END_OF_TEXT: 256})
    if config.name == "bpe":
        assert config.vocab_size is not None
        return train_bpe(texts(), config.vocab_size)
    for path in NAMED[config.name]:
        require_file(config.name, AZURE + path)
    known = tiktoken.get_encoding(config.name)
    return TiktokenTokenizer(config.name, known._pat_str, known._mergeable_ranks, known._special_tokens)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """At most vocab_size ids: fewer where the texts hold fewer pairs to merge. The same texts give the same ids."""
    import rustbpe  # needed only here

    trainer = rustbpe.Tokenizer()
    cut = (piece for text in texts for piece in pieces([well_formed(text)]))
    trainer.train_from_iterator(cut, vocab_size - 1, buffer_size=256, pattern=BPE_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return TiktokenTokenizer("bpe", BPE_PATTERN, ranks, {END_OF_TEXT: len(ranks)})


def require_file(name: str, url: str) -> None:
    """tiktoken downloads without a time limit, so see first whether the file is there or can be had."""
    default = os.environ.get("DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    stored = Path(os.environ.get("TIKTOKEN_CACHE_DIR", default), hashlib.sha1(url.encode()).hexdigest())
    if stored.is_file():
        return
    import requests  # tiktoken's own, slow to import

    try:
        requests.head(url, timeout=5).raise_for_status()
    except requests.RequestException as error:
        raise ValueError(
            f"tokenizer.name={name} needs {url}, which cannot be downloaded ({type(error).__name__}): store it as "
            f"{stored.name} in the folder that TIKTOKEN_CACHE_DIR names, or use tokenizer=bytes or tokenizer=bpe"
        ) from None
