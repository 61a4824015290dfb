"""One training step (forward, backward, clip, optimizer) in float32: ours against transformers and nanoGPT, in time and memory.

`python -m benchmarks.train_step [NANOGPT]`, with a checkout of github.com/karpathy/nanoGPT if it is to take part.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.decode import pair, preset
from benchmarks.harness import as_row, forget_peak, in_a_process, interleave, resident, store, training_step
from model import ModelConfig, Transformer
from training.device import set_up
from training.flops import flops_per_token
from training.objective import NextTokenLoss
from training.optimizer import OptimizerConfig, make_optimizer

TINY = ModelConfig(vocab_size=65, context_length=64, n_layers=4, n_heads=4, d_model=128, mlp="relu2", qk_norm=True)
GPT2 = ModelConfig(**{**preset("gpt2"), "vocab_size": 50304})
SHAPES = {  # name: (architecture, sequences, tokens of each)
    "default": (ModelConfig(**preset("small"), vocab_size=4096), 8, 256),
    "vocabulary of 32,000": (ModelConfig(vocab_size=32000, context_length=128, n_layers=4, n_heads=4, d_model=256), 8, 128),
    "nanoGPT's for CPUs": (replace(TINY, position="learned", mlp="gelu", norm="layernorm", qk_norm=False), 12, 64),
    "experiment=shakespeare_cpu": (TINY, 12, 64),
    "GPT-2 124M": (GPT2, 4, 256),
}
MUON = OptimizerConfig(name="muon", lr=0.02)
YARDSTICK = 1024  # the size of a square matrix product that takes its turn among the steps: what this machine can do just then
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}
Step = Callable[[], object]


def ours(name: str, optimizer: OptimizerConfig, compile: bool = False, end_of_text: int | None = None) -> Step:
    config, batch, length = SHAPES[name]
    objective = NextTokenLoss(Transformer(config), end_of_text)
    updates = make_optimizer(optimizer, objective.model)
    if compile:
        objective.compile()
    return training_step(objective, updates, tokens(config, batch, length))


def theirs(name: str) -> Step:
    config, batch, length = SHAPES[name]
    _, model = pair(vars(config), torch.float32, "cpu")
    ids = tokens(config, batch, length)
    return plain_step(model.train(), lambda: model(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss)


def nanogpt_module(checkout: Path) -> Any:
    """Its model.py."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec and spec.loader
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nanogpt(name: str, checkout: str, compile: bool = False) -> Step:
    """As its train.py does it on a CPU."""
    config, batch, length = SHAPES[name]
    module = nanogpt_module(Path(checkout))
    shape: dict[str, Any] = {"n_layer": config.n_layers, "n_head": config.n_heads, "n_embd": config.d_model, "dropout": 0.0}
    gpt = module.GPTConfig(block_size=config.context_length, vocab_size=config.vocab_size, bias=False, **shape)
    model = module.GPT(gpt)
    run = torch.compile(model) if compile else model
    ids = tokens(config, batch, length)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return plain_step(model, lambda: run(x, y)[1])


def plain_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def tokens(config: ModelConfig, batch: int, length: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, config.vocab_size or 0, (batch, length + 1))


def contestants(name: str, checkout: str | None) -> dict[str, Callable[[], Step]]:
    """What builds each; the first is what the others are compared with."""
    found: dict[str, Callable[[], Step]] = {"sprout": lambda: ours(name, OptimizerConfig())}
    if name == "experiment=shakespeare_cpu":
        found |= {"sprout, Muon": lambda: ours(name, MUON), "sprout, Muon, compiled": lambda: ours(name, MUON, True)}
    else:
        found |= {"transformers": lambda: theirs(name)}
    if name == "default":
        found |= {"sprout, separate_documents": lambda: ours(name, OptimizerConfig(), end_of_text=0)}
    if name == "nanoGPT's for CPUs":
        found |= {"sprout, compiled": lambda: ours(name, OptimizerConfig(), True)}
    if checkout and name in ("nanoGPT's for CPUs", "experiment=shakespeare_cpu", "GPT-2 124M"):
        found |= {"nanoGPT": lambda: nanogpt(name, checkout)}
        if name != "GPT-2 124M":
            found |= {"nanoGPT, compiled": lambda: nanogpt(name, checkout, True)}
    return found


def product(dtype: torch.dtype) -> Callable[[], object]:
    a = torch.ones(YARDSTICK, YARDSTICK, dtype=dtype)
    return lambda: a @ a


def in_products(step: Step, turns: int) -> float:
    """Seconds of a step that pass in matrix products: what no other code around them can take away."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(turns):
            step()
    return sum(event.self_cpu_time_total for event in seen.key_averages() if event.key in PRODUCTS) / turns / 1e6


def peak(name: str, checkout: str | None, contestant: str) -> int:
    """Bytes that weights, gradients, optimizer and a step take together, at the most; in a process of its own."""
    set_up(torch.device("cpu"), compiled=False)
    ours("experiment=shakespeare_cpu", OptimizerConfig())()  # loads what is used first
    before = resident()
    step = contestants(name, checkout)[contestant]()
    step()
    forget_peak()
    step()
    return resident("VmHWM") - before


def main(checkout: str | None = None) -> None:
    set_up(torch.device("cpu"), compiled=False)
    rows = []
    for name, (config, batch, length) in SHAPES.items():
        built = {contestant: build() for contestant, build in contestants(name, checkout).items()}
        large = name == "GPT-2 124M"
        turns = 5 if large else 15
        timings = interleave({**built, "matmul": product(torch.float32)}, turns, warmup=1 if large else 3)
        matmul = 2 * YARDSTICK**3 / timings.pop("matmul").median
        row = as_row({"shape": name, "sequences": batch, "tokens of each": length}, timings, "sprout")
        row["seconds in matrix products"] = {who: in_products(step, 1 if large else 5) for who, step in built.items()}
        del built
        work = batch * length * flops_per_token(Transformer(replace(config, context_length=length)))
        row["share of a matrix product's rate"] = {who: round(work / t.median / matmul, 3) for who, t in timings.items()}
        if large:
            row["bytes at the peak"] = {who: in_a_process(peak, name, checkout, who) for who in timings}
        print({key: value for key, value in row.items() if key != "seconds"}, flush=True)
        rows.append(row)
    dtypes = {"float32": product(torch.float32), "bfloat16": product(torch.bfloat16)}
    rates = {name: round(2e-9 * YARDSTICK**3 / t.median, 1) for name, t in interleave(dtypes, turns=15).items()}
    print(store("train_step", rows, {"matrix products, GFLOP/s": rates}))


if __name__ == "__main__":
    main(*sys.argv[1:])
