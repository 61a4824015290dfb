"""What `dry_run=true` says is what a run takes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import command, finished, tiny
from token_files import token_file

from data.batches import Windows
from model import KVCache, ModelConfig, Transformer
from training.batches import Batches
from training.optimizer import OptimizerConfig
from training.plan import make_plan, resident
from training.ranks import Ranks
from training.update import Precision

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = {"vocab_size": 300, "context_length": 32, "n_layers": 3, "n_heads": 4, "d_model": 64}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("plan"), list(range(250)) * 41, n_vocab=300)


def plan(tokens, optimizer="adamw", micro=4, accumulate=1, dtype=torch.float32, recompute=False, steps=10, **changes):
    config = ModelConfig(**{**SMALL, **changes})
    windows = Windows(tokens, config.context_length, seed=0)
    batches = Batches(windows, micro * accumulate, micro, Ranks(), CPU)
    return make_plan(config, OptimizerConfig(name=optimizer), batches, Precision(CPU, dtype), recompute, False, steps)


@pytest.mark.parametrize(
    "changes",
    [{"position": position} for position in ("rope", "learned", "sinusoidal", "alibi", "none")]
    + [{"tie_embeddings": False}, {"bias": True, "norm": "layernorm", "mlp": "gelu"}, {"qk_norm": True, "n_kv_heads": 2}],
    ids=str,
)
def test_parameters_are_all_counted_once_in_their_part(tokens, changes):
    found = plan(tokens, **changes)
    model = Transformer(ModelConfig(**{**SMALL, **changes}))
    assert sum(found.parameters.values()) == sum(p.numel() for p in model.parameters())
    assert found.parameters["embedding"] == model.embed.weight.numel()
    assert found.parameters["mlp"] == sum(p.numel() for block in model.blocks for p in block.mlp.parameters())
    assert found.parameters.get("head", 0) == (0 if model.config.tie_embeddings else model.head.weight.numel())
    assert found.memory["weights"] >= 4 * sum(found.parameters.values())


def test_memory_by_kind(tokens):
    one = plan(tokens)
    n = sum(one.parameters.values())
    table = 4 * 32 * 16 * 2  # RoPE's, which is no parameter
    assert one.memory["weights"] == 4 * n
    assert one.memory["optimizer"] == pytest.approx(8 * n, abs=1000)
    assert plan(tokens, accumulate=2).memory["gradients"] == 4 * n
    assert plan(tokens, "muon").memory["optimizer"] < one.memory["optimizer"]
    four, eight = plan(tokens, micro=32).memory, plan(tokens, micro=64).memory
    assert eight["activations"] == pytest.approx(2 * four["activations"], rel=0.05, abs=table)
    assert plan(tokens, micro=64, recompute=True).memory["activations"] < eight["activations"] / 2
    half = plan(tokens, micro=64, dtype=torch.bfloat16)
    assert half.memory["activations"] < 0.8 * eight["activations"]


def test_logits_are_told_where_they_are_the_most(tokens):
    memory = plan(tokens, micro=8, vocab_size=20_000).memory
    assert memory["logits"] >= 2 * 4 * 8 * 32 * 20_000
    assert memory["logits"] > memory["activations"]


def test_tokens_epochs_arithmetic_and_cache(tokens):
    found = plan(tokens, steps=10, micro=4, accumulate=2)
    assert found.tokens == 10 * 8 * 32
    assert found.epochs == pytest.approx(80 / (10249 / 32), rel=0.01)
    assert found.flops == pytest.approx(6 * sum(found.parameters.values()) * found.tokens, rel=0.15)
    cache = KVCache(ModelConfig(**SMALL, n_kv_heads=2), 1, 32, torch.float32)
    stored = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert plan(tokens, n_kv_heads=2).cache == stored / cache.capacity


def test_a_plan_costs_nothing_of_what_it_plans(tokens):
    before = resident()
    found = plan(tokens, n_layers=5, d_model=4096, vocab_size=50_000)
    assert found.memory["weights"] > 4 << 30
    assert resident() - before < 500 << 20


def test_the_scaler_that_training_will_use_meets_nothing_fake(tokens):
    precision, config = Precision(CPU, torch.float16), ModelConfig(**SMALL)
    batches = Batches(Windows(tokens, config.context_length, seed=0), 4, 4, Ranks(), CPU)
    make_plan(config, OptimizerConfig(), batches, precision, False, False)
    assert precision.scaler.is_enabled() and precision.scaler._scale is None


def test_a_plan_of_what_does_not_fit_says_so_and_takes_no_step(tmp_path):
    told = command(*tiny(tmp_path, "dry_run=true", "model.d_model=65536", "model.n_layers=2", f"run_dir={tmp_path}/run"))
    assert told.status == 0
    assert "too little. Lower micro_batch_size, model.context_length or the model's size" in told.out
    assert "evaluations of" not in told.out
    assert not (tmp_path / "run").exists()


def test_a_dry_run_tells_the_plan_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = finished(*tiny(tmp_path, "dry_run=true")).out
    for part in ("embedding", "attention", "mlp", "tokens", "epochs", "a parameter (Chinchilla's: 20)", "KV cache", "optimizer"):
        assert part in out
    assert re.search(r"time +\d+:\d\d: 6 steps of [\d.e-]+ s, 1 evaluations of [\d.e-]+ s", out)
    assert re.search(r"measured +[\d,.]+ MiB", out)
    assert not (tmp_path / "runs").exists()
    finished(*tiny(tmp_path, "run_dir=run", "steps=4"))
    left = finished("resume=run", "steps=10", "eval_every=3", "dry_run=true").out
    assert re.search(r"time +\d+:\d\d: 6 steps of [\d.e-]+ s, 2 evaluations", left)
    assert int(re.search(r"tokens +([\d,]+): ", left)[1].replace(",", "")) == 6 * 4 * 16


@pytest.mark.slow
@pytest.mark.parametrize("recipe, millions", [("shakespeare_gpu", 10.7), ("tinystories", 30), ("gpt2_124m", 124)])
def test_the_larger_recipes_are_planned(recipe, millions, tmp_path):
    """As they are, for eight ranks, but for data and tokenizer, which need a network, and for the size of a micro-batch."""
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 2000)
    here = ["data=text", f"data.path={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/cache", "tokenizer=bytes", "device=cpu"]
    planned = ["dry_run=true", "plan_ranks=8"]
    vocabulary = {"tinystories": ["model.vocab_size=8192"]}.get(recipe, [])
    out = finished(f"experiment={recipe}", *here, *vocabulary, "dtype=bfloat16", "micro_batch_size=8", *planned).out
    parameters = int(re.findall(r"in all +([\d,]+)", out)[0].replace(",", ""))
    assert parameters == pytest.approx(millions * 1e6, rel=0.03)
    assert "ddp on 8 ranks" in out and "fsdp on 8 ranks" in out


MODELS = {
    "wide": ["model.d_model=256", "model.n_layers=4", "model.context_length=128", "batch_size=8"],
    "long": ["model.d_model=128", "model.n_layers=6", "model.context_length=512", "batch_size=4", "micro_batch_size=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_that_of_a_real_run(name, tmp_path):
    """Each in a process of its own, as memory is that of the process."""
    settings = [*MODELS[name], "steps=10", "eval_every=5", "eval_windows=16", "log_every=5", "wandb.mode=offline"]
    arguments = tiny(tmp_path, *settings, f"data.path={ROOT}/README.md")

    def process(*more):
        line = [sys.executable, "train.py", *arguments, *more]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200).stdout

    planned, ran = process("dry_run=true"), process(f"run_dir={tmp_path}/run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    memory = max(row["time/memory_gib"] for row in rows if "train/loss" in row) * 1024
    step = 1 / torch.tensor([row["time/tokens_per_second"] for row in rows if "train/loss" in row]).median().item()
    step *= 8 * 128 if name == "wide" else 4 * 512
    seconds = float(re.findall(r"steps of ([\d.e-]+) s", planned)[0])
    mib = float(re.findall(r"measured +([\d,.]+)", planned)[0].replace(",", ""))
    print(f"{name}: a step takes {seconds:.3f} s planned, {step:.3f} s run; {mib:.0f} MiB planned, {memory:.0f} MiB run\n{ran}")
    assert mib == pytest.approx(memory, rel=0.15)
    assert seconds > 0 and step > 0  # how near they are depends on what else the machine does
