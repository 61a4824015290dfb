"""What a token costs as the text grows: with the cache and without, and whatever room the cache has.

`python -m benchmarks.context_growth`: the SmolLM2-135M shape, one row, float32; a plot beside the results.
"""

from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.decode import SHAPES, bytes_read
from benchmarks.harness import RESULTS, as_row, interleave, store
from model import ModelConfig, Transformer
from model.cache import whole_blocks
from model.decoding import Compiled, warm_up

LENGTHS = (64, 128, 256, 512, 1000)
ROOMS = (128, 1024, 8192)  # slots allocated, of which 64 are filled


def next_token(model: Transformer, length: int, room: int, compile: bool) -> Callable[[], object]:
    """One step of decoding after `length` tokens, as often as it is called."""
    cache = model.new_cache(1, room)
    newest = torch.zeros(1, 1, dtype=torch.long)
    model.features(newest.expand(1, length), cache)
    step = Compiled(model, cache) if compile else lambda tokens: model(tokens, cache)

    def run() -> None:
        cache.cut([length])
        step(newest)

    return run


def whole_text(model: Transformer, length: int) -> Callable[[], object]:
    tokens = torch.zeros(1, length, dtype=torch.long)
    return lambda: model.head(model.features(tokens)[:, -1])


def measure(model: Transformer, compile: bool) -> list[dict[str, Any]]:
    name = "compiled" if compile else "eager"
    by_length = interleave({str(n): next_token(model, n, 1024, compile) for n in LENGTHS}, turns=15)
    by_room = interleave({str(n): next_token(model, 64, n, compile) for n in ROOMS}, turns=51)
    predicted = bytes_read(model, 1, whole_blocks(1000)) / bytes_read(model, 1, whole_blocks(64))
    grown = by_length["1000"].median / by_length["64"].median
    return [
        {**as_row({"cached": name, "by": "length"}, by_length, "64"), "1000 / 64": grown, "1000 / 64, predicted": predicted},
        as_row({"cached": name, "by": "room"}, by_room, str(ROOMS[0])),
    ]


def plot(rows: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        if row["by"] == "length":
            label = f"with the cache, {row['cached']}" if row["cached"] else "without: the whole text again"
            axes.plot(LENGTHS, [1000 * row["seconds"][str(n)]["median"] for n in LENGTHS], marker="o", label=label)
    axes.set(
        xlabel="tokens in the text so far", ylabel="milliseconds a token", yscale="log", title="SmolLM2-135M's shape, float32"
    )
    axes.legend()
    figure.savefig(RESULTS / "context_growth.png", dpi=150)


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model = Transformer(ModelConfig(**SHAPES["smollm2-135m"])).eval()
    compile_seconds = warm_up(model, 1)
    uncached = interleave({str(n): whole_text(model, n) for n in LENGTHS}, turns=3)
    rows = [as_row({"cached": None, "by": "length"}, uncached, "64")]
    rows += [row for compile in (False, True) for row in measure(model, compile)]
    for row in rows:
        print({key: value for key, value in row.items() if key != "seconds"}, flush=True)
    plot(rows)
    print(store("context_growth", rows, {"compile seconds": compile_seconds}))


if __name__ == "__main__":
    main()
