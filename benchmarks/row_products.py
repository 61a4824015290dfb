"""What bounds decoding at batch 1: a token multiplies one row with every matrix of the model. `python -m benchmarks.row_products`
times those products alone, by the library and as the compiler writes them, beside reading the same bytes and beside whole steps.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode import PROMPT, SHAPES
from benchmarks.harness import as_row, interleave, store
from model import ModelConfig, Transformer
from model.decoding import Compiled, matrix_vector


def stepping(model: Transformer, compile: bool) -> Callable[[], object]:
    """One more token after PROMPT of them, as often as it is called."""
    cache, one = model.new_cache(1, 2 * PROMPT), torch.zeros(1, 1, dtype=torch.long)
    model(torch.zeros(1, PROMPT, dtype=torch.long), cache)
    step = Compiled(model, cache) if compile else lambda tokens: model(tokens, cache)

    def run() -> None:
        cache.cut([PROMPT])
        step(one)

    return run


def products(weights: list[Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
    rows = {w.size(1): torch.ones(1, 1, w.size(1), dtype=w.dtype) for w in weights}
    return lambda: [multiply(rows[w.size(1)], w) for w in weights]


@torch.no_grad()
def measure(name: str, dtype: torch.dtype) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPES[name])).eval().to(dtype)
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    memory = torch.ones(sum(w.nbytes for w in weights) // 4)
    contestants = {
        "reading": lambda: memory.sum(),
        "products, library": products(weights, F.linear),
        "products, compiled": products(weights, torch.compile(matrix_vector, dynamic=False)),
        "step, eager": stepping(model, False),
        "step, compiled": stepping(model, True),
    }
    return as_row(
        {"shape": name, "dtype": str(dtype).removeprefix("torch.")}, interleave(contestants, turns=15, warmup=3), "reading"
    )


def main() -> None:
    rows = []
    for name in ("gpt2-124m", "smollm2-135m"):
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(measure(name, dtype))
            print({key: value for key, value in rows[-1].items() if key != "seconds"}, flush=True)
    print(store("row_products", rows))


if __name__ == "__main__":
    main()
