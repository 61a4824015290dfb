"""Local files: every text file is a document, and so is every row of a .jsonl, .csv or .parquet file.

Rows are read here rather than by `datasets`, whose readers change text: a column of dates becomes timestamps, the
word NA becomes null, 007 becomes 7, CRLF becomes LF.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from glob import glob
from pathlib import Path
from typing import IO, Any

import xxhash

from data.source import Document, no_column, row_document

BLOCK = 1 << 20  # characters


class Files:
    def __init__(self, paths: list[Path], column: str = "text", label: str = "", val: "Files | None" = None) -> None:
        self.column, self.own_val = column, val
        self.label = label or (paths[0].name.split(".")[0] if len(paths) == 1 else paths[0].parent.name)
        self.files = [(path, stamp(path), file_digest(path)) for path in paths]
        content = repr([(kind(path), digest) for path, _, digest in self.files])
        self.identity: dict[str, Any] = {"content": xxhash.xxh3_128_hexdigest(content.encode()), "column": column}
        if val:
            self.identity["val"] = val.identity
        self.size = sum(size for _, (size, _), _ in self.files)
        self.finished = 0  # bytes of the files before the one that is being read
        self.raw: IO[bytes] | None = None  # that one, as it lies on the disk

    def share(self) -> float:
        return (self.finished + (self.raw.tell() if self.raw and not self.raw.closed else 0)) / max(1, self.size)

    def val(self) -> "Files | None":
        return self.own_val

    def documents(self, state: Any = None) -> Iterator[Document]:
        """Always from the beginning: reading is quick, next to tokenising."""
        self.finished = 0
        for path, before, digest in self.files:
            if kind(path) not in READERS:
                yield Document(digest, self._text(path))
            else:
                with self._open(path, "utf-8-sig") as file:
                    for where, row in READERS[kind(path)](path, file, self.column):
                        yield row_document(row, self.column, where)
            if stamp(path) != before:
                raise ValueError(f"{path} changed while it was read: run again")
            self.finished += before[0]

    def _text(self, path: Path) -> Iterator[str]:
        """A text file as it is: no byte is changed, no line end translated."""
        with self._open(path, "utf-8") as file:
            yield from iter(partial(file.read, BLOCK), "")

    @contextmanager
    def _open(self, path: Path, encoding: str) -> Iterator[io.TextIOWrapper]:
        with path.open("rb") as self.raw:
            unpacked: Any = gzip.GzipFile(fileobj=self.raw) if path.suffix.lower() == ".gz" else self.raw
            file = io.TextIOWrapper(unpacked, encoding, newline="\n")
            try:
                yield file
            except UnicodeDecodeError as error:  # its object ends where the file was read to
                at, byte = unpacked.tell() - len(error.object) + error.start, error.object[error.start]
                raise ValueError(
                    f"{path} is not UTF-8 at byte {at} (0x{byte:02x}): convert it, for example with "
                    "iconv -f LATIN1 -t UTF-8, or repair that byte"
                ) from None
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path} is not a whole gzip file: {error}") from None


def json_rows(path: Path, file: io.TextIOWrapper, column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        where = f"{path} line {number}"
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON that can be read ({error}): one object a line is needed") from None
        if not isinstance(row, dict | None):
            raise ValueError(f"{where} holds a {type(row).__name__}: one object a line is needed")
        if row is not None:
            yield where, row


def csv_rows(path: Path, file: io.TextIOWrapper, column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses documents over 128 KB
    reader = csv.DictReader(file, strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(
                    f"{path} line {reader.line_num} has {'more' if None in row else 'fewer'} fields than the header's "
                    f"{len(row) - (None in row)}: put a text that has commas in it into double quotes"
                )
            yield f"{path} line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.reader.line_num} is not CSV: {error}") from None


def parquet_rows(path: Path, file: io.TextIOWrapper, column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet  # slow to import, and comes with `datasets`

    try:
        table = pyarrow.parquet.ParquetFile(file.buffer)
        if column not in table.schema_arrow.names:
            raise no_column(column, table.schema_arrow.names, str(path))
        batches = table.iter_batches(batch_size=256, columns=[column])
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file: {str(error).splitlines()[0]}") from None


READERS = {".jsonl": json_rows, ".json": json_rows, ".csv": csv_rows, ".parquet": parquet_rows}
KINDS = (".txt", ".md", *READERS)


def find_files(given: Any, key: str, say: Callable[[str], None]) -> list[Path]:
    """The files that a file, folder or glob, or a list of these, names, each once. Says what folders hold besides."""
    items = [Path(os.path.expanduser(str(item))) for item in (given if isinstance(given, list | tuple) else [given])]
    found: dict[Path, Path] = {}  # by where they really lie
    left_out: Counter[str] = Counter()
    for item in items:
        matches = [item] if item.exists() else [Path(match) for match in sorted(glob(str(item), recursive=True))]
        if not matches:
            raise ValueError(f"{key}={item} does not exist: give a file, a folder, a glob or a list of these")
        for match in matches:
            for path in sorted(match.rglob("*")) if match.is_dir() else [match]:
                hidden = any(part.startswith(".") for part in path.relative_to(match).parts)
                if path.exists() and not (path.is_file() or path.is_dir()):
                    raise ValueError(f"{key}={path} is a pipe or device, which can be read once: save it to a file first")
                if path == match or (path.is_file() and not hidden and kind(path) in KINDS):
                    found.setdefault(path.resolve(), path)
                elif path.is_file() and not hidden:
                    left_out[path.suffix or path.name] += 1
    if not found:
        raise ValueError(f"{key}={given} holds no {', '.join(KINDS)} files (nor such .gz files)")
    if left_out:
        say(f"not read in {given}: {', '.join(f'{n} x {suffix}' for suffix, n in left_out.most_common(8))}")
    return list(found.values())


def kind(path: Path) -> str:
    """How a file is read. One of an unknown kind is read as text if it is named, and left out if a folder is."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def stamp(path: Path) -> tuple[int, int]:
    """Size and time, which tell of most changes at once."""
    return path.stat().st_size, path.stat().st_mtime_ns


def file_digest(path: Path) -> int:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).intdigest()  # type: ignore[attr-defined]
