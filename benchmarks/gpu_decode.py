"""On one CUDA GPU: decoding a 1.5B shape in bfloat16 against the memory's bandwidth and transformers, and exactness there.

`python -m benchmarks.gpu_decode`, meant for four minutes. `--check` runs the same on small shapes, on whatever device there is.
"""

import json
import sys
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.decode import measure, read_bandwidth
from benchmarks.harness import store
from model import ModelConfig, Sampling, Transformer, generate
from model.config import POSITIONS

SHAPE: dict[str, Any] = {
    **{"vocab_size": 151936, "context_length": 4096, "n_layers": 28, "d_model": 1536, "d_ff": 8960},
    **{"n_heads": 12, "n_kv_heads": 2, "qkv_bias": True},
}
SMALL: dict[str, Any] = {"vocab_size": 300, "context_length": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 64}


def exact(position: str, sampling: Sampling, device: str) -> bool:
    """Do compiled, cached and uncached decoding write the same, rows of unequal length, through windows that slide?"""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SMALL, "context_length": 150}, position=position)).to(device).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() > 1 else 1)  # scores far apart
    prompts = [torch.randint(0, 300, (n,)).tolist() for n in (100, 3, 60)]
    how: list[dict[str, bool]] = [{"compile": True}, {}, {"use_cache": False}]
    texts = [generate(model, prompts, 120, sampling=sampling, **options) for options in how]
    return texts[0] == texts[1] == texts[2]


def main(check: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not check:
        return print("no CUDA GPU: nothing to measure")
    logging.set_verbosity_error()
    samplings = {"greedy": Sampling(temperature=0), "sampled": Sampling(top_k=20, top_p=0.9, repetition_penalty=1.2)}
    kinds = POSITIONS[:1] if check else POSITIONS
    exactness = {f"{position}, {name}": exact(position, samplings[name], device) for position in kinds for name in samplings}
    print(exactness, flush=True)
    bandwidth, rows = read_bandwidth(device), []
    for batch in (1, 8):
        rows.append(measure(SMALL if check else SHAPE, torch.bfloat16, batch, bandwidth, device))
        print(json.dumps(rows[-1]), flush=True)
    if not check:
        print(store("gpu_decode", rows, {"read bandwidth, GB/s": round(bandwidth / 1e9), "exact": exactness}))


if __name__ == "__main__":
    main(check=sys.argv[1:] == ["--check"])
