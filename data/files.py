"""Local files: every text file is a document, and so is every row of a .jsonl, .csv or .parquet file.

Rows are read here rather than by `datasets`, whose readers change text: a column of dates becomes timestamps, the
word NA becomes null, 007 becomes 7, CRLF becomes LF.
"""

import codecs
import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import IO, Any

import xxhash

from data.source import Document, Position, cell, no_column, text_key

TEXT, ROWS = (".txt", ".md"), (".jsonl", ".json", ".csv", ".parquet")
BLOCK = 1 << 20  # bytes


class Files:
    def __init__(self, path: Any, column: str, val_path: Any = None, key: str = "data.path") -> None:
        self.column = column
        self.own_val = None if val_path is None else Files(val_path, column, key="data.val_path")
        items = [path] if isinstance(path, str | Path) else list(path)
        self.paths, self.notice = expand([Path(item).expanduser() for item in items], key)
        self.label = self.paths[0].name.split(".")[0] if len(self.paths) == 1 else Path(items[0]).name
        self.seen = [seen(path) for path in self.paths]
        self.digests = [file_digest(path) for path in self.paths]
        content = repr([(kind(path), digest) for path, digest in zip(self.paths, self.digests, strict=True)])
        self.identity: dict[str, Any] = {"content": xxhash.xxh3_128_hexdigest(content.encode()), "column": column}
        if self.own_val:
            self.identity["val"] = self.own_val.identity
        self.size = sum(size for size, _ in self.seen)
        self.base = 0  # bytes of the files that were read
        self.raw: IO[bytes] | None = None  # the file that is being read, as it lies on the disk

    @property
    def position(self) -> int:
        return self.base + (self.raw.tell() if self.raw and not self.raw.closed else 0)

    def val(self) -> "Files | None":
        return self.own_val

    def documents(self, after: Position = (None, 0)) -> Iterator[Document]:
        count = self.base = 0
        for path, digest, (size, _) in zip(self.paths, self.digests, self.seen, strict=True):
            if kind(path) in ROWS:
                for text in self._rows(path):
                    count += 1
                    if count > after[1]:
                        yield Document(text_key(text), [text], (None, count))
            else:
                count += 1
                if count > after[1]:
                    yield Document(digest, self._text(path), (None, count))
            self.base += size

    def check(self) -> None:
        for path, before in zip(self.paths, self.seen, strict=True):
            if seen(path) != before:
                raise ValueError(f"{path} changed while it was read: run again")
        if self.own_val:
            self.own_val.check()

    def _text(self, path: Path) -> Iterator[str]:
        """A text file as it is: no byte is changed, no line end translated."""
        decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
        with self._open(path) as file:
            while block := file.read(BLOCK):
                offset += len(block)
                with utf8(path, offset - len(block) - len(decoder.getstate()[0])):
                    yield decoder.decode(block)
            with utf8(path, offset - len(decoder.getstate()[0])):
                decoder.decode(b"", final=True)

    def _rows(self, path: Path) -> Iterator[str]:
        if kind(path) == ".parquet":
            yield from parquet_rows(path, self.column)
            return
        with self._open(path) as file:
            for where, row in csv_rows(path, file) if kind(path) == ".csv" else json_rows(path, file):
                yield cell(row, self.column, where)

    @contextmanager
    def _open(self, path: Path) -> Iterator[IO[bytes]]:
        with path.open("rb") as self.raw:
            try:
                yield gzip.GzipFile(fileobj=self.raw) if path.suffix.lower() == ".gz" else self.raw  # type: ignore[misc]
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path} is not a whole gzip file: {error}") from None


def parquet_rows(path: Path, column: str) -> Iterator[str]:
    import pyarrow.parquet  # slow to import, and comes with `datasets`

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise no_column(column, file.schema_arrow.names, str(path))
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield cell({column: value}, column, f"{path} row {row}")
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {str(error).splitlines()[0]}") from None


def json_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines(path, file), 1):
        where = f"{path} line {number}"
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error}): one object a line is needed") from None
        if not isinstance(row, dict | None):
            raise ValueError(f"{where} holds a {type(row).__name__}: one object a line is needed")
        if row is not None:
            yield where, row


def csv_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses documents over 128 KB
    reader = csv.DictReader(lines(path, file), strict=True)
    try:
        for row in reader:
            yield f"{path} line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.reader.line_num} is not CSV: {error}") from None


def lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    offset = 0
    for line in file:
        with utf8(path, offset):
            yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
        offset += len(line)


@contextmanager
def utf8(path: Path, offset: int) -> Iterator[None]:
    """For decoding bytes that begin at that offset of the (unpacked) file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte {offset + error.start} (0x{error.object[error.start]:02x}): convert it, for "
            "example with iconv -f LATIN1 -t UTF-8, or repair that byte"
        ) from None


def expand(items: list[Path], key: str) -> tuple[list[Path], str]:
    """The files that files, folders and globs name, each once, and a notice of what the folders hold besides."""
    found: dict[Path, None] = {}
    left_out: Counter[str] = Counter()
    for item in items:
        matches = [item] if item.exists() else [Path(match) for match in sorted(glob(str(item), recursive=True))]
        if not matches:
            raise ValueError(f"{key}={item} does not exist: give a file, a folder, a glob or a list of these")
        for match in matches:
            for path in sorted(match.rglob("*")) if match.is_dir() else [match]:
                hidden = any(part.startswith(".") for part in path.relative_to(match).parts)
                if path == match or (path.is_file() and not hidden and kind(path) in TEXT + ROWS):
                    found[path] = None
                elif path.is_file() and not hidden:
                    left_out[path.suffix or path.name] += 1
    if not found:
        raise ValueError(f"{key}={items[0]} holds no {', '.join(TEXT + ROWS)} files (nor such .gz files)")
    kinds = ", ".join(f"{n} x {suffix}" for suffix, n in left_out.most_common(8))
    return list(found), f"not read in {items[0]}: {kinds}" if left_out else ""


def kind(path: Path) -> str:
    """How a file is read. One of an unknown kind is read as text if it is named, and left out if a folder is."""
    return "." + path.name.lower().removesuffix(".gz").rpartition(".")[2]


def seen(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def file_digest(path: Path) -> int:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.intdigest()
