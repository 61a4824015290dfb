"""Many ranks are one: a batch gives the same gradients, losses, evaluations and files, however it is spread."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from configs.schema import TrainConfig
from data.batches import Windows
from data.prepare import prepare
from data.source import DataConfig
from data.tokenizer import TokenizerConfig
from model import ModelConfig, Transformer, generate
from tests.rank_group import Team, free_port, on_ranks
from tests.tiny_runs import finished
from training.evaluate import evaluate
from training.objective import IGNORED, NextTokenLoss
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer
from training.plan_ranks import plan_ranks
from training.ranks import Ranks, callable_in_parts, whole
from training.reporting import WandbConfig
from training.schedule import ScheduleConfig
from training.update import Precision, accumulate
from weights import checkpoint

CPU = torch.device("cpu")
BATCH = 8
CONFIG = ModelConfig(vocab_size=257, context_length=16, n_layers=2, n_heads=2, d_model=32)
BYTES = TokenizerConfig(name="bytes", vocab_size=None)
PARALLEL = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
WORLD = pytest.mark.parametrize("world", [2, 4])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of multiples of odd numbers, modulo 40, with 0 to 15 ignored targets a row; the first row has no other."""
    first = torch.randint(0, 20, (BATCH, 1), generator=torch.Generator().manual_seed(step)) * 2 + 1
    ids = first * torch.arange(1, 18) % 40
    targets = ids[:, 1:].clone()
    for row in range(BATCH):
        targets[row, : 16 if row == 0 else 2 * row + step % 2] = IGNORED
    return ids[:, :-1], targets


