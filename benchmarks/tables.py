"""The tables of README.md, drawn from the files in results/: `python -m benchmarks.tables` writes them in, between
`<!-- table: name -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import RESULTS

README = Path(__file__).parent.parent / "README.md"
Row = list[str]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def decode() -> Iterator[Row]:
    """Tokens a second and, in brackets, whole texts a second as a multiple of transformers'."""
    names = ("transformers", "sprout", "sprout --compile")
    yield ["shape", "dtype", "batch", *names, "of the bandwidth", "compiling", "prefill"]
    for path in sorted(RESULTS.glob("decode-*.json")):
        for row in load(path.stem)["rows"]:
            ratios, speed, seconds = (
                row["times as fast as transformers"],
                row["tokens a second, decoding"],
                row["compile seconds"],
            )
            yield [
                path.stem.removeprefix("decode-"),
                row["dtype"],
                str(row["batch"]),
                *(f"{speed[name]:.0f} ({ratios[name]:.2f}x)" for name in names),
                f"{row['share of the read bandwidth'][names[-1]]:.0%}",
                "no" if seconds is None else f"{seconds:.0f} s",
                f"{row['prefill']['times as fast as transformers']['sprout']:.2f}x",
            ]


def row_products() -> Iterator[Row]:
    names = ("reading", "products, library", "products, compiled", "step, eager", "step, compiled")
    yield ["milliseconds a token, batch 1", "dtype", *names]
    for row in load("row_products")["rows"]:
        yield [row["shape"], row["dtype"], *(f"{1000 * row['seconds'][name]['median']:.0f}" for name in names)]


def context_growth() -> Iterator[Row]:
    lengths = ("64", "128", "256", "512", "1000")
    yield ["milliseconds a token, after", *lengths, "1000 / 64", "by bytes read"]
    for row in load("context_growth")["rows"]:
        if row["by"] == "length":
            times = {n: 1000 * row["seconds"][n]["median"] for n in lengths}
            name = f"with the cache, {row['cached']}" if row["cached"] else "without"
            predicted = f"{row['1000 / 64, predicted']:.2f}" if row["cached"] else ""
            yield [name, *(f"{times[n]:.0f}" for n in lengths), f"{times['1000'] / times['64']:.2f}", predicted]


def train_step() -> Iterator[Row]:
    yield [
        "one step of training, float32",
        "",
        "milliseconds",
        "times as fast as sprout",
        "in matrix products",
        "of their rate",
        "memory",
    ]
    for row in load("train_step")["rows"]:
        for who, seconds in row["seconds"].items():
            memory = f"{row['bytes at the peak'][who] / 2**30:.2f} GiB" if "bytes at the peak" in row else ""
            shape = f"{row['shape']}, {row['sequences']} x {row['tokens of each']}"
            share = row["share of a matrix product's rate"][who]
            ratio = f"{row['times as fast as sprout'][who]:.2f}"
            products = f"{1000 * row['seconds in matrix products'][who]:.1f}"
            yield [shape, who, f"{1000 * seconds['median']:.1f}", ratio, products, f"{share:.0%}", memory]


def shakespeare() -> Iterator[Row]:
    found = load("shakespeare")
    whole = max(row["steps"] for row in found["rows"] if row["seed"])
    yield ["tiny Shakespeare on this CPU", "steps", "seconds, all included", "loss, whole validation split"]
    for who in ("nanoGPT", "sprout"):
        three = [row for row in found["rows"] if row["who"] == who and row["steps"] == whole]
        losses = sorted(row["loss"] for row in three)
        spread = f"{median(losses):.3f} ({losses[0]:.3f} to {losses[-1]:.3f}, three seeds)"
        yield [who, f"{whole:,}", f"{median(row['seconds'] for row in three):.0f}", spread]
    for row in found["rows"]:
        if row["steps"] != whole:
            yield [row["who"], f"{row['steps']:,}", f"{row['seconds']:.0f}", f"{row['loss']:.3f}"]


