"""Generation against transformers' `generate`: the same weights, dtype, prompt and greedy tokens, 64 in and 128 out.

`python -m benchmarks.decode [SHAPE ...]`, by default all of SHAPES, each into results/decode-<shape>.json.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.harness import as_row, interleave, store
from model import ModelConfig, Sampling, Transformer, generate
from model.decoding import warm_up
from weights.export import choose_family, to_theirs
from weights.huggingface_config import from_model_config, to_model_config


def preset(name: str) -> dict[str, Any]:
    return {str(key): value for key, value in OmegaConf.load(f"configs/model/{name}.yaml").items()}


PROMPT, NEW = 64, 128
SHAPES: dict[str, dict[str, Any]] = {
    "default": {**preset("small"), "vocab_size": 4096},
    "gpt2-124m": preset("gpt2"),
    "smollm2-135m": {
        **{"vocab_size": 49152, "context_length": 8192, "n_layers": 30, "d_model": 576, "d_ff": 1536},
        **{"n_heads": 9, "n_kv_heads": 3, "rope_theta": 1e5},
    },
}
THEIRS, EAGER, COMPILED = "transformers", "sprout", "sprout --compile"


def pair(shape: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[Transformer, Any]:
    """A model with random weights, and the same one in transformers."""
    torch.manual_seed(0)
    ours = Transformer(ModelConfig(**shape)).eval()
    family = choose_family(ours.config)
    described = from_model_config(ours.config, family)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described)).eval()
    theirs.load_state_dict(to_theirs(ours, to_model_config(described), family), strict=False)
    theirs.tie_weights()
    theirs.generation_config.eos_token_id = None  # every text gets all its tokens
    return ours.to(device, dtype), theirs.to(device, dtype)


def continuations(ours: Transformer, theirs: Any, prompts: torch.Tensor) -> dict[str, Callable[[int], list[list[int]]]]:
    """How each of the three continues the prompts (b, t) by n tokens."""
    rows, greedy = prompts.tolist(), Sampling(temperature=0)
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "pad_token_id": 0}
    return {
        THEIRS: lambda n: theirs.generate(prompts, max_new_tokens=n, **options)[:, prompts.size(1) :].tolist(),
        EAGER: lambda n: generate(ours, rows, n, sampling=greedy),
        COMPILED: lambda n: generate(ours, rows, n, sampling=greedy, compile=True),
    }


def read_bandwidth(device: str = "cpu") -> float:
    """Bytes a second that summing 1 GB reads, the best of ten."""
    memory = torch.ones(2**28, device=device)
    return memory.nbytes / min(interleave({"sum": lambda: memory.sum()}, turns=1)["sum"].low for _ in range(10))


def bytes_read(model: Transformer, rows: int, length: float) -> float:
    """By one step: every weight, but not an embedding that is no head as well, and keys and values of `length` tokens a row."""
    weights = sum(p.nbytes for p in model.parameters())
    if not model.config.tie_embeddings:
        weights -= model.embed.weight.nbytes
    config, size = model.config, model.embed.weight.element_size()
    return weights + rows * length * 2 * config.n_layers * config.kv_heads * config.head_width * size


def measure(shape: dict[str, Any], dtype: torch.dtype, rows: int, bandwidth: float, device: str = "cpu") -> dict[str, Any]:
    torch.compiler.reset()
    ours, theirs = pair(shape, dtype, device)
    prompts = torch.randint(0, shape["vocab_size"], (rows, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    compile_seconds = warm_up(ours, rows)
    run = continuations(ours, theirs, prompts)
    for warm in run.values():
        warm(3)
    texts: dict[str, list[list[int]]] = {}

    def whole(name: str) -> Callable[[], None]:
        return lambda: texts.update({name: run[name](NEW)})

    prefills = interleave({name: partial(run[name], 1) for name in (THEIRS, EAGER)}, turns=3, warmup=0)
    wholes = interleave({name: whole(name) for name in run}, turns=5 if rows == 1 else 3, warmup=0)
    step = {name: (wholes[name].median - prefills.get(name, prefills[EAGER]).median) / (NEW - 1) for name in run}
    needed = bytes_read(ours, rows, PROMPT + NEW / 2)
    return {
        **as_row({"dtype": str(dtype).removeprefix("torch."), "batch": rows}, wholes, THEIRS),
        "prefill": as_row({}, prefills, THEIRS),
        "tokens a second, decoding": {name: round(rows / seconds, 1) for name, seconds in step.items()},
        "share of the read bandwidth": {name: round(needed / seconds / bandwidth, 3) for name, seconds in step.items()},
        "compile seconds": compile_seconds,
        "tokens equal to transformers'": {name: round(equal(text, texts[THEIRS]), 3) for name, text in texts.items()},
    }


def equal(a: list[list[int]], b: list[list[int]]) -> float:
    pairs = [x == y for ours, theirs in zip(a, b, strict=True) for x, y in zip(ours, theirs, strict=True)]
    return sum(pairs) / len(pairs)


def main(shapes: list[str]) -> None:
    logging.set_verbosity_error()
    for shape in shapes or SHAPES:
        bandwidth, rows = read_bandwidth(), []
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (1, 8):
                rows.append(measure(SHAPES[shape], dtype, batch, bandwidth))
                path = store(f"decode-{shape}", rows, {"read bandwidth, GB/s": round(bandwidth / 1e9, 1)})
                told = {key: value for key, value in rows[-1].items() if key not in ("seconds", "prefill")}
                print(shape, json.dumps(told), flush=True)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