class Trainee:
    """A model, spread over the ranks, and its optimizer."""

    def __init__(
        self,
        ranks: Ranks,
        parallel: str,
        dtype: torch.dtype = torch.float32,
        *,
        optimizer: str = "adamw",
        compute: torch.dtype = torch.float32,
    ):
        torch.manual_seed(0)
        self.ranks, self.precision = ranks, Precision(CPU, compute)
        self.model = Transformer(CONFIG).to(dtype)
        self.objective = NextTokenLoss(self.model)
        self.wrapped = ranks.wrap(self.objective, parallel, CPU, compute)
        self.optimizer = make_optimizer(OptimizerConfig(name=optimizer, lr=1e-2), self.model)

    def backward(self, step: int, micro: int) -> float:
        """The loss; the gradients are where they belong."""
        tokens, targets = (part.chunk(self.ranks.world)[self.ranks.rank] for part in batch(step))
        n_targets = int(self.ranks.sum((targets != IGNORED).sum()))
        pieces = list(zip(tokens.split(micro), targets.split(micro), strict=True))
        seed, precision = (0, step), self.precision
        return accumulate(self.wrapped, pieces, n_targets, ranks=self.ranks, seed=seed, precision=precision).item()

    def gradients(self) -> np.ndarray:
        return np.concatenate([whole(p.grad).flatten().numpy() for p in self.model.parameters()])

    def held(self) -> int:
        """Bytes of weights, gradients (which have gone, and are as large as the weights) and optimizer state on this rank."""
        weights = list(self.model.parameters())
        state = [value for p in weights for value in self.optimizer.state[p].values() if value.dim()]
        return sum(local(value).numel() * 4 for value in (*weights, *weights, *state))

    def losses(self, steps: int, micro: int) -> list[float]:
        found = []
        for step in range(steps):
            found.append(self.backward(step, micro))
            clip_gradients(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return found


def local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def measure(ranks: Ranks, parallel: str, micro: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64):
        trainee = Trainee(ranks, parallel, dtype)
        loss = trainee.backward(0, micro)
        found[str(dtype)] = (loss, clip_gradients(trainee.model.parameters(), None).item(), trainee.gradients())
    trainee = Trainee(ranks, parallel)
    found["adamw"] = trainee.losses(20, micro)
    found["held"] = trainee.held()
    found["muon"] = Trainee(ranks, parallel, optimizer="muon").losses(8, micro)
    found["bfloat16"] = Trainee(ranks, parallel, compute=torch.bfloat16).losses(8, micro)
    trainee = Trainee(ranks, parallel)
    found["exchanged early"] = exchanged_early(trainee)
    found["evaluation"] = evaluations(trainee, folder)
    return found


def exchanged_early(trainee: Trainee) -> bool:
    """Whether the gradient of a micro-batch that is not the last is the ranks' mean already, or is spread over them."""
    ranks, (tokens, targets) = trainee.ranks, batch(0)
    mine = slice(ranks.rank, ranks.rank + 1)
    with ranks.exchanging(trainee.wrapped, last=False):
        trainee.wrapped(tokens[1:][mine], targets[1:][mine])[0].backward()
    gradient = trainee.model.norm.weight.grad
    trainee.optimizer.zero_grad()
    if gradient is None:
        return False  # inside FSDP, whole
    return hasattr(gradient, "full_tensor") or torch.allclose(gradient * ranks.world, ranks.sum(gradient))


def evaluations(trainee: Trainee, folder: Path) -> list[Any]:
    """Of 1 window, which leaves most ranks none, of 7, and of all 15, whose last ignores targets; then greedy text."""
    data = DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache"), val_fraction=0.01)
    windows = Windows(prepare(data, BYTES, 16, report=lambda line: None).val, 16, seed=None)
    found = [evaluate(trainee.objective, windows, 2, trainee.ranks, limit) for limit in (1, 7, None)]
    with callable_in_parts(trainee.objective):
        text = generate(trainee.model, [[1, 2, 3]], 5)
    return [(e.loss, e.n_targets) for e in found] + text


def config(folder: Path, **changes: Any) -> TrainConfig:
    always: dict[str, Any] = {"dtype": "float32", "device": "cpu", "log_every": 1}
    return TrainConfig(
        model=ModelConfig(context_length=16, n_layers=2, n_heads=2, d_model=32),
        data=DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache")),
        tokenizer=BYTES,
        wandb=WandbConfig(mode="disabled"),
        schedule=ScheduleConfig(warmup_steps=0, final=1.0),
        **always | {"batch_size": 8, "micro_batch_size": 2, "eval_windows": 20} | changes,
    )


RELAYS = {  # (ranks, parallel, up to which step)
    "alone": [(1, "ddp", 10)],
    "handed on": [(2, "fsdp", 2), (1, "ddp", 4), (2, "ddp", 6), (4, "fsdp", 8), (2, "fsdp", 10)],
}


def relay(team: Team, folder: Path, run: Path, name: str) -> None:
    """One run, handed on to other numbers of ranks."""
    for i, (world, parallel, steps) in enumerate(RELAYS[name]):
        with team.of(world) as playing:
            if playing:
                resume = str(run) if i else None
                settings = config(folder, parallel=parallel, run_dir=str(run), resume=resume, steps=steps)
                assert train.train(settings, Ranks.from_environment()).status == 0


def told_to_stop(team: Team, folder: Path) -> int | None:
    """The exit status of each of two ranks, of which only the second gets a SIGTERM."""
    run = folder / "stopped"
    with team.of(2) as playing:
        if playing:
            if team.rank == 1:
                threading.Thread(target=terminate_after, args=(run / "metrics.jsonl", 3)).start()
            return train.train(config(folder, run_dir=str(run), steps=10**6), Ranks.from_environment()).status
    return None


def terminate_after(metrics: Path, rows: int) -> None:
    while not metrics.exists() or metrics.read_text().count("\n") < rows:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def command(team: Team, folder: Path, *overrides: str) -> Any:
    """What `train.py` ends with on each of two ranks: its exit status, or the message it prints on leaving."""
    sys.argv = ["train.py", f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", "device=cpu"]
    sys.argv += ["tokenizer=bytes", "wandb.mode=disabled", *overrides]
    with team.of(2) as playing:
        if playing:
            with pytest.raises(SystemExit) as left:
                train.main()
            return left.value.code
    return None


def everything(team: Team, folder: Path) -> dict[Any, Any]:
    """All that the tests below look at, in one set of processes."""
    found: dict[Any, Any] = {}
    for world in (2, 4):
        for parallel in ("ddp", "fsdp"):
            with team.of(world) as playing:
                if playing:
                    found[world, parallel] = measure(Ranks.from_environment(), parallel, 4 // world, folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for name in RELAYS:
            relay(team, folder, folder / name, name)
        found["stopped"] = told_to_stop(team, folder)
    found["printed"] = printed.getvalue()
    found["batch of 5"] = command(team, folder, "batch_size=5")
    found["micro-batch of 3"] = command(team, folder, "batch_size=8", "micro_batch_size=3")
    found["no such key"] = command(team, folder, "batches=8")
    found["no data"] = command(team, folder, "data.path=nowhere.txt")
    found["one rank fails"] = command(team, folder, "batch_size=8", f"device={('cpu', 'cuda')[team.rank % 2]}")
    return found


def with_text(folder: Path) -> Path:
    (folder / "text.txt").write_text("".join(f"{word} {i * i} " for i in range(700) for word in ("some", "words", "and")))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return with_text(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def text(tmp_path) -> Path:
    return with_text(tmp_path)


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[Any, Any]]:
    return on_ranks(4, everything, folder)


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    return measure(Ranks(), "ddp", BATCH, folder)


@WORLD
@PARALLEL
@pytest.mark.parametrize(("dtype", "tolerance"), [("torch.float32", 1e-6), ("torch.float64", 1e-10)])
def test_loss_norm_and_gradients_do_not_depend_on_the_split(alone, ranks, world, parallel, dtype, tolerance):
    loss, norm, gradients = alone[dtype]
    for rank in range(world):
        found = ranks[rank][world, parallel][dtype]
        assert found[:2] == pytest.approx((loss, norm), rel=tolerance)
        assert np.linalg.norm(found[2] - gradients) <= tolerance * np.linalg.norm(gradients)


@WORLD
@PARALLEL
@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-5), ("muon", 1e-3), ("bfloat16", 2e-2)])
def test_losses_of_many_steps_do_not_depend_on_the_split(alone, ranks, world, parallel, optimizer, tolerance):
    assert alone[optimizer][-1] < alone[optimizer][0] - 0.2
    for rank in range(world):
        assert ranks[rank][world, parallel][optimizer] == pytest.approx(alone[optimizer], abs=tolerance)


