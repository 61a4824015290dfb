import csv
import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data.files import BLOCK, Files, find_files
from data.prepare import open_source
from data.source import DataConfig
from data.stdlib import module_files

ODD_TEXTS = {
    "empty": "",
    "windows": "roses\r\nviolets\r\n\r\nend",
    "byte order mark": "\ufeffstart\n",
    "separators": "a\u2028b\u2029c\x0cd\x1ce\x85f\n",
    "nul": "a\0b\0\n",
    "old mac": "a\rb\r",
    "blank": "\n\n \n",
    "special": "cats <|endoftext|> dogs\n",
    "one byte": "x",
    "one long line": "é" * (BLOCK - 3) + "😀",
}


def texts(*paths: Path | str, column: str = "text") -> list[str]:
    source = Files(find_files([str(path) for path in paths], "data.path", print), column)
    found = ["".join(document.parts) for document in source.documents()]
    assert source.share() == (1 if source.size else 0)
    return found


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Text files


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
def test_a_text_file_is_one_document_read_as_it_is(text, tmp_path):
    assert texts(put(tmp_path / "a.txt", text)) == [text]
    assert texts(put(tmp_path / "a.txt.gz", gzip.compress(text.encode()))) == [text]


@pytest.mark.parametrize("before", [0, 10, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize(("bad", "byte"), [(b"\xff\xfe\n", "0xff"), (b"\xe2\x82\n", "0xe2"), (b"\xe2\x82", "0xe2")])
def test_bytes_that_are_not_utf8_are_refused_with_their_place(before, bad, byte, tmp_path):
    path = put(tmp_path / "bad.txt", b"a" * before + bad)
    with pytest.raises(ValueError) as caught:
        texts(path)
    assert f"{path} is not UTF-8 at byte {before} ({byte})" in str(caught.value)


def test_a_broken_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(os.urandom(5000).hex().encode())
    for content in (whole[:-20], b"plain text"):
        path = put(tmp_path / "a.txt.gz", content)
        with pytest.raises(ValueError, match="a.txt.gz is not a whole gzip file"):
            texts(path)


# Rows


VALUES = ["2024-01-01", "NA", "007", "null", "a\r\nb", "", "x" * 200_000, "quo\"te, ' comma", "\u2028\x85", "é😀"]


@pytest.mark.parametrize(
    ("suffix", "packed"), [(".jsonl", ""), (".jsonl", ".gz"), (".csv", ""), (".csv", ".gz"), (".parquet", "")]
)
def test_rows_are_documents_and_keep_every_character(suffix, packed, tmp_path):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        put(path, "".join(json.dumps({"n": i, "text": value}) + "\n" for i, value in enumerate(VALUES)))
    elif suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([("text", "n"), *((value, i) for i, value in enumerate(VALUES))])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"n": range(len(VALUES)), "text": VALUES}), path)
    if packed:
        path = put(tmp_path / f"rows{suffix}.gz", gzip.compress(path.read_bytes()))
    assert texts(path) == VALUES


