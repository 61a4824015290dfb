"""The built-in corpus: the Python standard library's own modules, real text on every machine that runs this."""

import io
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import xxhash

from data.source import Document, Position, text_key

EXCLUDED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}


class StandardLibrary:
    label = "stdlib"
    notice = ""

    def __init__(self) -> None:
        self.texts = [read_module(path) for path in module_files()]
        self.keys = [text_key(text) for text in self.texts]
        self.identity = {"content": xxhash.xxh3_128_hexdigest(repr(self.keys).encode())}
        self.size = len(self.texts)
        self.position = 0

    def val(self) -> None:
        return None

    def documents(self, after: Position = (None, 0)) -> Iterator[Document]:
        for i in range(after[1], len(self.texts)):
            self.position = i
            yield Document(self.keys[i], [self.texts[i]], (None, i + 1))

    def check(self) -> None:
        pass


def module_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for name in sorted(sys.stdlib_module_names - EXCLUDED):
        files += [root / f"{name}.py"] if (root / f"{name}.py").is_file() else []
        files += sorted((root / name).rglob("*.py"))
    files = [path for path in files if not EXCLUDED & set(path.relative_to(root).parts)]
    if len(files) < 100:
        raise ValueError(f"{root} holds only {len(files)} modules of the standard library: set data.path to a text")
    return files


def read_module(path: Path) -> str:
    """The source as it is, decoded by its PEP 263 cookie (UTF-8 without one)."""
    raw = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)
