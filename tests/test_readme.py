"""What the README says can be typed, and what it says exists, is so."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_runs import command

import sample
from benchmarks.tables import filled
from configs.schema import TrainConfig, register

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.M | re.S)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def commands(program: str) -> list[list[str]]:
    """The arguments of each README line that runs `python <program>`, with torchrun or environment variables before it."""
    found = []
    for line in LINES:
        words = shlex.split(line, comments=True)
        if program in words:
            found.append(words[words.index(program) + 1 :])
    return found


def test_the_readme_shows_both_programs():
    assert len(commands("train.py")) > 5 and len(commands("sample.py")) > 3


@pytest.mark.parametrize("words", commands("train.py"), ids=" ".join)
def test_every_train_command_composes(words):
    register()
    overrides = [
        re.sub(r"=([^=,\[\]]+),.*$", r"=\1", word) for word in words if word not in ("-m", "--multirun")
    ]  # a sweep's first
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        assert isinstance(OmegaConf.to_object(compose("train", overrides)), TrainConfig)


SHORT = ["eval_windows=2", "eval_every=null", "sample_every=null", "wandb.mode=disabled"]
SMALL = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.context_length=16", "batch_size=2"]
AWAY = ("tinystories", "fineweb_edu", "gpt2_124m", "$", "/shared", "resume=auto")  # a network, a cluster


def test_the_train_commands_run_in_their_order(tmp_path, monkeypatch):
    """As written but for their length and size; those that go on with a run do so with the one that a line before has made."""
    monkeypatch.chdir(tmp_path)
    text = "To be, or not to be, that is the question. " * 300
    (tmp_path / "notes").mkdir()
    for name in ("my_notes.txt", "tinyshakespeare.txt", "notes/one.txt", "notes/two.txt"):
        (tmp_path / name).write_text(text)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"body": text}))
    ran = []
    for words in commands("train.py"):
        if any(away in " ".join(words) for away in AWAY):
            continue
        steps = "steps=4" if any(word.startswith("resume=") for word in words) else "steps=2"
        small = [] if any(word.startswith(("resume=", "init_from=")) for word in words) else SMALL
        vocabulary = [] if any("shakespeare" in word for word in words) or not small else ["tokenizer.vocab_size=300"]
        done = command(*words, *SHORT, *small, *vocabulary, steps)
        assert done.status == 0, (words, done.err)
        ran.append(words)
    assert len(ran) > 8


def test_the_tables_are_those_of_the_benchmarks_files():
    assert filled(README) == README


@pytest.mark.parametrize("words", commands("sample.py"), ids=" ".join)
def test_every_sample_command_parses(words):
    words = words[: next((i for i, word in enumerate(words) if word in ("|", ">", "2>", "<")), len(words))]
    assert sample.parse(words).max_new_tokens >= 0


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for line in LINES:
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert words[1] in targets, line


def keys(kind: type, prefix: str = "") -> list[str]:
    found = []
    for field in fields(kind):
        if isinstance(field.type, type) and is_dataclass(field.type):
            found += keys(field.type, f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


def test_the_table_has_every_key():
    table = set(re.findall(r"`([a-z_.0-9]+)`", README))
    missing = [key for key in keys(TrainConfig) if key not in table]
    assert not missing


def test_every_file_and_picture_that_is_named_exists():
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README) + re.findall(r"`((?:\w+/)*\w+\.(?:py|yaml|json|png))`", README):
        if not path.startswith(("runs/", "out/")) and "/" in path:
            assert (ROOT / path).exists(), path


def test_the_python_examples_compile():
    examples = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
    assert examples
    for example in examples:
        compile(example, "README.md", "exec")


def test_the_programs_answer_help():
    shown = subprocess.run([sys.executable, "sample.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and "--prompt" in shown.stdout