@WORLD
@PARALLEL
def test_a_rank_holds_what_the_plan_says(ranks, world, parallel):
    n = sum(p.numel() for p in Transformer(CONFIG).parameters())
    none = {"ddp": 0, "fsdp": 0}
    plans = plan_ranks(CONFIG, world, optimizer=8 * n, activations=none, micro_batches=1, gathered_bytes=4)
    held = [ranks[rank][world, parallel]["held"] for rank in range(world)]
    assert sum(held) == world * plans[parallel].stays
    assert max(held) == pytest.approx(plans[parallel].stays, rel=0.01)


@WORLD
@PARALLEL
def test_gradients_are_exchanged_after_the_last_micro_batch_only(ranks, world, parallel):
    assert not any(ranks[rank][world, parallel]["exchanged early"] for rank in range(world))


@WORLD
@PARALLEL
def test_the_evaluation_is_that_of_one_rank(alone, ranks, world, parallel):
    *evaluations, text = alone["evaluation"]
    assert [n for _, n in evaluations] == [16, 112, 239]
    for rank in range(world):
        *found, found_text = ranks[rank][world, parallel]["evaluation"]
        assert [n for _, n in found] == [n for _, n in evaluations]
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in evaluations], rel=1e-6)
        assert found_text == text


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_other_numbers_of_ranks(folder, ranks):
    expected, found = (
        {row["step"]: row["train/loss"] for row in rows(folder / name) if "train/loss" in row} for name in ("alone", "handed on")
    )
    assert list(found) == list(expected) == list(range(1, 11))
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)
    assert rows(folder / "handed on")[-1]["val/loss"] == pytest.approx(rows(folder / "alone")[-1]["val/loss"], abs=1e-5)


