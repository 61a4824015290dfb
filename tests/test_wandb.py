"""wandb without an account or a network: what a run logs, read back from the file that it leaves."""

import json
import struct
import time
from pathlib import Path

import pytest
import yaml
from tiny_runs import command, finished, metrics, tiny

from training.reporting import WandbConfig, check_wandb, logged_in, start_wandb
from training.run import Progress, RunFolder

wandb = pytest.importorskip("wandb")
wandb_pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No key, no home, no network."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")


@pytest.fixture
def dead_server(monkeypatch):
    """A key, and a server that does not answer, on which wandb gives up after a moment, not after a run's 20 seconds."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    settings = wandb.Settings
    monkeypatch.setattr(wandb, "Settings", lambda **given: settings(**{**given, "init_timeout": 2}))


def records(run: Path) -> list[list]:
    """What the run's offline files hold once they are complete (wandb's own process writes them), oldest file first."""
    limit = time.monotonic() + 20
    while True:
        files = read(run)
        complete = all(any(record.WhichOneof("record_type") == "exit" for record in file) for file in files)
        if complete or time.monotonic() > limit:
            return files
        time.sleep(0.1)


def read(run: Path) -> list[list]:
    """Lists of records. A file is a LevelDB log after a header of 7 bytes:
    blocks of 32 KiB, in which chunks (checksum, length, kind, bytes) make up records; kinds 1 and 4 end one."""
    files = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        data, at, record, found = path.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            room = 32768 - at % 32768
            if room < 7:
                at += room
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                found.append(wandb_pb.Record.FromString(record))
                record = b""
        files.append(found)
    return files


def history(file: list) -> list[dict]:
    rows = [record.history for record in file if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def logged(file: list, key: str) -> list[tuple]:
    return [(row["_step"], row[key]) for row in history(file) if key in row]


def test_an_offline_run_holds_all_and_keeps_its_id_when_it_goes_on(tmp_path):
    run = tmp_path / "run"
    settings = ["wandb.mode=null", "wandb.project=pets", "steps=4", "sample_every=2", "prompt=one"]
    finished(*tiny(tmp_path, f"run_dir={run}", *settings))
    finished(f"resume={run}", "steps=6", "optimizer.lr=1e-3")
    first, second = records(run)

    for key in ("train/loss", "train/lr", "train/grad_norm", "val/loss", "val/bpb"):
        mine = [(row["step"], row[key]) for row in metrics(run) if key in row]
        assert logged(second, key) == mine  # the rows of the first process, too
        assert logged(first, key) == [(step, value) for step, value in mine if step <= 4]
    started = [record.run for file in (first, second) for record in file if record.WhichOneof("record_type") == "run"]
    assert len({(record.run_id, record.project) for record in started}) == 1
    assert started[0].project == "pets"
    config = {item.key: json.loads(item.value_json) for item in started[-1].config.update}
    assert (config["steps"], config["optimizer"]["lr"], config["model"]["vocab_size"]) == (6, 1e-3, 257)

    step, kind = logged(first, "samples/_type")[-1]
    (stored,) = [path for path in run.rglob("*.table.json") if path.name.startswith("samples_4")]
    rows = json.loads(stored.read_text())["data"]
    assert (step, kind, [row[0] for row in rows]) == (4, "table-file", [2, 4])
    assert all(row[1].startswith("one") for row in rows)

    summary = {}
    for record in second:
        if record.WhichOneof("record_type") == "summary":
            summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
    best = min(row["val/loss"] for row in metrics(run) if "val/loss" in row)
    assert summary["best/val_loss"] == best
    assert [record.exit.exit_code for record in second if record.WhichOneof("record_type") == "exit"] == [0]
    assert yaml.safe_load((run / "config.yaml").read_text())["wandb"]["mode"] is None


def test_a_run_that_fails_is_finished_as_failed(tmp_path):
    run = tmp_path / "run"
    failed = command(*tiny(tmp_path, f"run_dir={run}", "wandb.mode=offline", "optimizer.lr=1e30", "schedule.warmup_steps=0"))
    assert (failed.status, "is not finite" in failed.last) == (1, True)
    (file,) = records(run)
    assert len(logged(file, "train/loss")) >= 1
    assert [record.exit.exit_code for record in file if record.WhichOneof("record_type") == "exit"] == [1]


def test_the_mode_of_the_environment_counts_where_none_is_set(tmp_path, monkeypatch, dead_server):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    finished(*tiny(tmp_path, "wandb.mode=null", f"run_dir={tmp_path}/none", "steps=1"))
    assert not (tmp_path / "none" / "wandb").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = finished(*tiny(tmp_path, "wandb.mode=null", f"run_dir={tmp_path}/offline", "steps=1"))
    assert len(records(tmp_path / "offline")) == 1 and "cannot be reached" not in told.err
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert (WandbConfig().asked, WandbConfig(mode="disabled").asked) == ("offline", "disabled")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ValueError, match="WANDB_MODE=sometimes is not one of"):
        check_wandb(WandbConfig())


def test_a_project_that_wandb_does_not_allow_is_refused():
    with pytest.raises(ValueError, match="wandb.project=a/b has /"):
        WandbConfig(project="a/b")


def test_online_without_a_key_is_refused_before_anything_is_written(tmp_path):
    refused = command(*tiny(tmp_path, f"run_dir={tmp_path}/run", "wandb.mode=online"))
    assert "wandb.mode=online, but there is no wandb key here" in refused.last
    assert not (tmp_path / "run").exists()


def test_online_with_a_key_and_no_network_leaves_nothing(tmp_path, dead_server):
    refused = command(*tiny(tmp_path, f"run_dir={tmp_path}/run", "wandb.mode=online"))
    assert refused.status == 1
    assert "wandb.mode=online failed" in refused.last
    assert not (tmp_path / "run").exists()


def test_unset_with_a_key_and_no_network_logs_offline(tmp_path, dead_server):
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="logging offline"):
        finished(*tiny(tmp_path, f"run_dir={run}", "wandb.mode=null", "steps=2"))
    assert len(records(run)) == 1


def test_wandb_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_wandb(WandbConfig())
    with pytest.raises(ValueError, match="wandb is not installed"):
        check_wandb(WandbConfig(mode="offline"))
    with pytest.warns(UserWarning, match="wandb is not installed: this run is told in metrics.jsonl alone"):
        assert start_wandb(WandbConfig(), RunFolder(tmp_path), Progress(), {}) is None


def test_a_login_is_found_where_wandb_puts_it(monkeypatch, tmp_path):
    assert not logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert logged_in()
