"""Every YAML composes; every wrong key or value is told in one line, before anything is read or written."""

from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tiny_runs import command, configured, tiny

from configs.compose import explain
from configs.schema import GROUPS, TrainConfig

CONFIGS = Path(__file__).parent.parent / "configs"
PRESETS = sorted(path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.glob("*/*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_every_preset_composes(preset):
    text = (CONFIGS / preset.with_suffix(".yaml")).read_text()
    more = ["data.path=some.txt"] if "data: text" in text or str(preset) == "data/text" else []
    config = configured(f"{preset.parent}={preset.name}", *more)
    assert isinstance(config, TrainConfig)
    if str(preset.parent) in GROUPS:
        chosen = OmegaConf.to_container(OmegaConf.load(CONFIGS / preset.with_suffix(".yaml")))
        held = getattr(config, str(preset.parent))
        assert all(getattr(held, key) == value for key, value in chosen.items() if value != "???")


def test_presets_hold_values_only():
    known = {group: {field.name for field in fields(type(getattr(TrainConfig(), group)))} for group in GROUPS}
    for preset in PRESETS:
        if str(preset.parent) in GROUPS:
            assert set(OmegaConf.load(CONFIGS / preset.with_suffix(".yaml"))) <= known[str(preset.parent)], preset


@pytest.mark.parametrize(
    "arguments, status, told",
    [
        ("max_stepz=5", 1, "Could not override 'max_stepz'"),
        ("model.n_layerz=5", 1, "Could not override 'model.n_layerz'"),
        ("--max_steps=5", 2, "--max_steps=5"),
        ("+steps_more=5", 1, "+steps_more=5"),
        ("~steps", 1, "~steps"),
        ("model=nosuch", 1, "Could not find 'model/nosuch' Available options in 'model': gpt2"),
        ("optimizer.lr=abc", 1, "optimizer.lr=abc"),
        ("steps=null", 1, "steps=null"),
        ("steps=1.5", 1, "steps=1.5"),
        ("compile=maybe", 1, "compile=maybe"),
        ("data=text", 1, "data.path"),
        ("eval_only=true", 1, "eval_only=true needs a model"),
        ("resume=", 1, "resume= is empty"),
        ("init_from=''", 1, "init_from= is empty"),
        ("data.path=", 1, "data.path= is empty"),
        ("prompt=it's", 1, """put the value into quotes of its own, 'prompt="it's"'"""),
        ("data.path=a (1).txt", 1, """'data.path="a (1).txt"'"""),
        ("device=cpu:abc", 1, "device=cpu:abc"),
        ("wandb.project=a/b", 1, "wandb.project=a/b has /"),
        ("tokenizer.vocab_size=100000000000", 1, "tokenizer.vocab_size=100000000000"),
    ],
)
def test_what_is_mistyped_is_named(arguments, status, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = command(arguments)
    assert failed.status == status
    assert told in failed.last
    assert "Traceback" not in failed.err
    assert len(failed.last) < 300
    if status == 1:
        assert len(failed.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_key_given_twice_counts_as_it_was_given_last():
    assert configured("steps=5", "steps=6").steps == 6


def test_rope_can_be_stretched_from_the_command_line():
    numbers = {"factor": 2, "low_freq_factor": 1, "high_freq_factor": 4, "original_context_length": 64}
    typed = ",".join(f"{key}:{value}" for key, value in numbers.items())
    assert configured(f"model.rope_scaling={{{typed}}}").model.rope_scaling == numbers
    for wrong in ("{factor:2}", f"{{{typed.replace('factor:2', 'factor:0', 1)}}}", "5"):
        with pytest.raises(ValueError, match="model.rope_scaling="):
            configured(f"model.rope_scaling={wrong}")


def checked(override: str) -> TrainConfig:
    """The override's effect on the defaults, checked as Hydra has it checked, without its seconds."""
    merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.from_dotlist([override]))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, TrainConfig)
    return config


COUNTS = "steps batch_size micro_batch_size log_every eval_every save_every sample_every eval_windows keep_checkpoints"
SIZES = "vocab_size context_length n_layers n_heads n_kv_heads d_model d_ff head_dim"
WRONG = {
    **{key: ["0", "-1", "1.5", "abc", "nan"] for key in [*COUNTS.split(), *(f"model.{size}" for size in SIZES.split())]},
    **{f"data.{key}": ["0", "-1", "1.5", "abc"] for key in ("max_tokens", "threads")},
    "data.val_fraction": ["0", "1", "-0.1", "abc", "nan"],
    "seed": ["-1", "1.5", "abc", "null", "4294967296"],
    **{key: ["0", "-1", "abc", "nan", "inf", "null"] for key in ("model.norm_eps", "model.rope_theta")},
    "model.dropout": ["1", "1.5", "-0.1", "abc", "nan", "null"],
    **{f"optimizer.{key}": ["0", "-1", "abc", "nan", "inf", "null"] for key in ("lr", "adam_lr", "eps")},
    **{f"optimizer.{key}": ["1", "-0.1", "abc", "nan", "null"] for key in ("beta1", "beta2", "momentum")},
    "optimizer.weight_decay": ["-1", "abc", "nan", "inf", "null"],
    "optimizer.grad_clip": ["0", "-1", "abc", "nan"],
    "schedule.warmup_steps": ["-1", "1.5", "abc", "null"],
    "schedule.final": ["-0.1", "1.1", "abc", "nan", "null"],
    "schedule.decay_fraction": ["0", "1.1", "abc", "nan", "null"],
    **{key: ["nosuch", "null"] for key in ("optimizer.name", "schedule.name", "model.position", "model.norm", "model.mlp")},
    **{key: ["nosuch", "null"] for key in ("dtype", "device", "parallel", "tokenizer.name", "data.source")},
    "wandb.mode": ["nosuch"],
    **{key: ["3.7", "maybe", "null"] for key in ("compile", "overwrite", "eval_only", "dry_run", "model.bias")},
    **{key: ["null"] for key in ("steps", "batch_size", "log_every", "keep_checkpoints", "model.n_layers", "model.d_model")},
}


@pytest.mark.parametrize("key", WRONG)
def test_every_nonsense_value_is_told_with_its_key(key):
    for value in WRONG[key]:
        with pytest.raises((ValueError, OmegaConfBaseException)) as caught:
            checked(f"{key}={value}")
        told = explain(caught.value) if isinstance(caught.value, OmegaConfBaseException) else str(caught.value)
        assert key.split(".")[-1] in f"{told} {getattr(caught.value, 'full_key', '')}", f"{key}={value}: {told}"
        assert "\n" not in told


def test_null_is_taken_where_it_means_something():
    for key in ("micro_batch_size", "eval_every", "save_every", "sample_every", "eval_windows", "run_dir", "resume", "init_from"):
        assert getattr(checked(f"{key}=null"), key) is None
    assert checked("optimizer.lr=1e-4").optimizer.lr == 1e-4


def test_values_that_do_not_fit_the_data_are_told_before_a_step(tmp_path):
    (tmp_path / "few.txt").write_text("only five words in here")
    for override, told in (
        ("model.vocab_size=100", "model.vocab_size=100 is too small for tokenizer bytes, whose largest id is 256"),
        (f"data.path={tmp_path}/few.txt", "model.context_length=16"),
        ("micro_batch_size=3", "micro_batch_size=3 does not divide"),
        ("data.path=nowhere.txt", "nowhere.txt"),
    ):
        failed = command(*tiny(tmp_path, override, f"run_dir={tmp_path}/run"))
        assert (failed.status, told in failed.last) == (1, True), failed.last
    assert not (tmp_path / "run").exists()


def test_a_tiny_validation_split_gives_a_finite_loss_or_a_message(tmp_path):
    (tmp_path / "text.txt").write_text("a few hundred bytes of text, over and over. " * 9)
    failed = command(*tiny(tmp_path, "data.val_fraction=0.01", "model.context_length=32", f"run_dir={tmp_path}/run"))
    assert (failed.status, "val_fraction" in failed.last) == (1, True), failed.last
    assert not (tmp_path / "run").exists()


def test_help_says_what_can_be_changed():
    shown = command("--help")
    assert shown.status == 0
    for part in ("python train.py resume=runs/...", "model: gpt2, small, tiny", "eval_every:", "decay_fraction:"):
        assert part in shown.out
