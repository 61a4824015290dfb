"""The run folder, and how a run is told to stop: whatever goes wrong, one line says so and nothing is lost."""

import fcntl
import json
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from nursery import Nursery
from tiny_runs import command, contents, differing, finished, metrics, state, tiny

from training.ranks import Ranks
from training.run import Progress, RunFolder, StopRequest, dated
from training.update import Precision, require_finite
from weights import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def done(folder):
    finished(*tiny(folder, f"run_dir={folder}/done"))
    return folder / "done"


@pytest.fixture
def run(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run", symlinks=True)


def test_what_a_run_leaves(done):
    assert {path.name for path in done.iterdir()} == {".lock", "config.yaml", "metrics.jsonl", "loss.png", "checkpoints"}
    assert sorted(path.name for path in (done / "checkpoints").iterdir()) == ["best", "latest", "step-00000006"]
    assert os.readlink(done / "checkpoints" / "latest") == "step-00000006"
    about = json.loads((done / "checkpoints" / "latest" / "config.json").read_text())
    assert (about["step"], about["tokens"], about["model"]["vocab_size"]) == (6, 6 * 64, 257)
    rows = metrics(done)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6]
    assert set(rows[0]) == {"step", "train/loss", "train/lr", "train/grad_norm"}
    assert [row["train/lr"] for row in rows[:2]] == pytest.approx([1.5e-3, 3e-3])  # of a warm-up of two steps
    assert set(rows[-1]) == {"step", "val/loss", "val/ppl", "val/bpb"}


def test_a_finished_run_is_neither_overwritten_nor_mixed_with_another(run, folder):
    before = contents(run)
    refused = command(*tiny(folder, f"run_dir={run}"))
    assert refused.status == 1
    assert f"run_dir={run} is not empty: resume={run} continues the run in it, overwrite=true replaces it" in refused.last
    assert contents(run) == before