def ablations() -> Iterator[Row]:
    found = load("ablations")
    rows = found["rows"]
    yield [f"`experiment=shakespeare_cpu`, {found['steps']:,} steps", "median of three seeds", "lowest to highest", "costs"]
    for row in rows:
        spread = f"{min(row['losses']):.3f} to {max(row['losses']):.3f}"
        yield [row["variant"], f"{row['median']:.3f}", spread, f"{row['median'] - rows[0]['median']:+.3f}"]


def ranks() -> Iterator[Row]:
    yield ["ranks", "parallel", "micro-batches", "memory of a rank, planned", "measured", "sent a step, planned", "measured"]
    for row in load("ranks")["rows"]:
        planned, measured = row["planned"], row["measured"]
        sizes = [f"{part[kind] / 2**20:.0f} MiB" for kind in ("memory", "sent") for part in (planned, measured)]
        yield [str(row["ranks"]), row["parallel"], str(row["micro-batches"]), *sizes]


def scaling() -> Iterator[Row]:
    seconds = load("ranks")["seconds a step"]
    yield ["8 sequences a step, one thread a rank", "milliseconds", "times as fast as 1 rank"]
    for name, time in seconds.items():
        if not name.endswith("fastest"):
            yield [name, f"{1000 * time:.0f}", f"{seconds['1 rank'] / time:.2f}"]


def recompute() -> Iterator[Row]:
    yield ["shape", "activations kept", "recomputed", "memory", "time"]
    for row in load("recompute")["rows"]:
        kept, again = row["bytes"]["kept"], row["bytes"]["recomputed"]
        slower = row["seconds"]["recomputed"]["median"] / row["seconds"]["kept"]["median"]
        yield [row["shape"], f"{kept / 2**20:.0f} MiB", f"{again / 2**20:.0f} MiB", f"{again / kept:.2f}x", f"{slower:.2f}x"]


def finetune() -> Iterator[Row]:
    found = load("finetune")
    texts = list(dict.fromkeys(row["held-out text"] for row in found["rows"]))
    yield [f"{found['model']}: loss (bits per byte) on held-out text", *texts]
    for trained_on in (None, *texts):
        cells = {
            r["held-out text"]: f"{r['loss']:.3f} ({r['bits per byte']:.3f})"
            for r in found["rows"]
            if r["finetuned on"] == trained_on
        }
        name = (
            f"finetuned on {trained_on}, {found['steps']} steps of {found['tokens a step']:,} tokens"
            if trained_on
            else "as it is"
        )
        yield [name, *(cells[text] for text in texts)]


def tokenize_speed() -> Iterator[Row]:
    row = load("tokenize_speed")["rows"][0]
    yield ["tokenising, MB/s", *row["MB/s"]]
    yield [f"{row['vocabulary']}, {row['cores']} cores", *(f"{speed:.1f}" for speed in row["MB/s"].values())]


def plan() -> Iterator[Row]:
    yield ["model", "memory planned", "measured", "time predicted", "measured"]
    for row in load("plan")["rows"]:
        planned, real = row["planned"], row["measured"]
        memory = f"{real['bytes'] / 2**20:,.0f} MiB ({real['bytes'] / planned['bytes'] - 1:+.0%})"
        time = f"{real['seconds']:.0f} s ({real['seconds'] / planned['seconds'] - 1:+.0%})"
        yield [row["model"], f"{planned['bytes'] / 2**20:,.0f} MiB", memory, f"{planned['seconds']:.0f} s", time]


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        decode,
        row_products,
        context_growth,
        train_step,
        shakespeare,
        ablations,
        finetune,
        ranks,
        scaling,
        recompute,
        tokenize_speed,
        plan,
    )
}


def markdown(rows: Iterator[Row]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def filled(text: str) -> str:
    """README.md with each table drawn anew."""
    between = re.compile(r"(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return between.sub(lambda match: f"{match[1]}{markdown(TABLES[match[2]]())}\n", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
