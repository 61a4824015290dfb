"""Law 6: n steps = k steps, save, resume, n - k steps, bit for bit."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import command, configured, contents, differing, finished, metrics, state, tiny, trained

from weights import checkpoint

STEPS = 7
KINDS = {
    "adamw": ["optimizer=adamw", "schedule=cosine"],
    "muon": ["optimizer=muon", "schedule=wsd"],
    "accumulation": ["optimizer=adamw", "schedule=wsd", "micro_batch_size=2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)  # an epoch ends within step 6
    return folder


@pytest.fixture(scope="module", params=KINDS)
def straight(request, folder):
    """The config of an undisturbed run that has a checkpoint of each step."""
    saving = ["model.dropout=0.2", f"steps={STEPS}", "eval_every=3", "save_every=1", f"keep_checkpoints={STEPS}"]
    config = configured(*tiny(folder, *KINDS[request.param], *saving, f"run_dir={folder / request.param}"))
    trained(config)
    return config


def same_run(a, b):
    assert differing(state(a), state(b)) == []
    assert metrics(a) == metrics(b)
    for link in ("latest", "best"):
        assert (a / "checkpoints" / link).resolve().name == (b / "checkpoints" / link).resolve().name


@pytest.mark.parametrize("k", range(1, STEPS))
def test_a_run_goes_on_from_any_step_as_if_it_had_never_stopped(straight, k, folder, tmp_path):
    run = shutil.copytree(straight.run_dir, tmp_path / "run", symlinks=True)
    trained(replace(straight, run_dir=str(run), resume=f"{run}/checkpoints/step-{k:08d}"))
    same_run(folder / straight.run_dir, run)


def test_several_resumes_in_one_run(straight, folder, tmp_path):
    run = shutil.copytree(straight.run_dir, tmp_path / "run", symlinks=True)
    for k in (6, 2, 5):
        trained(replace(straight, run_dir=str(run), resume=f"{run}/checkpoints/step-{k:08d}"))
    same_run(folder / straight.run_dir, run)


@pytest.fixture(scope="module")
def done(folder):
    """A finished run of 6 steps; tests copy it."""
    run = folder / "done"
    finished(*tiny(folder, f"run_dir={run}", "steps=6", "eval_every=2", "save_every=2", "keep_checkpoints=3"))
    return run


@pytest.fixture
def run(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run", symlinks=True)


def test_a_finished_run_says_so_and_more_steps_continue_it(run):
    before = metrics(run)
    again = finished(f"resume={run}")
    assert f"{run} is finished: 6 of steps=6" in again.out
    longer = finished(f"resume={run}", "steps=8")
    assert "going on from step 6; steps: 6 -> 8" in longer.out
    assert metrics(run)[: len(before)] == before
    assert metrics(run)[-1]["step"] == 8
    assert "steps: 8" in (run / "config.yaml").read_text()


def test_another_learning_rate_is_used_and_told(run):
    resumed = finished(f"resume={run}", "steps=7", "optimizer.lr=7e-4", "schedule.warmup_steps=0", "schedule.final=1")
    assert "optimizer.lr: 0.003 -> 0.0007" in resumed.out
    assert metrics(run)[-2]["train/lr"] == pytest.approx(7e-4)


@pytest.mark.parametrize(
    "override, told",
    [
        ("model.n_layers=3", "model.n_layers: 2 -> 3"),
        ("model.context_length=8", "model.context_length: 16 -> 8"),
        ("tokenizer=bpe", "tokenizer.name: bytes -> bpe"),
        ("model.vocab_size=300", "model.vocab_size: 257 -> 300"),
        ("model=gpt2", "model.norm: rmsnorm -> layernorm"),
        ("optimizer=muon", "optimizer.name: adamw -> muon"),
    ],
)
def test_what_the_weights_depend_on_is_refused(run, override, told):
    before = contents(run)
    refused = command(f"resume={run}", "steps=8", override)
    assert refused.status == 1
    assert told in refused.last
    assert contents(run) == before


def test_all_conflicts_are_told_at_once(run):
    refused = command(f"resume={run}", "model.n_layers=3", "tokenizer=gpt2")
    assert "model.n_layers: 2 -> 3; tokenizer.name: bytes -> gpt2" in refused.last


@pytest.mark.parametrize("key", ["run_dir=elsewhere", "init_from=elsewhere", "overwrite=true", "experiment=shakespeare_cpu"])
def test_what_makes_no_sense_with_resume_is_refused(run, key):
    refused = command(f"resume={run}", key)
    assert (refused.status, key.split("=")[0] in refused.last) == (1, True)


def test_what_is_so_already_may_be_said_again(run):
    assert "is finished: 6 of steps=6" in finished(f"resume={run}", f"run_dir={run}/", "overwrite=false", "init_from=null").out


def test_resume_of_what_is_no_run(tmp_path):
    assert "does not exist" in command(f"resume={tmp_path}/nowhere").last
    assert "no config.yaml" in command(f"resume={tmp_path}").last


def test_dropout_may_change(run):
    assert "model.dropout: 0.0 -> 0.1" in finished(f"resume={run}", "steps=7", "model.dropout=0.1").out


def test_an_older_checkpoint_goes_on_and_later_rows_are_cut(run, done):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')  # a line that a crash cut short
    (run / "checkpoints" / "step-00000003.tmp").mkdir()  # a save that a crash cut short, of a step that is not saved again
    older = finished(f"resume={run}/checkpoints/step-00000002", "steps=5", "optimizer.lr=1e-3", "keep_checkpoints=9")
    assert "going on from step 2" in older.out
    steps = [row["step"] for row in metrics(run) if "train/loss" in row]
    assert steps == [1, 2, 3, 4, 5]
    assert (run / "checkpoints" / "latest").resolve().name == "step-00000005"
    assert differing(state(run / "checkpoints" / "step-00000002"), state(done / "checkpoints" / "step-00000002")) == []
    assert not list(run.glob("**/*.tmp"))


def test_steps_that_were_given_up_stay_given_up_if_it_fails_before_it_saves(run):
    failed = command(f"resume={run}/checkpoints/step-00000002", "optimizer.lr=1e30", "schedule.warmup_steps=0")
    assert "is not finite" in failed.last
    assert {row["step"] for row in metrics(run)} == {1, 2, 3}
    for link in ("latest", "best"):
        assert (run / "checkpoints" / link).resolve().name == "step-00000002"


def test_auto_starts_a_run_and_then_goes_on_with_it(folder, tmp_path):
    arguments = tiny(folder, f"run_dir={tmp_path}/auto", "resume=auto")
    first = finished(*arguments, "steps=3")
    assert "going on" not in first.out
    assert "is finished" in finished(*arguments, "steps=3").out
    assert "going on from step 3; steps: 3 -> 4" in finished(*arguments, "steps=4").out
    assert "model.n_layers: 2 -> 1" in command(*arguments, "steps=4", "model.n_layers=1").last
    assert "resume=auto needs run_dir" in command("resume=auto").last


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(run, done):
    shutil.rmtree(run / "checkpoints")
    finished(f"resume={run}")
    same_run(run, done)


def test_a_missing_link_is_no_loss(run):
    (run / "checkpoints" / "latest").unlink()
    assert "is finished: 6" in finished(f"resume={run}").out


def test_weights_saved_from_wrapped_models_go_on(run, done):
    path = run / "checkpoints" / "step-00000004" / "model.safetensors"
    weights = load_file(path)
    save_file({f"module._orig_mod.{name}": w for name, w in weights.items()}, path)
    finished(f"resume={path.parent}")
    same_run(run, done)


@pytest.mark.parametrize("again", [["resume=RUN"], ["resume=auto", "run_dir=RUN"]])
def test_a_run_without_its_trainer_files_is_not_begun_again(again, run, folder):
    for path in run.glob("checkpoints/step-*/trainer.pt"):
        path.unlink()
    before = contents(run)
    whole = [] if "resume=RUN" in again else tiny(folder)
    refused = command(*whole, *(argument.replace("RUN", str(run)) for argument in again), "steps=8")
    assert "trainer.pt is missing" in refused.last and refused.status == 1
    assert contents(run) == before


def test_nothing_is_evaluated_where_there_is_no_model(run):
    shutil.rmtree(run / "checkpoints")
    assert "holds no checkpoint" in command(f"resume={run}", "eval_only=true").last


def test_a_copy_in_which_links_became_folders_goes_on(done, tmp_path):
    run = shutil.copytree(done, tmp_path / "run")
    assert (run / "checkpoints" / "latest").is_dir() and not (run / "checkpoints" / "latest").is_symlink()
    shutil.rmtree(run / "checkpoints" / "step-00000006")  # `latest` is all there is of it
    finished(f"resume={run}", "steps=7")
    assert {path.name: path.is_symlink() for path in (run / "checkpoints").iterdir()} == {
        **{f"step-{step:08d}": False for step in (4, 6, 7)},
        **{"latest": True, "best": True},
    }
    assert (run / "checkpoints" / "latest").resolve().name == "step-00000007"


def test_other_data_is_told(folder, tmp_path):
    place = tmp_path / "text.txt"
    shutil.copy(folder / "text.txt", place)
    finished(*tiny(folder, f"data.path={place}", f"run_dir={tmp_path}/run", "steps=1"))
    assert "the data is not" not in finished(f"resume={tmp_path}/run", "steps=2").err
    place.write_text(place.read_text() + " and more")
    assert "the data is not that of step 2: text-bytes-" in finished(f"resume={tmp_path}/run", "steps=3").err


def test_a_prompt_with_a_dollar_is_text(folder, tmp_path):
    finished(*tiny(folder, r"prompt='a \${HOME} b'", f"run_dir={tmp_path}/run", "steps=1", "sample_every=1"))
    again = finished(f"resume={tmp_path}/run", "steps=2")
    assert "a ${HOME} b" in again.out and "prompt:" not in again.out


def test_bytes_that_are_no_text_in_the_metrics_are_cut_away(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    finished(f"resume={run}", "steps=7")
    assert [row["step"] for row in metrics(run) if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("content", [b"", b"a: [", b"\tx", b"\xff", b"- 1", b"model: 5"])
def test_a_damaged_config_is_named(content, run):
    (run / "config.yaml").write_bytes(content)
    refused = command(f"resume={run}", "steps=8")
    assert f"{run}/config.yaml is damaged" in refused.last and len(refused.err.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [{"a": 1}, [1], {"digest": "", "progress": {"step": 1, "mood": 2}, "optimizer": {}}])
def test_a_foreign_trainer_file_is_named(content, run):
    latest = (run / "checkpoints" / "latest").resolve()
    if isinstance(content, dict) and "digest" in content:
        content["digest"] = checkpoint.digest(checkpoint.read_weights(latest / "model.safetensors"))
    torch.save(content, latest / "trainer.pt")
    refused = command(f"resume={run}", "steps=8")
    assert str(run) in refused.last and refused.status == 1