def test_overwrite_replaces_a_run_and_nothing_but_a_run(run, folder, tmp_path):
    (run / "notes.txt").write_text("mine")
    finished(*tiny(folder, f"run_dir={run}", "steps=2", "overwrite=true"))
    assert [row["step"] for row in metrics(run)] == [1, 2, 2]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best", "latest", "step-00000002"]
    assert (run / "notes.txt").read_text() == "mine"
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("mine")
    refused = command(*tiny(folder, f"run_dir={tmp_path}/papers", "overwrite=true"))
    assert "is not empty: choose another run_dir" in refused.last
    assert [path.name for path in (tmp_path / "papers").iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_fine(folder, tmp_path):
    finished(*tiny(folder, f"run_dir={tmp_path}", "steps=1"))
    assert metrics(tmp_path)[-1]["step"] == 1


@pytest.mark.parametrize("more", [["overwrite=true"], []])
def test_a_folder_that_a_live_run_owns_is_left_alone(run, folder, more):
    before = contents(run)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = command(*(tiny(folder, f"run_dir={run}", *more) if more else [f"resume={run}", "steps=9"]))
    assert refused.status == 1
    assert f"{run} belongs to a run that is alive" in refused.last
    assert contents(run) == before
    finished(f"resume={run}", "steps=7")


@pytest.mark.parametrize("where", ["/dev/null/x", "/proc/x", "text.txt"])
def test_a_place_that_cannot_be_written_is_named(folder, where):
    where = folder / where if where == "text.txt" else Path(where)
    refused = command(*tiny(folder, f"run_dir={where}"))
    assert refused.status == 1
    assert refused.last.startswith(f"error: run_dir={where} cannot be made (")


def test_what_fails_before_the_first_step_leaves_no_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong in ("device=cuda", "model.vocab_size=100", "model.context_length=100000", "micro_batch_size=3", "data.path=no.txt"):
        assert command(*tiny(folder, wrong)).status == 1, wrong
    assert not (tmp_path / "runs").exists()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({dated() for _ in range(5)}) == 5


@contextmanager
def full_disk(size):
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_a_full_disk_costs_nothing_that_was_saved(run, done):
    """The disk fills up while the run goes on from its step 6; once there is room, it goes on from there again."""
    for size, met_in in ((100_000, "step-00000008 could not be written"), (200, "could not be written")):
        with full_disk(size):
            failed = command(f"resume={run}", "steps=8")
        assert failed.status == 1
        assert met_in in failed.last
        assert differing(state(run), state(done)) == []
    assert f"step-00000006 is saved: python train.py resume={run} goes on from it" in command_out(run)
    finished(f"resume={run}", "steps=8")
    assert [row["step"] for row in metrics(run) if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]


def command_out(run):
    with full_disk(100_000):
        return command(f"resume={run}", "steps=8").out


def test_a_damaged_checkpoint_is_named_and_the_older_one_goes_on(run, folder):
    finished(f"resume={run}", "steps=8")
    path = run / "checkpoints" / "step-00000008" / "trainer.pt"
    path.write_bytes(path.read_bytes()[:1000])
    refused = command(f"resume={run}", "steps=9")
    older = run / "checkpoints" / "step-00000006"
    assert refused.status == 1
    assert "latest/trainer.pt is damaged" in refused.last
    assert f"{older} is whole, use that" in refused.last
    finished(f"resume={older}", "steps=9")
    assert [row["step"] for row in metrics(run) if "train/loss" in row] == list(range(1, 10))


def test_the_last_checkpoints_and_the_best_are_kept(folder, tmp_path):
    run = tmp_path / "kept"
    rate = ["optimizer.lr=1000", "schedule.warmup_steps=1000", "optimizer.weight_decay=0"]  # makes it worse and worse
    finished(*tiny(folder, f"run_dir={run}", "steps=7", "save_every=1", "eval_every=2", "keep_checkpoints=2", *rate))
    best = min((row for row in metrics(run) if "val/loss" in row), key=lambda row: row["val/loss"])["step"]
    assert best < 6
    assert {path.name for path in checkpoint.steps(run / "checkpoints")} == {f"step-{step:08d}" for step in {best, 6, 7}}
    mine = shutil.copytree(run / "checkpoints" / "step-00000006", run / "checkpoints" / "step-00000003.bak1")
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    finished(f"resume={run}", "steps=9")
    assert {path.name for path in checkpoint.steps(run / "checkpoints")} == {f"step-{step:08d}" for step in {best, 8, 9}}
    assert (mine / "model.safetensors").exists()
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    about = json.loads((run / "checkpoints" / "latest" / "config.json").read_text())
    assert about["best_val_loss"] == next(row["val/loss"] for row in metrics(run) if row["step"] == best and "val/loss" in row)


def test_best_does_not_point_to_what_was_given_up(folder, tmp_path):
    """The best of the steps that count was not kept: there was a better one, of steps that are now given up."""
    run = RunFolder(tmp_path / "run")
    for step in (1, 4, 5):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    checkpoint.point(run.checkpoints / "best", run.checkpoints / "step-00000005")
    run.begin("", Progress(step=4, best_loss=1.0, best_step=1), run.checkpoints / "step-00000004")
    assert (run.checkpoints / "best").resolve().name == "step-00000001"
    checkpoint.point(run.checkpoints / "best", run.checkpoints / "step-00000005")
    run.begin("", Progress(step=4, best_loss=1.0, best_step=2), run.checkpoints / "step-00000004")
    assert not (run.checkpoints / "best").is_symlink()


def test_a_place_for_the_run_is_looked_at_before_anything_is_read(run, folder, tmp_path):
    for where, why in ((run, "is not empty"), (folder / "text.txt" / "x", "cannot be made")):
        refused = command(*tiny(folder, f"run_dir={where}", "data.path=no.txt"))
        assert f"run_dir={where} {why}" in refused.last and "no.txt" not in refused.err


def test_a_disk_that_is_full_from_the_start(folder, tmp_path):
    finished(*tiny(folder, f"run_dir={tmp_path}/first", "steps=1"))  # its tokens are there
    with full_disk(100):
        failed = command(*tiny(folder, f"run_dir={tmp_path}/run"))
    assert "could not be written" in failed.last
    assert not (tmp_path / "run").exists()


def test_a_loss_or_gradient_that_is_not_finite_stops_before_the_weights_move(folder, tmp_path, monkeypatch):
    run = tmp_path / "run"
    finished(*tiny(folder, f"run_dir={run}", "steps=2"))
    before, moves, move = state(run), [], Precision.step
    monkeypatch.setattr(Precision, "step", lambda self, optimizer: moves.append(move(self, optimizer)))
    failed = command(f"resume={run}", "steps=9", "optimizer.lr=1e30")
    assert failed.status == 1
    assert f"step {2 + len(moves) + 1}: the " in failed.last and "is not finite (loss" in failed.last
    assert "Try a lower optimizer.lr" in failed.last
    assert differing(state(run), before) == []
    assert f"step-00000002 is saved: python train.py resume={run} goes on from it" in failed.out


@pytest.mark.parametrize("loss, norm", [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_require_finite(loss, norm):
    scaler = Precision(torch.device("cpu"), torch.float32).scaler
    require_finite(1.0, 1.0, 4, scaler)
    with pytest.raises(ValueError, match="^step 5: the (loss|gradient) is not finite"):
        require_finite(loss, norm, 4, scaler)


def test_out_of_memory_says_what_to_lower(folder, tmp_path):
    failed = command(*tiny(folder, f"run_dir={tmp_path}/run", "model.d_ff=2000000000"))
    assert failed.status == 1
    assert failed.last.startswith("error: out of memory (")
    assert "Lower micro_batch_size, model.context_length or the model's size" in failed.last
    assert not (tmp_path / "run").exists()


def test_handlers_are_put_back_and_a_signal_is_remembered():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest(Ranks()) as stop:
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested()
        assert stop.signal == signal.SIGTERM
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_interrupt_ends_the_process_at_once():
    if (child := os.fork()) == 0:
        with StopRequest(Ranks()):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGINT


def test_progress():
    progress = Progress(step=6)
    assert [progress.due(every) for every in (None, 1, 3, 4)] == [False, True, True, False]
    assert [progress.improved(loss) for loss in (2.0, 3.0, float("nan"), 2.0, 1.0)] == [True, False, False, False, True]


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as nursery:
        yield nursery


def test_signals(folder, tmp_path, nursery):
    """SIGTERM, SIGHUP and SIGINT: the step is finished and saved."""
    long = tiny(folder, "steps=1000000", "eval_every=null", "save_every=5")
    for number, wandb in ((signal.SIGTERM, "disabled"), (signal.SIGHUP, "disabled"), (signal.SIGINT, "offline")):
        run, err = tmp_path / f"{number}", tmp_path / f"{number}.err"
        process = nursery.start(*long, f"wandb.mode={wandb}", f"run_dir={run}", err=err)
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 8:
            os.kill(process, 0)
            time.sleep(0.01)
        os.killpg(process, number)  # as a terminal or Slurm does: wandb's own process hears it, too
        began = time.monotonic()
        assert nursery.ended(process) == 128 + number
        assert time.monotonic() - began < 30
        assert not alive(process)
        step = state(run)["progress step"]
        assert step >= 8
        assert "Traceback" not in err.read_text()
        assert err.read_text().splitlines()[-1] == f"stopped at step {step}, saved: python train.py resume={run} goes on"
        assert metrics(run)[-1]["step"] == step
        finished(f"resume={run}", f"steps={step + 1}", "wandb.mode=disabled")


def test_a_second_sigint_leaves_at_once_and_harms_nothing(tmp_path, nursery):
    """In the middle of an evaluation that takes many seconds."""
    (tmp_path / "long.txt").write_text("So it goes on, and on. " * 100_000)
    run, err = tmp_path / "run", tmp_path / "err"
    long = ["steps=3", "eval_every=2", "save_every=1", "eval_windows=null", f"data.path={tmp_path}/long.txt", f"run_dir={run}"]
    process = nursery.start(*tiny(tmp_path, *long), err=err)
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
        os.kill(process, 0)
        time.sleep(0.01)
    for _ in range(2):
        time.sleep(0.5)
        os.kill(process, signal.SIGINT)
    began = time.monotonic()
    assert nursery.ended(process) == 128 + signal.SIGINT
    assert time.monotonic() - began < 3
    assert "stopped at step" not in err.read_text() and "Traceback" not in err.read_text()
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert "going on from step 1" in finished(f"resume={run}", "eval_windows=2").out
