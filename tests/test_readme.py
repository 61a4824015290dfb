"""What the README says can be typed, and what it says exists, is so."""

import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import sample
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
