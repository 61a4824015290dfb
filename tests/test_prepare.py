import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import data.build
from data.prepare import Corpus, prepare
from data.progress import progress_bar
from data.source import DataConfig
from data.stdlib import module_files
from data.token_file import TokenFile, TokenWriter
from data.tokenizer import BPE_PATTERN, BYTES, TiktokenTokenizer, TokenizerConfig, build_tokenizer, train_bpe

ROOT = Path(__file__).parent.parent
ENGLISH = "".join(path.read_text() for path in module_files()[:30])[:200_000]


class Prepared:
    """`prepare` with a cache of its own; `said` is what it reported last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def __call__(self, path, tokenizer="bytes", context_length=1, **data_settings) -> Corpus:
        self.said = []
        paths = [str(one) for one in path] if isinstance(path, list) else str(path)
        config = DataConfig(path=paths, cache_dir=str(self.folder / "cache"), **data_settings)
        tokenizer = TokenizerConfig(tokenizer, 300) if isinstance(tokenizer, str) else tokenizer
        return prepare(config, tokenizer, context_length, self.said.append)


@pytest.fixture
def prepared(tmp_path) -> Prepared:
    return Prepared(tmp_path)


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def notes(folder: Path, n: int) -> list[str]:
    texts = [f"Note {i}: " + "lorem ipsum " * (i % 7) for i in range(n)]
    for i, text in enumerate(texts):
        put(folder / f"{i:04}.txt", text)
    return texts


def ids(tokens: TokenFile) -> list[int]:
    return tokens.read(0, tokens.n_tokens).tolist()


def documents(corpus: Corpus, split: str) -> list[str]:
    """The texts between the end-of-text ids, of which the last must be the very last id."""
    found, text = [], []
    for i in ids(getattr(corpus, split)):
        if i == corpus.tokenizer.end_of_text:
            found.append(corpus.tokenizer.decode(text))
            text = []
        else:
            text.append(i)
    assert text == []
    return found


# Tokens are the text


ODD_TEXTS = {
    "windows": "roses\r\nviolets\r\n\r\nend",
    "special": "cats <|endoftext|> dogs\n" * 200,
    "byte order mark": "\ufeffstart\n",
    "separators": "a\u2029b\u2028c\x0cd\x85\n\0",
    "blank": "\n\n \n\n",
    "long line": "word " * 30_000 + "é" * 140_000 + " " * 140_000 + "x",
    "two bytes": "ab",
}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
def test_the_tokens_of_a_text_file_decode_to_the_file(text, tokenizer, prepared, tmp_path):
    corpus = prepared(put(tmp_path / "a.txt", text), tokenizer, context_length=-1)
    stored = ids(corpus.train) + ids(corpus.val)
    assert stored.count(corpus.tokenizer.end_of_text) == 1 and stored[-1] == corpus.tokenizer.end_of_text
    assert corpus.tokenizer.decode_bytes(stored[:-1]) == text.encode()
    assert stored[:-1] == corpus.tokenizer.encode(text)
    assert corpus.train.n_bytes + corpus.val.n_bytes == len(text.encode())


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=30))
def test_no_document_is_lost_glued_or_invented(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    path = put(folder / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = Prepared(folder)(path, context_length=-1)
    if len(texts) < 20:
        stored = ids(corpus.train) + ids(corpus.val)
        expected = [i for text in texts if text for i in [*text.encode(), 256]]
        assert stored == expected
    else:
        found = documents(corpus, "train") + documents(corpus, "val")
        assert sorted(found) == sorted(filter(None, texts))


def test_ids_do_not_depend_on_the_number_of_threads(tmp_path):
    notes(tmp_path / "notes", 30)
    put(tmp_path / "notes" / "big.txt", ENGLISH)
    one, many = (Prepared(tmp_path / f"{threads}")(tmp_path / "notes", "bpe", threads=threads) for threads in (1, 99))
    assert ids(one.train) == ids(many.train) and ids(one.val) == ids(many.val)


def test_many_ids_are_stored_in_four_bytes(prepared, tmp_path):
    wide = TiktokenTokenizer("wide", BPE_PATTERN, BYTES, {"<|endoftext|>": 70_000})
    corpus = prepared(put(tmp_path / "a.txt", "text"), wide)
    assert (corpus.folder / "val.bin").stat().st_size == 4 * corpus.val.n_tokens
    assert ids(corpus.val)[-1] == 70_000


# Validation


def test_one_file_is_validated_on_its_last_tenth(prepared, tmp_path):
    corpus = prepared(put(tmp_path / "a.txt", ENGLISH), val_fraction=0.1)
    cut = int(len(ENGLISH.encode()) * 0.9)
    assert ids(corpus.train) == list(ENGLISH.encode()[:cut])
    assert ids(corpus.val) == [*ENGLISH.encode()[cut:], 256]
    assert (corpus.train.n_documents, corpus.val.n_documents) == (1, 1)


def test_bpe_never_sees_the_text_it_is_validated_on(prepared, tmp_path):
    corpus = prepared(put(tmp_path / "a.txt", ENGLISH), "bpe", val_fraction=0.3)
    seen = ENGLISH.encode()[: int(len(ENGLISH.encode()) * 0.7)].decode(errors="ignore")
    assert corpus.tokenizer.fingerprint == train_bpe([seen], 300).fingerprint
    train, val = (corpus.tokenizer.decode(ids(tokens)) for tokens in (corpus.train, corpus.val))
    assert train.startswith(seen) and train + val == ENGLISH + "<|endoftext|>"
    assert len(val) == pytest.approx(0.3 * len(ENGLISH), abs=20)


def test_bpe_never_sees_the_documents_it_is_validated_on(prepared, tmp_path):
    texts = [ENGLISH[i * 5000 : (i + 1) * 5000] for i in range(40)]
    for i, text in enumerate(texts):
        put(tmp_path / "notes" / f"{i}.txt", text)
    corpus = prepared(tmp_path / "notes", "bpe", val_fraction=0.3)
    held_out = corpus.tokenizer.decode(ids(corpus.val))
    seen = [text for _, text in sorted((str(i), text) for i, text in enumerate(texts)) if text not in held_out]
    assert 0 < corpus.val.n_documents == len(texts) - len(seen)
    assert corpus.tokenizer.fingerprint == train_bpe(seen, 300).fingerprint


def test_one_of_a_thousand_documents_is_validated_on_whole_and_unseen(prepared, tmp_path):
    texts = [ENGLISH[i * 50 : (i + 1) * 50] for i in range(1000)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    corpus = prepared(put(tmp_path / "a.jsonl", rows), "bpe", val_fraction=0.00004)
    (held_out,) = documents(corpus, "val")
    assert corpus.tokenizer.fingerprint == train_bpe([text for text in texts if text != held_out], 300).fingerprint


def test_fewer_than_twenty_documents_are_validated_on_their_end(prepared, tmp_path):
    texts = notes(tmp_path / "notes", 19)
    corpus = prepared(tmp_path / "notes", val_fraction=0.2)
    stored = ids(corpus.train) + ids(corpus.val)
    assert stored == [i for text in texts for i in [*text.encode(), 256]]
    n_bytes = sum(map(len, texts))
    assert corpus.val.n_bytes == n_bytes - int(n_bytes * 0.8)


def test_twenty_documents_are_validated_on_whole_ones(prepared, tmp_path):
    texts = notes(tmp_path / "notes", 20)
    corpus = prepared(tmp_path / "notes", val_fraction=0.1)
    train, val = documents(corpus, "train"), documents(corpus, "val")
    assert sorted(train + val) == sorted(texts)
    assert len(val) == 2 == corpus.val.n_documents
    assert train == [text for text in texts if text not in val]


def test_the_choice_follows_the_content_not_the_names(tmp_path):
    texts = notes(tmp_path / "notes", 60)
    rows = put(tmp_path / "b.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in [*texts[::-1], texts[5]]))
    for i, text in enumerate(texts):
        put(tmp_path / "renamed" / ("test" if i % 2 else "validation") / f"val-{i}.txt", text)
    chosen = []
    for place in ("notes", "renamed"):
        chosen.append(sorted(documents(Prepared(tmp_path / place)(tmp_path / place), "val")))
    assert len(chosen[0]) == 6 and chosen[0] == chosen[1]
    corpus = Prepared(tmp_path)(rows)
    assert not set(documents(corpus, "train")) & set(documents(corpus, "val"))  # equal documents stay together


def test_texts_that_are_alike_are_chosen_together(prepared, tmp_path):
    """Though they are more than the fraction, and come first in the order by hash; else bpe would see what is validated on."""
    first, *others = sorted(
        (f"a text of its own, {i} " * 5 for i in range(33)), key=lambda text: xxhash.xxh3_128_intdigest(text.encode())
    )
    rows = "".join(json.dumps({"text": text}) + "\n" for text in [first] * 8 + others)
    corpus = prepared(put(tmp_path / "a.jsonl", rows), "bpe", val_fraction=0.1)
    assert documents(corpus, "val") == [first] * 8 and sorted(documents(corpus, "train")) == sorted(others)
    assert corpus.tokenizer.fingerprint == train_bpe(documents(corpus, "train"), 300).fingerprint


def test_many_documents_are_validated_on_about_the_fraction(prepared, tmp_path):
    rows = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(5000))
    corpus = prepared(put(tmp_path / "a.jsonl", rows), val_fraction=0.1)
    assert corpus.train.n_documents + corpus.val.n_documents == 5000
    assert corpus.val.n_documents == pytest.approx(500, abs=4 * 450**0.5)


def test_files_of_their_own_are_validated_on(prepared, tmp_path):
    train, val = put(tmp_path / "a.txt", "training text"), put(tmp_path / "b.txt", "validation text")
    corpus = prepared(train, "bpe", val_path=str(val))
    assert documents(corpus, "train") == ["training text"] and documents(corpus, "val") == ["validation text"]
    assert corpus.tokenizer.fingerprint == train_bpe(["training text"], 300).fingerprint
    put(val, "another text")
    assert not prepared(train, "bpe", val_path=str(val)).reused


# Too little, too much


def test_too_little_text_is_refused_with_the_numbers(prepared, tmp_path):
    path = put(tmp_path / "a.txt", "just five words in here")
    with pytest.raises(ValueError) as caught:
        prepared(path, context_length=64)
    assert "train.bin holds 20 tokens; model.context_length=64 needs at least 65: use more text" in str(caught.value)


def test_too_little_validation_text_names_the_fraction(prepared, tmp_path):
    path = put(tmp_path / "a.txt", "x" * 399)
    with pytest.raises(ValueError) as caught:
        prepared(path, context_length=32, val_fraction=0.01)
    message = "val.bin holds 5 tokens; model.context_length=32 needs at least 33: raise data.val_fraction=0.01"
    assert message in str(caught.value)


def test_exactly_one_window_is_enough(prepared, tmp_path):
    path = put(tmp_path / "a.txt", "x" * 65)
    val = put(tmp_path / "b.txt", "y" * 64)
    corpus = prepared(path, context_length=64, val_path=str(val))
    assert (corpus.train.n_tokens, corpus.val.n_tokens) == (66, 65)


def test_an_empty_file_is_refused(prepared, tmp_path):
    with pytest.raises(ValueError, match="train.bin holds 0 tokens"):
        prepared(put(tmp_path / "a.txt", ""))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("max_tokens", [1, 100, 5000])
def test_max_tokens_are_what_is_prepared(tokenizer, max_tokens, prepared, tmp_path):
    notes(tmp_path / "notes", 50)
    text = ENGLISH[:20_000]
    for path in (put(tmp_path / "a.txt", text), tmp_path / "notes"):
        total = prepared(path, tokenizer, context_length=-1)
        corpus = prepared(path, tokenizer, context_length=-1, max_tokens=max_tokens)
        whole = total.train.n_tokens + total.val.n_tokens
        assert corpus.train.n_tokens + corpus.val.n_tokens == min(max_tokens, whole)
        if path.is_file():
            stored = ids(corpus.train) + ids(corpus.val)
            assert stored == [*corpus.tokenizer.encode(text), corpus.tokenizer.end_of_text][:max_tokens]


def test_a_document_cut_by_max_tokens_is_counted(prepared, tmp_path):
    path = put(tmp_path / "a.jsonl", "".join(json.dumps({"text": "é" * 10}) + "\n" for _ in range(5)))
    corpus = prepared(path, val_path=str(path), max_tokens=30)
    assert (corpus.train.n_tokens, corpus.train.n_documents, corpus.train.n_bytes) == (30, 2, 29)
    assert corpus.val.n_tokens == 3


# The cache


def test_the_same_text_is_tokenised_once(prepared, tmp_path):
    notes(tmp_path / "notes", 30)
    first = prepared(tmp_path / "notes", "bpe")
    assert not first.reused and prepared.said[-1].startswith("prepared")
    written = (first.folder / "train.bin").stat().st_mtime_ns
    (tmp_path / "notes").rename(tmp_path / "moved")
    again = prepared(tmp_path / "moved", "bpe", threads=1)
    assert again.reused and again.folder == first.folder and prepared.said[-1].startswith("reusing")
    assert (again.folder / "train.bin").stat().st_mtime_ns == written
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_changed_text_of_the_same_size_and_time_is_tokenised_again(prepared, tmp_path):
    path = put(tmp_path / "a.txt", "text one")
    first, times = prepared(path), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    put(path, "text two")
    os.utime(path, ns=times)
    second = prepared(path)
    assert not second.reused and any(f"also holds {first.folder.name}," in line for line in prepared.said)
    assert bytes(ids(first.train) + ids(first.val)[:-1]) == b"text one"
    assert bytes(ids(second.train) + ids(second.val)[:-1]) == b"text two"


def test_every_setting_that_matters_makes_another_corpus(prepared, tmp_path):
    notes(tmp_path / "notes", 30)
    variants = [
        {}, {"val_fraction": 0.2}, {"max_tokens": 100}, {"tokenizer": "bpe"}, {"tokenizer": TokenizerConfig("bpe", 310)}
    ]  # fmt: skip
    corpora = [prepared(tmp_path / "notes", **variant) for variant in variants]
    assert len({corpus.folder for corpus in corpora}) == len(variants)
    assert all(prepared(tmp_path / "notes", **variant).reused for variant in variants)


def test_a_tokenizer_object_finds_what_its_settings_made(prepared, tmp_path):
    path = put(tmp_path / "a.txt", ENGLISH)
    made = prepared(path, "bpe")
    assert prepared(path, made.tokenizer).folder == made.folder
    other = build_tokenizer(TokenizerConfig("bpe", 300), lambda: ["other text " * 100])
    assert not prepared(path, other).reused
    assert prepared(path, other).reused


def test_damaged_files_are_made_again(prepared, tmp_path):
    path = put(tmp_path / "a.txt", ENGLISH)
    first = prepared(path)
    whole = ids(first.train)
    os.truncate(first.folder / "train.bin", 10)
    again = prepared(path)
    assert not again.reused and ids(again.train) == whole
    assert any("damaged" in line for line in prepared.said)
    (again.folder / "val.bin").unlink()
    assert ids(prepared(path).val) == ids(prepared(path).val)


@pytest.mark.parametrize("content", ["", "[]", '{"docs": 3}', '{"request": 1, "tokenizer": 2}'])
def test_what_others_left_in_the_cache_does_no_harm(content, prepared, tmp_path):
    put(tmp_path / "cache" / "aaa" / "corpus.json", content)
    prepared(put(tmp_path / "a.txt", ENGLISH))
    assert "corpus.json is damaged, or not ours" in " ".join(prepared.said)
    assert (tmp_path / "cache" / "aaa" / "corpus.json").read_text() == content


def test_a_full_disk_is_told_with_its_place(prepared, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = put(tmp_path / "a.txt", ENGLISH)
    with monkeypatch.context() as patched, pytest.raises(OSError, match=r"cache/a-bytes-.*could not be written \(No space left"):
        patched.setattr(TokenWriter, "append", full)
        prepared(path)
    assert prepared(path).train.n_tokens > 0


def test_refused_text_leaves_nothing_behind(prepared, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n" * 10 + b"\xff\xfe\n" + b"good\n" * 10)
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(ValueError, match="a.txt is not UTF-8 at byte 50"):
            prepared(path, tokenizer)
    assert [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


# Interruptions


def in_a_child(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def kill_at_event(number: int, folder: Path) -> None:
    """Die by SIGKILL just before this process touches a file in the folder for that time."""
    left = [number]

    def hook(event: str, arguments: tuple) -> None:
        touches = event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir")
        if touches and str(arguments[0]).startswith(str(folder)):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_a_kill_at_any_moment_harms_neither_the_old_corpus_nor_the_new(tmp_path, monkeypatch):
    monkeypatch.setattr(data.build, "BATCH", 7000)
    prepared = Prepared(tmp_path)
    path = put(tmp_path / "a.txt", "old text " * 500)
    old = ids(prepared(path).train)
    text = "the new text " * 1000
    put(path, text)
    survived = False
    for number in range(1000):
        work = Prepared(tmp_path / str(number))
        shutil.copytree(tmp_path / "cache", work.folder / "cache")
        pid = in_a_child(lambda work=work, number=number: (kill_at_event(number, work.folder), work(path)))
        survived = os.waitpid(pid, 0)[1] == 0
        corpus = work(path)
        assert bytes(ids(corpus.train) + ids(corpus.val)[:-1]) == text.encode()
        assert ids(work(put(tmp_path / "old.txt", "old text " * 500)).train) == old and work.said[-1].startswith("reusing")
        assert not list((work.folder / "cache").glob("*.partial"))
        if survived:
            break
    assert survived and number > 20


def test_processes_that_prepare_the_same_text_at_once_share_it(tmp_path):
    text = ENGLISH * 5
    path = put(tmp_path / "a.txt", text)
    pids = [in_a_child(lambda: Prepared(tmp_path)(path)) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    corpus = Prepared(tmp_path)(path)
    assert corpus.reused
    assert bytes(ids(corpus.train) + ids(corpus.val)[:-1]) == text.encode()
    assert [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")] == [corpus.folder]


def test_an_interrupted_preparation_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(data.build, "BATCH", 1000)
    notes(tmp_path / "notes", 400)
    put(tmp_path / "notes" / "0100.txt", ENGLISH * 5)  # interrupted inside a document of several pieces, too
    whole = Prepared(tmp_path / "other")(tmp_path / "notes")
    prepared, written, inside = Prepared(tmp_path), [], False
    for _ in range(50):
        pid = in_a_child(lambda: (kill_at_event(45, tmp_path / "cache"), prepared(tmp_path / "notes")))
        if os.waitpid(pid, 0)[1] == 0:
            break
        progress = json.loads(next((tmp_path / "cache").glob("*/progress.json")).read_text())
        written.append(sum(progress["n_tokens"].values()))
        inside = inside or 200 < progress["after"][1] < 208
    corpus = prepared(tmp_path / "notes")
    assert len(written) > 2 and written == sorted(set(written)) and inside
    assert ids(corpus.train) == ids(whole.train) and ids(corpus.val) == ids(whole.val)


# Around it


def test_inspection_shows_what_the_model_sees(tmp_path):
    put(tmp_path / "a.txt", "It was a bright cold day in April.\n" * 50)
    put(tmp_path / "b.txt", "It was the best of times.\n")
    settings = [f"path={tmp_path}/a.txt,{tmp_path}/b.txt", f"cache_dir={tmp_path}/cache", "val_fraction=0.1", "streaming=False"]
    command = [sys.executable, "-m", "data", "tokenizer=bytes", "threads=2", *settings]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert "prepared" in shown.stderr and "prepared" not in shown.stdout
    for part in (
        "1 documents, 1,598 tokens",
        "2 documents, 180 tokens",
        "1.00 bytes a token",
        "longest document 1,598 tokens",
        "longest document 152 tokens",
        "It was a bright cold day",
    ):
        assert part in shown.stdout
    wrong = subprocess.run([*command, "pth=x"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode != 0 and wrong.stderr.startswith("pth is no setting") and wrong.stderr.count("\n") == 1


def test_importing_data_loads_nothing_slow():
    slow = {"torch", "datasets", "tokenizers", "pandas", "pyarrow", "rustbpe", "huggingface_hub", "hydra", "requests"}
    code = "import sys, data.prepare, data.text_stream; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not slow & set(loaded.split())


def test_progress_tells_rate_and_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    said: list[str] = []
    with progress_bar("tokenising notes", said.append, 1_000_000) as bar:  # what an earlier process did
        bar.total = 10_000_000
        for _ in range(30):
            now[0] += 1
            bar.update(100_000)
    assert len(said) == 3
    assert said[0] == "tokenising notes:  20% 2.00M/10.0M [00:10<01:20, 100k tokens/s]"


@pytest.mark.slow
def test_memory_stays_bounded_for_a_text_of_any_size(tmp_path):
    """150 MB of text in one file (300 MB of ids), in under 300 MB: neither is ever held."""
    path, block = tmp_path / "big.txt", (ENGLISH * 10).encode()
    with path.open("wb") as file:
        for _ in range(150_000_000 // len(block)):
            file.write(block)
    code = f"""
from data.prepare import prepare
from data.source import DataConfig
from data.tokenizer import TokenizerConfig
corpus = prepare(DataConfig(path={str(path)!r}, cache_dir={str(tmp_path / "cache")!r}), TokenizerConfig("bytes"), 64)
status = dict(line.split(":") for line in open("/proc/self/status"))  # ru_maxrss begins with that of the parent
print(corpus.train.n_tokens + corpus.val.n_tokens, status["VmHWM"].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    n_tokens, peak = map(int, done.stdout.split())
    assert n_tokens == path.stat().st_size + 1
    assert peak < 300_000  # KB
