"""Tiny Shakespeare on two CPU cores, nanoGPT's recipe for CPUs against ours: loss over time, from the start of each process.

`python -m benchmarks.shakespeare TEXT NANOGPT`: the text (tinyshakespeare.txt) and a checkout of github.com/karpathy/nanoGPT, of
which a copy is run with a seed of its own. Every loss is over the whole validation split (the last tenth), in windows of 64.
"""

import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, store
from benchmarks.train_step import nanogpt_module

STEPS, SEEDS, CONTEXT = 2000, (0, 1, 2), 64
DEADLINES = (30, 60, 120)  # seconds, everything included
RECIPE = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1"]
RECIPE += ["--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"]
RECIPE += ["--always_save_checkpoint=True"]
Curve = list[tuple[float, float]]  # (seconds since the process began, loss)


def lines(command: list[str], folder: Path) -> Iterator[tuple[float, str]]:
    """What a program prints, and how many seconds after its start."""
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout
        for line in process.stdout:
            yield time.perf_counter() - began, line
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")


def sprout(text: Path, steps: int, seed: int) -> Curve:
    with TemporaryDirectory() as folder:
        settings = [f"data.path={text}", f"steps={steps}", f"seed={seed}", f"run_dir={folder}/run", "wandb.mode=disabled"]
        settings += [f"eval_every={steps // 4 if steps == STEPS else steps}"]
        command = [sys.executable, "-u", "train.py", "experiment=shakespeare_cpu", *settings]
        found = [(seconds, re.search(r"validation loss ([\d.]+)", line)) for seconds, line in lines(command, Path.cwd())]
    return [(seconds, float(match[1])) for seconds, match in found if match]


def nanogpt(text: Path, checkout: Path, steps: int, seed: int) -> Curve:
    with TemporaryDirectory() as name:
        folder = Path(name) / "nanoGPT"
        shutil.copytree(checkout, folder)
        ids, loss = prepared(text, folder)
        script = folder / "train.py"
        script.write_text(script.read_text().replace("manual_seed(1337", f"manual_seed({seed}"))
        command = [sys.executable, "-u", "train.py", *RECIPE, f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
        command += [f"--eval_interval={steps // 8}"]
        saved: list[tuple[float, Path]] = []
        evaluated = None
        for seconds, line in lines(command, folder):
            if line.startswith("step ") and not line.startswith("step 0:"):  # which saves nothing
                evaluated = seconds
            elif line.startswith("iter ") and evaluated is not None:  # and so its checkpoint is written
                kept = shutil.copy(folder / "out-shakespeare-char" / "ckpt.pt", folder / f"{len(saved)}.pt")
                saved.append((evaluated, Path(kept)))
                evaluated = None
        return [(seconds, loss(kept)) for seconds, kept in saved]


def prepared(text: Path, folder: Path) -> tuple[np.ndarray, Callable[[Path], float]]:
    """Its data files, as its prepare.py writes them; and the loss of a checkpoint over the whole validation split."""
    characters = text.read_text()
    known = sorted(set(characters))
    number = {character: i for i, character in enumerate(known)}
    ids = np.array([number[character] for character in characters], np.uint16)
    cut = int(0.9 * len(ids))
    data = folder / "data" / "shakespeare_char"
    ids[:cut].tofile(data / "train.bin")
    ids[cut:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(known)}))
    module = nanogpt_module(folder)

    @torch.no_grad()
    def loss(checkpoint: Path) -> float:
        saved = torch.load(checkpoint, weights_only=True)
        model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
        model.load_state_dict(saved["model"])
        held_out = torch.from_numpy(ids[cut:].astype(np.int64))
        whole = (len(held_out) - 1) // CONTEXT * CONTEXT
        windows = [(held_out[:whole].view(-1, CONTEXT), held_out[1 : whole + 1].view(-1, CONTEXT))]
        windows += [(held_out[None, whole:-1], held_out[None, whole + 1 :])]
        total = 0.0
        for x, y in windows:
            for rows, targets in zip(x.split(256), y.split(256), strict=True):
                total += model(rows, targets)[1].item() * targets.numel()
        return total / (len(held_out) - 1)

    return ids, loss


def steps_within(deadline: float, curve: Curve, total: int) -> int:
    """How many steps fit, by a whole run's curve: its first evaluation tells what a start costs."""
    (first, _), (last, _) = curve[0], curve[-1]
    each = (last - first) / (total * (1 - 1 / len(curve)))
    return max(64, int((0.97 * deadline - (first - each * total / len(curve))) / each) // 8 * 8)


def plot(rows: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        colour = "tab:green" if row["who"] == "sprout" else "tab:gray"
        label = row["who"] if row["steps"] == STEPS and row["seed"] == SEEDS[0] else None
        if row["steps"] == STEPS:
            axes.plot(*zip(*row["curve"], strict=True), color=colour, alpha=0.7, label=label)
        else:
            axes.plot(*row["curve"][-1], "o", color=colour)
    axes.plot([], [], "ko", label="a run planned to end there")
    axes.set(xlabel="seconds since the process began", ylabel="validation loss (nats a character)", title="Tiny Shakespeare")
    axes.set_ylim(top=2.6)
    axes.legend()
    figure.savefig(RESULTS / "shakespeare.png", dpi=150)


def main(text: str, checkout: str) -> None:
    rows: list[dict[str, Any]] = []

    def run(who: str, steps: int, seed: int) -> Curve:
        path = Path(text).resolve()
        curve = sprout(path, steps, seed) if who == "sprout" else nanogpt(path, Path(checkout), steps, seed)
        rows.append({"who": who, "steps": steps, "seed": seed, "seconds": curve[-1][0], "loss": curve[-1][1], "curve": curve})
        print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
        return curve

    whole = {(who, seed): run(who, STEPS, seed) for seed in SEEDS for who in ("nanoGPT", "sprout")}
    summary = {f"{who}, {STEPS} steps": median(whole[who, seed][-1][1] for seed in SEEDS) for who in ("nanoGPT", "sprout")}
    for deadline in DEADLINES:
        for who in ("nanoGPT", "sprout"):
            summary[f"{who}, {deadline} s"] = run(who, steps_within(deadline, whole[who, 0], STEPS), 0)[-1][1]
    print(summary)
    plot(rows)
    print(store("shakespeare", rows, {"median loss": summary}))


if __name__ == "__main__":
    main(*sys.argv[1:])
