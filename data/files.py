"""Local files: text files are documents, the rows of .jsonl, .csv and .parquet files are documents.

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
from typing import Any, BinaryIO

import xxhash

from data.source import Document, text_key
from data.tokenizer import well_formed

TEXT, ROWS = (".txt", ".md"), (".jsonl", ".json", ".csv", ".parquet")
BLOCK = 1 << 20  # bytes


class Files:
    def __init__(self, path: Any, column: str, key: str) -> None:
        self.column = column
        self.paths, self.notice = expand(path, key)
        self.label = Path(self.paths[0]).name.split(".")[0] if len(self.paths) == 1 else Path(first(path)).name
        self.seen = [state(path) for path in self.paths]
        self.digests = [file_digest(path) for path in self.paths]
        content = [(kind(path), digest) for path, digest in zip(self.paths, self.digests, strict=True)]
        self.identity = {"content": xxhash.xxh3_128_hexdigest(repr(content).encode()), "column": column}
        self.size = sum(size for size, _ in self.seen)
        self.position = 0

    def documents(self, after: tuple[dict | None, int] = (None, 0)) -> Iterator[Document]:
        count, base = 0, 0
        for path, digest, (size, _) in zip(self.paths, self.digests, self.seen, strict=True):
            if kind(path) in ROWS:
                for text in self._rows(path, base):
                    count += 1
                    if count > after[1]:
                        yield Document(text_key(text), [text], (None, count))
            else:
                count += 1
                if count > after[1]:
                    yield Document(digest, self._text(path, base), (None, count))
            base += size
            self.position = base if kind(path) in ROWS else self.position

    def check(self) -> None:
        for path, seen in zip(self.paths, self.seen, strict=True):
            if state(path) != seen:
                raise ValueError(f"{path} changed while it was read: run again")

    def _text(self, path: Path, base: int) -> Iterator[str]:
        """A text file as it is: no byte is changed, no line end translated."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with binary(path) as (raw, file):
            offset, block = 0, b"-"
            while block:
                block, pending = file.read(BLOCK), len(decoder.getstate()[0])
                try:
                    yield decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise not_utf8(path, offset - pending + error.start, error) from None
                offset += len(block)
                self.position = base + raw.tell()

    def _rows(self, path: Path, base: int) -> Iterator[str]:
        if kind(path) == ".parquet":
            yield from self._parquet_rows(path)
            return
        with binary(path) as (raw, file):
            rows = csv_rows if kind(path) == ".csv" else json_rows
            for where, row in rows(path, file):
                self.position = base + raw.tell()
                yield cell(row, self.column, where)

    def _parquet_rows(self, path: Path) -> Iterator[str]:
        import pyarrow  # slow to import, and comes with `datasets`
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                if self.column not in file.schema_arrow.names:
                    raise no_column(self.column, file.schema_arrow.names, str(path))
                count = 0
                for batch in file.iter_batches(batch_size=256, columns=[self.column]):
                    for value in batch.column(0).to_pylist():
                        count += 1
                        yield cell({self.column: value}, self.column, f"{path} row {count}")
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a parquet file: {str(error).splitlines()[0]}") from None


def expand(path: Any, key: str) -> tuple[list[Path], str]:
    """The files that a path, a folder, a glob or a list of these names, each once, and a notice of what is left out."""
    found: dict[Path, None] = {}
    left_out: Counter[str] = Counter()
    for item in [path] if isinstance(path, str | Path) else path:
        here = Path(item).expanduser()
        for match in [here] if here.exists() else map(Path, sorted(glob(str(here), recursive=True))):
            if match.is_file():
                found[match] = None
            else:
                inside = [p for p in sorted(match.rglob("*")) if p.is_file() and not hidden(p.relative_to(match))]
                found |= dict.fromkeys(p for p in inside if kind(p) in TEXT + ROWS)
                left_out.update(p.suffix or p.name for p in inside if kind(p) not in TEXT + ROWS)
        if not here.exists() and not glob(str(here), recursive=True):
            raise ValueError(f"{key}={item} does not exist: give a file, a folder, a glob or a list of these")
    if not found:
        raise ValueError(f"{key}={path} holds no {', '.join(TEXT + ROWS)} file (each may end in .gz)")
    kinds = ", ".join(f"{n} x {suffix}" for suffix, n in left_out.most_common(8))
    return list(found), f"left out of {path}, not text: {kinds}" if left_out else ""


def first(path: Any) -> str:
    return str(path if isinstance(path, str | Path) else path[0])


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def kind(path: Path) -> str:
    """The suffix that says how a file is read. A file of an unknown kind, named by the user, is read as text."""
    name = path.name.lower().removesuffix(".gz")
    return "." + name.rpartition(".")[2]


def state(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def file_digest(path: Path) -> int:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.intdigest()


@contextmanager
def binary(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file as it lies on the disk, whose position tells the progress, and as it reads, unpacked."""
    with path.open("rb") as raw:
        try:
            yield raw, gzip.open(raw) if path.suffix.lower() == ".gz" else raw
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}") from None


def lines(path: Path, file: BinaryIO) -> Iterator[str]:
    offset = 0
    for line in file:
        try:
            yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(path, offset + error.start, error) from None
        offset += len(line)


def json_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines(path, file), 1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error}): one object a line is needed") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} holds a JSON {type(row).__name__}: one object a line is needed")
            yield where, row


def csv_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses documents over 128 KB
    reader = csv.DictReader(lines(path, file), strict=True)
    try:
        for row in reader:
            yield f"{path} line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num} is not CSV: {error}") from None


def cell(row: dict[str, Any], column: str, where: str) -> str:
    """The document in one row; null is an empty one."""
    if column not in row:
        raise no_column(column, [str(name) for name in row], where)
    value = row[column]
    if not isinstance(value, str | None):
        raise ValueError(
            f"{where}: column {column} holds {type(value).__name__}, not text: set data.text_column to a text column"
        )
    return well_formed(value or "")


def no_column(column: str, columns: list[str], where: str) -> ValueError:
    return ValueError(
        f"{where} has no column data.text_column={column}: set it to one of {', '.join(columns) or '(none)'}"
    )


def not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> ValueError:
    return ValueError(
        f"{path} is not UTF-8 at byte {offset} (0x{error.object[error.start]:02x}): "
        f"convert it, for example with iconv -f LATIN1 -t UTF-8, or repair that byte"
    )
