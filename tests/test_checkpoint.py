"""Checkpoints are complete or absent, hold nothing that can run code, and name what is wrong with a damaged one."""

import json
import os
import pickletools
import resource
import signal
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from data.tokenizer import TokenizerConfig, build_tokenizer
from model import ModelConfig, Transformer
from weights import checkpoint, load

CONFIG = ModelConfig(vocab_size=257, context_length=16, n_layers=2, n_heads=2, d_model=32)


def save(folder, seed=0):
    torch.manual_seed(seed)
    model = Transformer(CONFIG)
    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"), lambda: [])
    moments = {"step": torch.tensor(3.0), "m": torch.randn(60_000)}
    trainer = {"progress": {"step": 3, "wandb_id": None}, "optimizer": {"a": moments}}
    checkpoint.save(folder, CONFIG, model.state_dict(), tokenizer, trainer, {"step": 3})
    return model, trainer


@pytest.fixture
def saved(tmp_path):
    """Three checkpoints of a run; the newest is what `latest` names."""
    folder = tmp_path / "checkpoints"
    for step in range(3):
        save(folder / f"step-0000000{step}", seed=step)
    checkpoint.point(folder / "latest", folder / "step-00000002")
    return folder


@contextmanager
def disk_full_after(size):
    """As if the disk had so many bytes left for each file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGXFSZ, old)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_saved_is_loaded(tmp_path):
    model, trainer = save(tmp_path / "c")
    loaded, tokenizer = load(tmp_path / "c")
    assert loaded.config == CONFIG
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True))
    assert tokenizer.encode("hé") == [104, 195, 169]
    assert torch.equal(checkpoint.read_trainer(tmp_path / "c")["optimizer"]["a"]["m"], trainer["optimizer"]["a"]["m"])


def test_nothing_in_it_runs_code(tmp_path):
    save(tmp_path / "c")
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".safetensors", ".json", ".pt"}
    (name,) = [name for name in zipfile.ZipFile(tmp_path / "c" / "trainer.pt").namelist() if name.endswith("data.pkl")]
    pickled = zipfile.ZipFile(tmp_path / "c" / "trainer.pt").read(name)
    called = {argument for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert called <= {"torch._utils _rebuild_tensor_v2", "torch FloatStorage", "collections OrderedDict"}


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_that_somebody_put_into_it_is_not_run(saved, tmp_path):
    torch.save({"digest": "", "optimizer": Touch(tmp_path / "touched")}, saved / "step-00000002" / "trainer.pt")
    with pytest.raises(ValueError, match="latest/trainer.pt is damaged"):
        checkpoint.read_trainer(saved / "latest")
    assert not (tmp_path / "touched").exists()


def test_a_failed_save_leaves_what_was_there_and_nothing_else(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder / "step-00000001")
    for size in (0, 1000, 50_000, 200_000):  # the disk is full at once, in the weights, in the trainer file
        with disk_full_after(size), pytest.raises(OSError, match="step-00000002 could not be written .*File too large"):
            save(folder / "step-00000002")
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    load(folder / "step-00000001")


def test_all_of_it_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    opened: dict[int, Path] = {}
    synced, renamed = set(), []
    opening, syncing, renaming = os.open, os.fsync, Path.rename

    def sees_open(path, *flags, **named):
        opened[number := opening(path, *flags, **named)] = Path(path)
        return number

    def sees_sync(number):
        synced.add(opened[number])
        syncing(number)

    def sees_rename(path, target):
        renamed.append({path, *path.iterdir()} - synced)
        return renaming(path, target)

    monkeypatch.setattr(os, "open", sees_open)
    monkeypatch.setattr(os, "fsync", sees_sync)
    monkeypatch.setattr(Path, "rename", sees_rename)
    save(tmp_path / "c")
    assert renamed == [set()]
    assert tmp_path in synced  # the name, too


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt", "config.json"])
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_truncated_file_is_named_and_the_older_checkpoint_offered(saved, name, keep):
    path = saved / "step-00000002" / name
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match=rf"latest/{name} is damaged .*step-00000001 is whole, use that"):
        checkpoint.read_trainer(saved / "latest")
        load(saved / "latest")


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt"])
def test_a_flipped_bit_is_found(saved, name):
    flip(saved / "step-00000002" / name)
    with pytest.raises(ValueError, match=rf"latest/{name} is damaged .*checksum"):
        checkpoint.read_trainer(saved / "latest")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_no_damaged_checkpoint_is_offered(saved):
    flip(saved / "step-00000000" / "trainer.pt")
    (saved / "step-00000001" / "config.json").write_text("{")
    (saved / "step-00000002" / "trainer.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="no other checkpoint lies beside it"):
        checkpoint.read_trainer(saved / "latest")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.model."])
def test_prefixes_that_wrappers_leave_are_taken_off(prefix):
    names = [f"{prefix}blocks.0.mlp.up.weight", "blocks.0._orig_mod.mlp.up.weight"]
    assert [checkpoint.bare(name) for name in names] == ["blocks.0.mlp.up.weight"] * 2


def test_weights_of_another_model_are_named(saved):
    described = json.loads((saved / "latest" / "config.json").read_text())
    described["model"]["n_layers"] = 3
    (saved / "latest" / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"lacks weights: blocks\.2.*\(6 in all\)"):
        load(saved / "latest")
    described["model"] |= {"n_layers": 2, "d_ff": 64}
    (saved / "latest" / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"another shape: blocks\.0\.mlp.* \[192, 32\] instead of \[128, 32\]"):
        load(saved / "latest")


def test_whatever_is_pointed_at_the_checkpoint_is_found(saved):
    (saved.parent / "config.yaml").write_text("")
    for path in (saved.parent, saved, saved / "latest", saved / "step-00000002"):
        assert checkpoint.find(path).resolve() == (saved / "step-00000002").resolve()
    (saved / "latest").unlink()
    assert checkpoint.find(saved.parent) == saved / "step-00000002"
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoint.find(saved.parent.parent)