def test_a_null_is_an_empty_document(tmp_path):
    assert texts(put(tmp_path / "a.jsonl", '{"text": null}\n\n{"text": "x"}')) == ["", "x"]
    table = pyarrow.table({"text": ["x", None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["x", ""]


def test_a_lone_surrogate_in_json_becomes_the_replacement_character(tmp_path):
    assert texts(put(tmp_path / "a.jsonl", r'{"text": "a\ud800b \ud83d\ude00"}')) == ["a\ufffdb 😀"]


WRONG = [
    ("a.jsonl", '{"text": "x"}\n{"text": \n', "a.jsonl line 2 is not JSON"),
    ("a.jsonl", '["x"]\n', "a.jsonl line 1 holds a list"),
    ("a.json", '[\n{"text": "x"}]\n', "a.json line 1 is not JSON"),
    ("a.jsonl", '{"title": "x", "body": "y"}\n', "a.jsonl line 1 has no column data.text_column=text.* title, body"),
    ("a.jsonl", '{"text": 5}\n', "a.jsonl line 1: column text holds int"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a.jsonl is not UTF-8 at byte 24 \(0xff\)"),
    ("a.csv", "title,body\nx,y\n", "a.csv line 2 has no column data.text_column=text.* title, body"),
    ("a.csv", 'text\n"never closed\nx\n', "a.csv line 3 is not CSV"),
    ("a.parquet", "PAR?", "a.parquet is not a parquet file"),
    ("a.csv", "text\nOne, and then more\n", "a.csv line 2 has more fields than the header's 1"),
    ("a.csv", "n,text\n1,x\n2\n", "a.csv line 3 has fewer fields than the header's 2"),
    ("a.jsonl", "[" * 200_000 + "\n", "a.jsonl line 1 is not JSON"),
    ("a.jsonl", '{"text": "x", "n": ' + "1" * 5000 + "}\n", "a.jsonl line 1 is not JSON"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG, ids=[content[:20] for _, content, _ in WRONG])
def test_wrong_rows_are_refused_in_one_line(name, content, message, tmp_path):
    path = put(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as caught:
        texts(path)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_without_the_column_lists_what_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"title": ["x"], "body": ["y"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column data.text_column=text.* title, body"):
        texts(tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", column="body") == ["y"]


# Which files


def test_a_folder_is_read_whole_in_the_order_of_its_names(tmp_path):
    for name in ("b.txt", "a.md", "test.txt", "validation/dev.txt", "z/c.txt", ".git/x.txt", "z/.hidden.txt"):
        put(tmp_path / name, name)
    put(tmp_path / "d.jsonl", '{"text": "row"}')
    put(tmp_path / "picture.png", b"\xff")
    assert texts(tmp_path) == ["a.md", "b.txt", "row", "test.txt", "validation/dev.txt", "z/c.txt"]
    said: list[str] = []
    open_source(DataConfig(path=str(tmp_path)), said.append)
    assert said == [f"not read in {tmp_path}: 1 x .png"]


def test_globs_and_lists_name_files_once(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "in/d.txt"):
        put(tmp_path / name, name)
    assert texts(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "in/d.txt"]
    assert texts(tmp_path / "b.txt", tmp_path / "*.txt", tmp_path / "in") == ["b.txt", "a.txt", "in/d.txt"]
    assert texts(tmp_path / "a.txt", tmp_path / "in" / ".." / "a.txt", tmp_path / "a.txt") == ["a.txt"]
    assert texts(tmp_path / "in" / ".." / "b.txt", tmp_path / "a.txt", tmp_path / "b.txt") == ["b.txt", "a.txt"]
    assert texts(put(tmp_path / "[1].txt", "brackets")) == ["brackets"]


def test_a_named_file_of_another_kind_is_text(tmp_path):
    assert texts(put(tmp_path / "server.log", "x\n")) == ["x\n"]
    assert texts(put(tmp_path / "json", "x\n"), put(tmp_path / "csv", "y\n")) == ["x\n", "y\n"]


def test_missing_and_empty_places_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.path=.*nowhere.txt does not exist"):
        texts(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match=r"data.path=.*\*.txt does not exist"):
        texts(tmp_path / "*.txt")
    put(tmp_path / "in" / "a.png", "")
    with pytest.raises(ValueError, match="data.path=.* holds no .txt"):
        texts(tmp_path)
    with pytest.raises(ValueError, match="data.val_path=.*gone does not exist"):
        open_source(DataConfig(path=str(put(tmp_path / "a.txt", "a")), val_path=str(tmp_path / "gone")), print)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"data.path={tmp_path}/pipe is a pipe"):
        find_files(str(tmp_path / "pipe"), "data.path", print)


def test_names_that_are_no_texts_and_homes_of_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "2024" / "a.txt", "x")
    assert find_files(2024, "data.path", print) == find_files([2024], "data.path", print) == [Path("2024/a.txt")]
    for given in (True, "~nobodyatall/x.txt"):
        with pytest.raises(ValueError, match="data.path=.* does not exist"):
            find_files(given, "data.path", print)


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    source = Files([put(tmp_path / "a.txt", "text")])
    assert len(list(source.documents())) == 1
    put(tmp_path / "a.txt", "longer text")
    with pytest.raises(ValueError, match="a.txt changed while it was read"):
        list(source.documents())


# The standard library


def test_the_standard_library_is_modules_without_tests():
    source = open_source(DataConfig(), print)
    documents = ["".join(document.parts) for document in source.documents()]
    assert 5e6 < sum(map(len, documents)) < 50e6 and source.label == "stdlib"
    assert any('"""Random variable generators.' in text for text in documents)
    parts = {part for path in module_files() for part in path.parts}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages"}


def test_a_module_that_is_not_utf8_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    for n in range(100):
        (tmp_path / "json" / f"part{n}.py").write_text("pass\n")
    (tmp_path / "heapq.py").write_bytes(b"# -*- coding: latin-1 -*-\n# Fran\xe7ois\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert sorted(module_files()) == sorted((tmp_path / "json").iterdir())


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "web"}, "data.source=web"),
        ({"source": "files"}, "data.path=null"),
        ({"source": "hub"}, "data.name=null"),
        ({"source": "hub", "name": "a/b", "path": "x"}, "data.path=x and data.name=a/b"),
        ({"name": "a/b", "path": "x"}, "data.path=x and data.name=a/b"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0"),
        ({"val_fraction": 1.0}, "data.val_fraction=1.0"),
        ({"val_fraction": float("nan")}, "data.val_fraction=nan"),
        ({"max_tokens": 0}, "data.max_tokens=0"),
        ({"threads": -1}, "data.threads=-1"),
        ({"val_path": "x"}, "data.val_path=x"),
        ({"val_split": "x"}, "data.val_split=x"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError) as caught:
        DataConfig(**settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_path_or_a_name_decides_what_is_read():
    assert DataConfig().kind == "stdlib"
    assert DataConfig(path="x").kind == "files"
    assert DataConfig(name="a/b").kind == "hub"