def test_the_checkpoint_is_that_of_one_rank(folder, ranks):
    one, many = ((folder / name / "checkpoints" / "latest").resolve() for name in ("alone", "handed on"))
    assert {path.name for path in many.iterdir()} == {path.name for path in one.iterdir()}
    theirs, ours = (checkpoint.read_weights(path / "model.safetensors") for path in (one, many))
    assert {key: (w.shape, w.dtype) for key, w in ours.items()} == {key: (w.shape, w.dtype) for key, w in theirs.items()}
    theirs, ours = (checkpoint.read_trainer(path)["optimizer"] for path in (one, many))
    assert theirs.keys() == ours.keys()
    for key, state in theirs.items():
        assert {name: value.shape for name, value in ours[key].items()} == {name: value.shape for name, value in state.items()}
        torch.testing.assert_close(ours[key]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-3, atol=1e-9)


def test_only_the_first_rank_prints(ranks):
    assert ranks[0]["printed"].count("is done") == sum(map(len, RELAYS.values()))
    assert [ranks[rank]["printed"] for rank in (1, 2, 3)] == ["", "", ""]


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_saves(folder, ranks):
    assert [ranks[rank]["stopped"] for rank in (0, 1)] == [128 + signal.SIGTERM] * 2
    saved = checkpoint.read_trainer(checkpoint.find(folder / "stopped"))["progress"]["step"]
    assert saved == rows(folder / "stopped")[-1]["step"] >= 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("batch of 5", "batch_size=5 does not divide over 2 ranks: use a multiple of 2"),
        ("micro-batch of 3", "micro_batch_size=3 does not divide the 4 sequences of each rank"),
        ("no such key", "batches"),
        ("no data", "nowhere.txt"),
        ("one rank fails", "device=cuda was asked for"),
    ],
)
def test_an_error_ends_all_ranks_with_one_message(ranks, what, message):
    left = [ranks[rank][what] for rank in (0, 1)]
    told = [code for code in left if isinstance(code, str)]
    assert len(told) == 1 and message in told[0]
    assert [code for code in left if code != told[0]] == [1]


def test_a_dry_run_plans_for_ranks_that_are_not_there(folder, capsys):
    settings = config(folder, dry_run=True, plan_ranks=64, batch_size=128, micro_batch_size=2, dtype="bfloat16")
    assert train.train(settings, Ranks()).status == 0
    ddp, fsdp = capsys.readouterr().out.splitlines()[-2:]
    assert ddp.startswith("ddp on 64 ranks: ") and fsdp.startswith("fsdp on 64 ranks: ")
    with pytest.raises(ValueError, match="batch_size=100 does not divide over 64 ranks"):
        train.train(config(folder, dry_run=True, plan_ranks=64, batch_size=100), Ranks())


def test_a_plan_by_hand():
    """Llama 2 7B in bfloat16 on 64 ranks, from the sizes that its paper gives."""
    shape = {"n_layers": 32, "n_heads": 32, "d_model": 4096, "d_ff": 11008, "context_length": 4096}
    llama = ModelConfig(vocab_size=32000, tie_embeddings=False, **shape)
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    outside = 2 * 32000 * 4096 + 4096
    n = 32 * block + outside
    assert n == 6_738_415_616
    none = {"ddp": 0, "fsdp": 0}
    plans = plan_ranks(llama, 64, optimizer=8 * n, activations=none, micro_batches=1, gathered_bytes=2)
    assert (plans["ddp"].stays, plans["fsdp"].stays) == (16 * n, 16 * n / 64)
    assert plans["ddp"].sent == pytest.approx(2 * 63 / 64 * 4 * n)
    assert plans["fsdp"].sent == pytest.approx(63 / 64 * 8 * n)
    assert plans["fsdp"].passing == 2 * 2 * (outside + 2 * block) + 4 * outside
    cut = plan_ranks(llama, 64, optimizer=8 * n, activations=none, micro_batches=4, gathered_bytes=2)
    assert cut["fsdp"].sent == pytest.approx(63 / 64 * (4 * 4 + 4) * n)
    assert cut["fsdp"].passing == 2 * (outside + 2 * block) + 4 * n + 4 * outside


