"""What to read, and what every source (files.py, hub.py) gives: documents, one at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import xxhash

from data.tokenizer import well_formed


@dataclass(kw_only=True)
class DataConfig:
    """Validation is val_split or val_path, else the hub dataset's own `validation` split, else val_fraction of
    the documents (chosen by a hash of their content) or, of fewer than 20 documents, the end of the text."""

    source: str = "stdlib"  # stdlib | files | hub
    path: Any = None  # a file, a folder, a glob or a list of these; set, it is what is read
    val_path: Any = None
    name: str | None = None  # hub: owner/dataset
    subset: str | None = None  # hub: its configuration
    split: str = "train"
    val_split: str | None = None
    revision: str | None = None  # hub: a branch, tag or commit
    streaming: bool = False  # hub: read as it downloads, keep nothing but tokens
    text_column: str = "text"
    val_fraction: float | None = None  # None: a tenth, of the standard library a hundredth
    max_tokens: int | None = None  # stop after this many tokens
    threads: int | None = None  # None: every core
    cache_dir: str = "cache"

    def __post_init__(self) -> None:
        if self.source not in ("stdlib", "files", "hub"):
            raise ValueError(f"data.source={self.source} is unknown: choose stdlib, files or hub")
        if not 0 < self.held_out < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1")
        for key in ("max_tokens", "threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"data.{key}={value} must be at least 1 (or null)")
        if self.path is not None and (self.name is not None or self.source == "hub"):
            two = f"data.path={self.path} and data.name={self.name} (data.source={self.source}) name two sources"
            raise ValueError(f"{two}: set data.path=null for the hub, or data=text for files")
        if self.kind == "files" and self.path is None:
            raise ValueError("data.path=null: data.source=files needs data.path, a file, a folder, a glob or a list")
        if self.kind == "hub" and self.name is None:
            raise ValueError("data.name=null: data.source=hub needs data.name, such as roneneldan/TinyStories")
        if self.kind != "files" and self.val_path is not None:
            raise ValueError(f"data.val_path={self.val_path} needs data.path, but data.source={self.kind}")
        if self.kind != "hub" and self.val_split is not None:
            raise ValueError(f"data.val_split={self.val_split} needs a hub dataset, but data.source={self.kind}")

    @property
    def held_out(self) -> float:
        if self.val_fraction is not None:
            return self.val_fraction
        return 0.01 if self.kind == "stdlib" else 0.1

    @property
    def kind(self) -> str:
        """A path or a name decides over a source left at its default."""
        if self.source == "stdlib" and self.path is not None:
            return "files"
        return "hub" if self.source == "stdlib" and self.name is not None else self.source


class Document(NamedTuple):
    key: int  # 128-bit hash of the content
    parts: Iterable[str]  # the text, in order; read once
    state: Any = None  # `documents` can begin here again, at this document or some before it


class Source(Protocol):
    label: str
    identity: dict[str, Any]  # equal if and only if the documents are

    def share(self) -> float | None:
        """How much of it has been read, from 0 to 1; None where nobody knows, since it is still to be downloaded."""

    def val(self) -> "Source | None":
        """The documents that the source itself sets aside for validation."""

    def documents(self, state: Any = None) -> Iterator[Document]:
        """From the state that one of them came with, or from the beginning."""


def row_document(row: dict[str, Any], column: str, where: str, state: Any = None) -> Document:
    """The document in one row; null is an empty one."""
    if column not in row:
        raise no_column(column, [str(name) for name in row], where)
    value = row[column]
    if not isinstance(value, str | None):
        raise ValueError(
            f"{where}: column {column} holds {type(value).__name__}, not text: set data.text_column to a text column"
        )
    text = well_formed(value or "")
    return Document(xxhash.xxh3_128_intdigest(text.encode()), [text], state)


def no_column(column: str, columns: list[str], where: str) -> ValueError:
    return ValueError(f"{where} has no column data.text_column={column}: set it to one of {', '.join(columns) or '(none)'}")
