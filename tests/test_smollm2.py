"""A real model: SmolLM2-135M-Instruct, loaded here and by `transformers`. See tests/smollm2.py for where it comes from."""

import argparse
import inspect
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

import sample
from model import Sampling, Transformer, generate
from tests import smollm2
from tests.foreign_models import greedy
from tests.tiny_runs import finished, metrics
from weights import load
from weights.export import export

pytestmark = pytest.mark.real_model
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.build()


@pytest.fixture(scope="module")
def ours(folder):
    return load(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ids(ours) -> torch.Tensor:
    """The first 4096 tokens of a program and its comments."""
    return torch.tensor(ours[1].encode(inspect.getsource(argparse))[:4096])


def test_logits_over_512_tokens(ours, theirs, ids):
    with torch.no_grad():
        expected = theirs(ids[None, :512]).logits
        difference = (ours[0](ids[None, :512]) - expected).abs().max().item()
    print(f"largest difference of {expected.numel():,} logits: {difference:.1e}, of values up to {expected.abs().max():.0f}")
    assert difference < 1e-3


def test_greedy_text_cached_and_uncached(ours, theirs):
    model, tokenizer = ours
    prompt = [tokenizer.encode(PROMPT)]
    expected = greedy(theirs, torch.tensor(prompt), 40, eos_token_id=None)
    assert len(expected[0]) == 40 and tokenizer.decode(expected[0]).startswith(" Paris")
    for use_cache in (True, False):
        assert generate(model, prompt, 40, sampling=Sampling(temperature=0), use_cache=use_cache) == expected


def perplexity(logits_of, ids: torch.Tensor, window: int = 1024) -> float:
    losses = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, window):
            targets = ids[start + 1 : start + 1 + window]
            logits = logits_of(ids[None, start : start + len(targets)])[0]
            losses.append(F.cross_entropy(logits, targets, reduction="none"))
    return math.exp(torch.cat(losses).double().mean())


def test_perplexity_of_a_longer_text(ours, theirs, ids):
    found, expected = perplexity(ours[0], ids), perplexity(lambda tokens: theirs(tokens).logits, ids)
    print(f"perplexity of {len(ids)} tokens: {found:.6f} here, {expected:.6f} by transformers")
    assert 1.5 < expected < 20
    assert abs(found / expected - 1) < 1e-5


def test_its_tokenizer_is_its_own(ours, folder):
    tokenizer = ours[1]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (inspect.getsource(json), "Crème brûlée, 12345 它們 🙂\r\n\t x"):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_of_text == theirs.eos_token_id
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert tokenizer.encode(chat, special=True) == theirs(chat)["input_ids"]
    assert tokenizer.encode("<|im_start|>") != tokenizer.encode("<|im_start|>", special=True)


def test_in_out_in_is_exact_to_the_bit(ours, folder, tmp_path):
    export(folder, tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert (
            json.loads((tmp_path / "out" / "config.json").read_text())[name]
            == json.loads((folder / "config.json").read_text())[name]
        )
    model, tokenizer = load(tmp_path / "out")
    assert isinstance(model, Transformer) and model.config == ours[0].config
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours[0].state_dict().items())
    assert tokenizer.encode(PROMPT) == ours[1].encode(PROMPT)


def verses(n: int) -> str:
    """Text that a model of English learns something of within a few steps."""
    draw = random.Random(0)
    things = ["kettle", "lantern", "otter", "violin", "teapot", "ladder"]
    return "".join(f"Verse {i}: the {draw.choice(things)} sings to the {draw.choice(things)} at dawn.\n" for i in range(n))


def test_finetuned_sampled_and_exported(folder, tmp_path, capsys):
    """What its users do with it, from end to end."""
    (tmp_path / "verses.txt").write_text(verses(150))
    run, data = tmp_path / "run", [f"data.path={tmp_path / 'verses.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    shape = ["model.context_length=64", "batch_size=2", "steps=8", "schedule.warmup_steps=2", "eval_windows=4"]
    where = ["device=cpu", "dtype=float32", "wandb.mode=disabled", "keep_checkpoints=1"]
    arguments = ["experiment=finetune", f"init_from={folder}", *data, *shape, *where]
    before = re.search(r"validation loss ([\d.]+)", finished(*arguments, "eval_only=true").out)
    finished(*arguments, f"run_dir={run}")
    losses = [float(before[1]), *(row["val/loss"] for row in metrics(run) if "val/loss" in row)]
    print("held-out loss:", " ".join(f"{loss:.3f}" for loss in losses))
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0]

    model, tokenizer = load(run)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Verse 200: the otter sings to the"
    ids = theirs(text)["input_ids"]
    assert tokenizer.encode(text) == ids
    capsys.readouterr()
    sampled = sample.main(["--checkpoint", str(run), "--prompt", text, "--max-new-tokens", "8", "--temperature", "0"])
    said = capsys.readouterr().out
    expected = generate(model, [ids], 8, sampling=Sampling(temperature=0), stop_ids=tokenizer.ends)[0]
    assert (sampled, said) == (0, text + theirs.decode(expected) + "\n") and "at dawn" in said

    export(run, tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again(text)["input_ids"] == ids and again.eos_token_id == tokenizer.end_of_text
    held_out = torch.tensor([theirs(verses(150))["input_ids"][-64:]])
    with torch.no_grad():
        difference = (exported(held_out).logits - model(held_out)).abs().max().item()
    print(f"largest difference of logits: {difference:.1e}")
    assert difference < 1e-4
    assert greedy(exported, torch.tensor([ids]), 8)[0] == expected