# What follows needs torchrun itself, which starts and ends processes its own way.


def arguments(folder: Path) -> list[str]:
    found = [f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", "tokenizer=bytes", "device=cpu"]
    found += ["model.n_layers=2", "model.n_heads=2", "model.d_model=32", "model.context_length=16", "batch_size=8"]
    return [*found, "wandb.mode=disabled", "log_every=1", "eval_every=1000000"]


def torchrun(folder: Path, *words: str, launcher: tuple[str, ...]) -> subprocess.Popen[str]:
    """Two ranks of a run that goes on until something ends it, in `folder`/run."""
    overrides = [*arguments(folder), f"run_dir={folder / 'run'}", *words]
    program = [sys.executable, "-m", "torch.distributed.run", *launcher, "train.py", *overrides]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for(done: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not done():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(str(process.communicate()[0]))
        time.sleep(0.05)


def told(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Exit status and all that was printed, within so many seconds."""
    try:
        text = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, text


def process_of(rank: int, folder: Path) -> int:
    """The process that is this rank of the run in `folder`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"run_dir={folder / 'run'}".encode() in (entry / "cmdline").read_bytes()
            if ours and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise AssertionError(f"rank {rank} of {folder} is not running")


TWO = ("--standalone", "--nproc_per_node=2")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "parallel"), [(1, "ddp"), (0, "fsdp")])
def test_a_rank_that_dies_ends_the_others_and_leaves_the_last_checkpoint_good(text, rank, parallel):
    process = torchrun(text, "steps=1000000", "save_every=5", f"parallel={parallel}", launcher=TWO)
    wait_for((text / "run" / "checkpoints" / "latest").exists, process)
    os.kill(process_of(rank, text), signal.SIGKILL)
    status, printed = told(process, seconds=40)
    assert status != 0
    assert re.search(rf"rank +: {rank} .*\n +exitcode +: -9", printed)
    assert printed.count("error: ") <= 1 and 'Traceback (most recent call last):\n  File "train' not in printed
    saved = checkpoint.read_trainer(checkpoint.find(text / "run"))["progress"]["step"]
    assert f"going on from step {saved}" in finished(f"resume={text / 'run'}", f"steps={saved + 1}").out


@pytest.mark.slow
def test_sigterm_to_torchrun_saves(text):
    process = torchrun(text, "steps=1000000", "parallel=fsdp", launcher=TWO)
    wait_for((text / "run" / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGTERM)
    _, printed = told(process, seconds=40)
    saved = checkpoint.read_trainer(checkpoint.find(text / "run"))["progress"]["step"]
    assert printed.count(f"stopped at step {saved}, saved") == 1
    assert rows(text / "run")[-1]["step"] == saved


@pytest.mark.slow
def test_an_error_is_printed_once_under_torchrun(text):
    status, printed = told(torchrun(text, "batch_size=5", launcher=TWO), seconds=90)
    assert status != 0
    assert printed.count("error: batch_size=5 does not divide over 2 ranks") == 1
    assert printed.count("error: ") == 1 and not (text / "run").exists()


@pytest.mark.slow
def test_two_machines_meet(text):
    """Two agents, each with one rank, as on two hosts; here both on this one."""
    meeting = (f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_backend=c10d", "--rdzv_id=run", "--nnodes=2")
    agents = [torchrun(text, "steps=4", launcher=(*meeting, "--nproc_per_node=1")) for _ in range(2)]
    ended = [told(agent, seconds=120) for agent in agents]
    assert [status for status, _ in ended] == [0, 0]
    assert sorted("is done" in printed for _, printed in ended) == [False, True]
    finished(*arguments(text), "steps=4", f"run_dir={text / 'alone'}")
    for one, two in zip(rows(text / "alone"), rows(text / "run"), strict=True):
        for key in {"train/loss", "val/loss"} & one.keys():
            assert two[key] == pytest.approx(one[key], abs=1e-5)
