"""The hub through the real clients, which read their settings when they are imported: hence in processes of their own."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from loopback_hub import COMMIT, Hub, serve

ROOT = Path(__file__).parent.parent
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon"]
CHILD = """
import json, sys, time
from data.prepare import prepare
from data.source import DataConfig
from data.tokenizer import TokenizerConfig
for settings in json.loads(sys.argv[1]):
    tokenizer = TokenizerConfig(settings.pop("tokenizer", "bytes"), 300)
    began, said = time.monotonic(), []
    try:
        corpus = prepare(DataConfig(**settings), tokenizer, 16, said.append)
        texts = [corpus.tokenizer.decode(t.read(0, t.n_tokens).tolist()) for t in (corpus.train, corpus.val)]
        answer = {"train": texts[0], "val": texts[1], "reused": corpus.reused, "folder": str(corpus.folder)}
    except (ValueError, OSError) as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps({**answer, "said": said, "seconds": time.monotonic() - began}), flush=True)
"""
BLOCKED = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}


def rows(split: str, n: int) -> list[str]:
    generator = random.Random(split)
    return [f"{split} {i} {' '.join(generator.choices(WORDS, k=20))}" for i in range(n)]


def publish(root: Path, repo: str, **splits: list[str]) -> None:
    """A dataset of two parquet files a split, of row groups of ten."""
    folder = root / "datasets" / repo / "data"
    folder.mkdir(parents=True)
    for split, texts in splits.items():
        half = len(texts) // 2
        for number, part in enumerate([texts[:half], texts[half:]]):
            table = pyarrow.table({"text": part, "n": list(range(len(part)))})
            path = folder / f"{split}-{number:05}-of-00002.parquet"
            pyarrow.parquet.write_table(table, path, row_group_size=10)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    publish(root, "org/own", train=rows("train", 100), validation=rows("validation", 20), test=rows("test", 4))
    for repo in ("plain", "gated401", "gated403", "busy", "silent"):
        publish(root, f"org/{repo}", train=rows("train", 100))
    first_file = f"/datasets/org/busy/resolve/{COMMIT}/data/train-00000-of-00002.parquet"
    with serve(
        Hub(
            root,
            gated={"org/gated401": 401, "org/gated403": 403},
            failing={"/api/datasets/org/busy": 2, first_file: 2},
            silent={"org/silent"},
        )
    ) as running:
        yield running


def prepare_in_a_process(cases: list[dict], environment: dict[str, str]) -> list[dict]:
    command = [sys.executable, "-c", CHILD, json.dumps(cases)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HTTP"))}
    done = subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases)
    return answers


@pytest.fixture(scope="module")
def answers(hub, tmp_path_factory) -> dict[str, dict]:
    """What each case ends in; one process for all, since each takes seconds to import the clients."""
    cache = tmp_path_factory.mktemp("cache")
    cases: dict[str, dict] = {
        "own split": {"name": "org/own"},
        "own split again": {"name": "org/own"},
        "streaming": {"name": "org/own", "streaming": True, "cache_dir": str(cache / "streaming")},
        "streaming, bpe": {"name": "org/own", "streaming": True, "tokenizer": "bpe", "max_tokens": 500},
        "chosen split": {"name": "org/own", "val_split": "test"},
        "no own split": {"name": "org/plain"},
        "streaming, no own split": {"name": "org/plain", "streaming": True, "cache_dir": str(cache / "streaming")},
        "missing": {"name": "org/nothing"},
        "not a name": {"name": "not//a name"},
        "wrong column": {"name": "org/plain", "text_column": "body"},
        "wrong column, streaming": {"name": "org/plain", "text_column": "body", "streaming": True},
        "not text": {"name": "org/plain", "text_column": "n"},
        "gated 401": {"name": "org/gated401"},
        "gated 403": {"name": "org/gated403"},
        "gated, streaming": {"name": "org/gated403", "streaming": True},
        "wrong split": {"name": "org/plain", "split": "trian"},
        "wrong validation split": {"name": "org/plain", "val_split": "vla"},
        "wrong subset": {"name": "org/plain", "subset": "english"},
        "wrong revision": {"name": "org/plain", "revision": "v9"},
        "busy": {"name": "org/busy"},
        "silent": {"name": "org/silent"},
    }
    settings = [{"cache_dir": str(cache / "usual"), **case} for case in cases.values()]
    home = tmp_path_factory.mktemp("home")
    found = prepare_in_a_process(settings, hub.environment(home))
    return {**dict(zip(cases, found, strict=True)), "places": {"cache": str(cache / "usual"), "home": str(home)}}


def joined(texts: list[str]) -> str:
    return "".join(text + "<|endoftext|>" for text in texts)


def test_the_dataset_s_own_split_is_validated_on(answers):
    for case in ("own split", "streaming"):
        assert answers[case]["train"] == joined(rows("train", 100))
        assert answers[case]["val"] == joined(rows("validation", 20))
    assert answers["chosen split"]["val"] == joined(rows("test", 4))


def test_a_dataset_is_prepared_once(answers):
    assert not answers["own split"]["reused"] and answers["own split again"]["reused"]


def test_without_a_split_of_its_own_whole_rows_are_validated_on(answers):
    for case in ("no own split", "streaming, no own split"):
        train, val = (answers[case][split].split("<|endoftext|>")[:-1] for split in ("train", "val"))
        assert sorted(train + val) == sorted(rows("train", 100)) and len(val) > 0
    assert len(answers["no own split"]["val"].split("<|endoftext|>")[:-1]) == 10


def test_a_stream_trains_bpe_and_ends_at_max_tokens(answers):
    assert joined(rows("train", 100)).startswith(answers["streaming, bpe"]["train"])
    assert "500 training tokens" in answers["streaming, bpe"]["said"][-1]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("missing", ["data.name=org/nothing", "does not exist"]),
        ("not a name", ["data.name=not//a name"]),
        ("wrong column", ["org/plain", "data.text_column=body", "text, n"]),
        ("wrong column, streaming", ["org/plain", "data.text_column=body", "text, n"]),
        ("not text", ["org/plain train row 1", "column n holds int"]),
        ("gated 401", ["data.name=org/gated401", "accept its licence", "log in"]),
        ("gated 403", ["data.name=org/gated403", "accept its licence", "log in"]),
        ("gated, streaming", ["data.name=org/gated403", "accept its licence", "log in"]),
        ("wrong split", ["data.split", "trian", "['train']"]),
        ("wrong validation split", ["data.val_split", "vla", "['train']"]),
        ("wrong subset", ["data.subset=english", "default"]),
        ("wrong revision", ["data.revision=v9"]),
        ("silent", ["cannot reach http://127.0.0.1", "HF_HUB_OFFLINE=1", "data=stdlib"]),
    ],
)
def test_each_mistake_ends_in_one_line_within_half_a_minute(case, parts, answers):
    message = answers[case]["error"]
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert answers[case]["seconds"] < 30


def test_a_server_that_fails_twice_is_asked_again(answers, hub):
    assert answers["busy"]["train"].startswith("train 0 ")
    assert sorted(hub.failed.values()) == [2, 2]


def test_offline_what_was_read_before_can_be_used(answers):
    places = answers["places"]
    cases = [
        {"name": "org/own"},
        {"name": "org/plain", "val_fraction": 0.2},  # not prepared, but downloaded
        {"name": "org/nothing"},
    ]
    again, downloaded, never = prepare_in_a_process(
        [{"cache_dir": places["cache"], **case} for case in cases],
        {"HF_HUB_OFFLINE": "1", "HF_HOME": places["home"], **BLOCKED},
    )
    assert again["reused"] and again["train"] == answers["own split"]["train"]
    assert not downloaded["reused"] and len(downloaded["val"].split("<|endoftext|>")[:-1]) == 20
    assert "data.name=org/nothing was not read before and HF_HUB_OFFLINE is set" in never["error"]


def test_without_a_network_one_line_comes_soon(tmp_path):
    (answer,) = prepare_in_a_process(
        [{"name": "org/own", "cache_dir": str(tmp_path)}], {"HF_HOME": str(tmp_path / "home"), **BLOCKED}
    )
    assert "cannot reach https://huggingface.co for data.name=org/own" in answer["error"]
    assert "HF_HUB_OFFLINE=1" in answer["error"] and "\n" not in answer["error"]
    assert answer["seconds"] < 30


KILLED = """
import os, signal, sys
import data.build
data.build.BATCH = 100_000
saves = []
def hook(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("progress.json"):
        saves.append(arguments)
        if len(saves) == 5:  # the first is of an empty one
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


def test_a_stream_downloads_about_what_it_needs_and_goes_on_after_a_kill(hub, tmp_path):
    texts = [f"{i} {random.Random(i).randbytes(1000).hex()}" for i in range(2000)]
    publish(hub.root, "org/big", train=texts, unused=texts)
    settings = {"name": "org/big", "streaming": True, "max_tokens": 1_000_000, "val_fraction": 0.1}
    first, second = ({**settings, "cache_dir": str(tmp_path / name)} for name in ("first", "second"))
    environment = hub.environment(tmp_path / "home")
    command = [sys.executable, "-c", KILLED + CHILD, json.dumps([first])]
    assert subprocess.run(command, cwd=ROOT, env=os.environ | environment, timeout=100).returncode == -signal.SIGKILL
    (saved,) = (tmp_path / "first").glob("*.partial/progress.json")
    assert sum(json.loads(saved.read_text())["n_tokens"].values()) == pytest.approx(300_000, rel=0.1)
    resumed, whole = prepare_in_a_process([first, second], environment)
    assert resumed["train"] == whole["train"] and resumed["val"] == whole["val"]
    assert len(whole["train"].replace("<|endoftext|>", "|")) + len(whole["val"].replace("<|endoftext|>", "|")) == 1_000_000
    files = {request.rpartition("/")[2] for request in hub.requests if "org/big" in request}
    assert {name for name in files if name.endswith(".parquet")} == {"train-00000-of-00002.parquet"}
