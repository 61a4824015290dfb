"""Law 6: n steps = k steps, save, resume, n - k steps, bit for bit."""

import json
import shutil

import pytest

from runs import command, differing, finished, metrics, state, tiny

# 3000 words are 770 windows of 16: some 190 steps of 4, so an epoch is ended by other means: a text of 12 windows.
KINDS = {
    "adamw": ["optimizer=adamw", "schedule=cosine"],
    "muon": ["optimizer=muon", "schedule=wsd"],
    "accumulation": ["micro_batch_size=2", "optimizer=muon", "schedule=cosine"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)  # 20 windows: 5 steps an epoch
    return folder


@pytest.fixture(scope="module", params=KINDS)
def straight(request, folder):
    """The undisturbed run, with a checkpoint of each of its 8 steps, and its arguments."""
    arguments = tiny(folder, *KINDS[request.param], "model.dropout=0.2", "steps=8", "eval_every=3", "save_every=1", "keep_checkpoints=8")
    run = folder / request.param
    finished(*arguments, f"run_dir={run}")
    return run, arguments


@pytest.mark.parametrize("k", range(1, 8))
def test_a_run_goes_on_from_any_step_as_if_it_had_never_stopped(straight, k, tmp_path):
    run, _ = straight
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace(str(run), str(copy)))
    finished(f"resume={copy}/checkpoints/step-{k:08d}")
    assert differing(state(run), state(copy)) == []
    assert metrics(copy) == metrics(run)
    for link in ("latest", "best"):
        assert (copy / "checkpoints" / link).resolve().name == (run / "checkpoints" / link).resolve().name


def test_several_resumes_in_one_run(straight, tmp_path):
    run, arguments = straight
    broken = tmp_path / "broken"
    finished(*arguments, f"run_dir={broken}", "steps=2")  # steps is also the length of the schedule, so set it right:
    shutil.rmtree(broken)
    once = tmp_path / "once"
    finished(*arguments, f"run_dir={once}")
    for k in (6, 3, 5):
        finished(f"resume={once}/checkpoints/step-{k:08d}")
    assert differing(state(run), state(once)) == []
    assert metrics(once) == metrics(run)
