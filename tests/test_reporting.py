"""What a run tells: its lines, its bar, its rows, its picture, and where its time went."""

import io
import json
import re
import sys
import time

import pytest
import torch
from tiny_runs import finished, tiny

from training.curves import draw_losses
from training.evaluate import Evaluation
from training.flops import flops_per_token, matmul_parameters, matmul_peak
from training.launch import Outcome, sweep_table
from training.reporting import Report, clock, peak_memory
from training.run import Progress, RunFolder

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def report(folder, steps=10, done=0):
    return Report(folder, None, Progress(step=done), steps, 1000, 1e12 / 2e6, CPU, time.perf_counter())


def test_a_line_tells_what_is_worth_knowing(folder, capsys):
    with report(folder, steps=1000, done=990) as told:
        for step in (991, 992):
            time.sleep(0.05)
            told.progress.advance(4)
            told.step(loss=2.5, norm=0.75, lr=3e-4, log=step == 992)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    figures = r"loss 2.5000 \| lr 3.0e-04 \| norm 0.75 \| ([\d,]+) tokens/s \| \d+% of peak \| [\d.]+ GiB \| 0:0\d left"
    found = re.fullmatch(rf"step  992/1000 \| {figures}", line)
    assert found, line
    speed = int(found[1].replace(",", ""))
    assert 10_000 < speed < 20_000  # 1000 tokens in 50 ms and a little
    (row,) = folder.read_metrics()
    assert row["time/peak_share"] == pytest.approx(speed * 2e6 / 1e12, rel=1e-3)
    assert {"step": 992, "train/loss": 2.5, "train/lr": 3e-4, "train/grad_norm": 0.75}.items() <= row.items()


def test_time_is_put_down_to_what_it_was_spent_on(folder, capsys):
    with report(folder) as told:
        for what in ("step", "evaluation", "sample", "save"):
            time.sleep(0.2)
            told.progress.advance(4)
            if what == "step":
                told.step(2.5, 1.0, 1e-3, log=True)
            elif what == "evaluation":
                told.evaluation(Evaluation(2.0, 7.4, 1.5, 100), best=True)
            elif what == "sample":
                told.sample("text")
            else:
                told.saved()
        spent = dict(told.seconds)
    for what in ("training", "evaluation", "samples", "checkpoints"):
        assert 0.2 <= spent[what] < 0.4
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " in all: " in line]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", line)]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_speed_and_shares_leave_out_what_is_not_training(folder):
    with report(folder) as told:
        time.sleep(0.05)
        told.progress.advance(4)
        told.step(2.5, 1.0, 1e-3, log=True)
        time.sleep(0.5)
        told.evaluation(Evaluation(2.0, 7.4, 1.5, 100), best=True)
        time.sleep(0.05)
        told.progress.advance(4)
        told.step(2.5, 1.0, 1e-3, log=True)
    speeds = [row["time/tokens_per_second"] for row in folder.read_metrics() if "train/loss" in row]
    assert all(speed > 10_000 for speed in speeds)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with report(RunFolder(tmp_path)) as told:
        for _ in range(10):
            time.sleep(0.02)
            told.progress.advance(4)
            told.step(2.5, 0.75, 3e-4, log=False)
        told.bar.refresh()
    for part in ("10/10", "loss 2.5000", "lr 3.0e-04", "norm 0.75", "tokens/s", "of peak", "GiB", "<"):
        assert part in shown.getvalue(), part


def test_a_run_goes_on_when_nobody_reads_it_any_more(folder, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    with report(folder) as told:
        for _ in range(2):
            told.progress.advance(4)
            told.step(2.5, 1.0, 1e-3, log=True)
    assert [row["step"] for row in folder.read_metrics()] == [1, 2]


def test_another_rank_says_and_writes_nothing(tmp_path, capsys, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with report(None) as told:
        told.progress.advance(4)
        told.step(2.5, 1.0, 1e-3, log=True)
        told.evaluation(Evaluation(2.0, 7.4, 1.5, 100), best=True)
        told.sample("text")
        told.saved()
    assert (capsys.readouterr().out, shown.getvalue()) == ("", "")


def test_the_picture_shows_what_there_is(folder):
    draw_losses(folder)  # of nothing
    folder.append_metrics({"step": 1, "train/loss": 2.0, "train/lr": 1e-3, "train/grad_norm": float("inf")})
    folder.append_metrics({"step": 1, "val/loss": float("nan")})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()][0]["train/grad_norm"] is None
    draw_losses(folder)
    pictures = [(folder.path / "loss.png").read_bytes()]
    for row in ({"step": 2, "train/loss": 1.0}, {"step": 2, "val/loss": 1.5}, {"step": 3, "train/lr": 1e-3}):
        folder.append_metrics(row)
        draw_losses(folder)
        pictures.append((folder.path / "loss.png").read_bytes())
    assert {picture[:4] for picture in pictures} == {b"\x89PNG"}
    assert len(set(pictures)) == 4
    assert [path.name for path in folder.path.glob("loss*")] == ["loss.png"]


def test_a_run_tells_what_it_is_and_where_its_time_went(tmp_path):
    out = finished(*tiny(tmp_path, f"run_dir={tmp_path}/run", "sample_every=3", "prompt=one")).out
    assert f"{tmp_path}/run: 35,072 parameters, 6 steps of 64 tokens in float32 on cpu" in out
    assert out.count("--- sample at step") == 2 and "--- sample at step 6\none" in out
    assert re.search(r"step 6/6 \| validation loss [\d.]+ \| perplexity [\d.]+ \| [\d.]+ bits per byte \| best", out)
    assert re.search(r"\d:\d\d in all: .*training [\d.]+%", out)
    assert f'python sample.py --checkpoint {tmp_path}/run --prompt "..."' in out


def test_the_table_of_a_sweep_is_sorted_and_tells_the_runs_apart():
    jobs = [Outcome(0, "runs/a", 2.5, ("steps=5", "seed=1")), Outcome(0, "runs/b", 1.5, ("steps=5", "seed=2"))]
    table = sweep_table([*jobs, Outcome(overrides=("steps=5", "seed=3"), error="no")]).splitlines()
    cells = [line.split() for line in table[1:]]
    assert cells == [["1.5000", "runs/b", "seed=2"], ["2.5000", "runs/a", "seed=1"], ["failed", "seed=3"]]


def test_clock():
    assert [clock(seconds) for seconds in (0, 59.6, 61, 3600, 90061)] == ["0:00", "1:00", "1:01", "1:00:00", "25:01:01"]


def test_flops_are_counted():
    from model import ModelConfig, Transformer

    config = ModelConfig(vocab_size=100, context_length=8, n_layers=2, n_heads=2, d_model=16, d_ff=32, mlp="gelu")
    model = Transformer(config)
    matrices = 2 * (16 * 48 + 16 * 16 + 2 * 16 * 32) + 100 * 16
    assert matmul_parameters(model) == matrices
    assert flops_per_token(model) == 6 * matrices + 12 * 2 * 16 * 8


def test_the_yardstick_is_what_this_device_does():
    size = 512
    a = torch.randn(size, size)
    a @ a
    began = time.perf_counter()
    for _ in range(5):
        a @ a
    slow = 5 * 2 * size**3 / (time.perf_counter() - began)
    assert matmul_peak(CPU, torch.float32, size) > 0.5 * slow
    assert peak_memory(CPU) > 50e6
