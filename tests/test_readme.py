"""What the README says can be typed, and what it says exists, is so."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import data.__main__ as look
import sample
from benchmarks.tables import filled
from configs.schema import TrainConfig
from tests.tiny_runs import command, write_text

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.M | re.S)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def commands(program: str, launched: bool = True) -> list[list[str]]:
    """The arguments of each README line that runs `python <program>` (`launched`: or torchrun), whatever stands before it."""
    found = []
    for line in LINES:
        words = shlex.split(line, comments=True)
        if program in words and (launched or "torchrun" not in words):
            words = words[words.index(program) + 1 :]
            found.append(words[: next((i for i, word in enumerate(words) if word in ("|", ">", "2>", "<")), len(words))])
    return found


def test_the_readme_shows_both_programs():
    assert len(commands("train.py")) > 5 and len(commands("sample.py")) > 3


@pytest.mark.parametrize("words", commands("train.py"), ids=" ".join)
def test_every_train_command_composes(words):
    overrides = [
        re.sub(r"=([^=,\[\]]+),.*$", r"=\1", word) for word in words if word not in ("-m", "--multirun")
    ]  # a sweep's first
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        assert isinstance(OmegaConf.to_object(compose("train", overrides)), TrainConfig)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the commands speak of: texts, and a run."""
    folder = tmp_path_factory.mktemp("readme")
    write_text(folder, words=1000).rename(folder / "my_notes.txt")
    text = (folder / "my_notes.txt").read_text()
    for name in ("notes/a.txt", "tinyshakespeare.txt", "start.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "chat.jsonl").write_text("".join(json.dumps({"body": text[i : i + 99]}) + "\n" for i in range(0, 3000, 99)))
    (folder / "docs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SLURM_JOB_ID", "7")
        made = command(*small(["run_dir=runs/my_run"]))
        assert made.status == 0, made.err
        (folder / "runs" / "2026-01-31-101500").symlink_to("my_run")
        yield folder


SMALL = {"model.context_length": 16, "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 2, "tokenizer": "bytes"}
SHORT = {"batch_size": 4, "steps": 2, "eval_windows": 3, "device": "cpu", "dtype": "float32", "wandb.mode": "disabled"}
ELSEWHERE = ("data=tinystories", "data=fineweb_edu", "experiment=gpt2_124m", "HuggingFaceTB/SmolLM2-135M")  # need a network


def small(words: list[str]) -> list[str]:
    """The command, but for a text, a model and a number of steps that take a moment: what it says itself stays."""
    words = [re.sub(r"^steps=.*", "steps=3", os.path.expandvars(word)) for word in words]
    if any(word.startswith("plan_ranks=") for word in words):
        return [re.sub(r"^(model.n_layers)=.*", r"\1=2", word) for word in words]
    said = {word.split("=")[0] for word in words}
    more: dict[str, object] = {} if "resume" in said and "resume=auto" not in words else dict(SHORT)
    if more and not {"data", "data.path"} & said:
        more |= {"data": "text", "data.path": "my_notes.txt"}
    if more and "init_from" not in said:
        more |= SMALL
    taken = said | {word.split(".")[0] for word in said if word.startswith("tokenizer.")}
    return [*words, *(f"{key}={value}" for key, value in more.items() if key not in taken)]


@pytest.mark.slow
def test_every_train_command_runs(place):
    """One after the other, as some go on with what an earlier one made."""
    for line in dict.fromkeys(map(tuple, commands("train.py", launched=False))):
        if not set(line) & set(ELSEWHERE):
            done = command(*small(list(line)))
            assert done.status == 0, f"{' '.join(line)}: {done.err}"


@pytest.mark.parametrize("words", commands("sample.py"), ids=" ".join)
def test_every_sample_command_runs(place, words, monkeypatch):
    if set(words) & set(ELSEWHERE):
        assert sample.parse(words).checkpoint
        return
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"diff")))
    assert sample.main([*words, "--max-new-tokens", "3", "--device", "cpu"]) == 0


def test_the_command_that_shows_the_data_runs(place, capsys):
    words, *others = commands("data")
    look.main(words)
    assert "tokens 0 to 64" in capsys.readouterr().out
    assert others
    for words in others:  # of data that is elsewhere
        settings, _ = look.requested(words)
        assert settings.max_tokens == 10_000_000_000 and settings.streaming


@pytest.mark.parametrize("wrong", ["max_tokens=many", "max_tokens=true", "streaming=1", "vocab_size=4096.5", "val_fraction=1/2"])
def test_a_setting_of_another_kind_is_named(wrong):
    with pytest.raises(ValueError, match=f"^{wrong.split('.')[0]}.* is no (int|bool|float)"):
        look.requested([wrong])
    with pytest.raises(ValueError, match="^path= is empty"):
        look.requested(["path="])


def test_every_module_that_is_run_exists():
    modules = set(re.findall(r"python -m ([a-z0-9_.]*[a-z0-9])", README))
    assert {"data", "weights.export"} < modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_the_tables_are_those_of_the_benchmarks_files():
    assert filled(README) == README


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


def test_the_table_has_every_default():
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        defaults = compose("train")
    chosen = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "train.yaml").defaults)
    groups = {key: value for entry in chosen if isinstance(entry, dict) for key, value in entry.items()}
    checked = 0
    for names, values in re.findall(r"^\| (`[a-z][^|]*) \| ([^|]*) \| [^|]* \|$", README, flags=re.M):
        told = [value.strip("` ") for value in values.split(",")]
        for i, name in enumerate(re.findall(r"`([a-z_.0-9]+)`", names)):
            if name in groups:
                expected = groups[name]
            elif name in keys(TrainConfig):
                expected = OmegaConf.select(defaults, name)
            else:
                continue
            ours = told[i] if len(told) > 1 else told[0]
            said = OmegaConf.create(f"value: {ours}").value
            assert said == (expected.strip() if isinstance(expected, str) else expected), f"{name}: {ours}, not {expected}"
            checked += 1
    assert checked > len(keys(TrainConfig))


def test_every_file_and_picture_that_is_named_exists():
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README) + re.findall(r"`((?:\w+/)*\w+\.(?:py|yaml|json|png))`", README):
        if not path.startswith(("runs/", "out/")) and "/" in path:
            assert (ROOT / path).exists(), path


def test_the_python_examples_run(place, capsys):
    examples = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
        assert capsys.readouterr().out.strip()


def test_the_programs_answer_help():
    shown = subprocess.run([sys.executable, "sample.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and "--prompt" in shown.stdout
