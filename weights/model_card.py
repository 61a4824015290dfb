"""The README.md of an exported model: what it is, what it was trained on, how well it did, and how to use it."""

import json
from pathlib import Path
from typing import Any

import yaml

from model import Transformer
from weights import checkpoint

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [sprout]
---

# {title}

A decoder-only language model of {parameters:,} parameters in the {family} format: {n_layers} layers of width {d_model},
{n_heads} heads ({kv_heads} of keys and values), a context of {context_length} tokens, a vocabulary of {vocab_size}.

{facts}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{title}")
model = AutoModelForCausalLM.from_pretrained("{title}")
ids = tokenizer("Once", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50, do_sample=True)[0]))
```
{settings}"""


def model_card(source: Path, title: str, model: Transformer, family: str) -> str:
    config = model.config
    rows, settings = describe_run(source) if source.exists() else ({}, "")
    rows = rows or {"converted from": str(source)}
    return CARD.format(
        title=title,
        family=family,
        parameters=sum(p.numel() for p in model.parameters()),
        n_layers=config.n_layers,
        d_model=config.d_model,
        n_heads=config.n_heads,
        kv_heads=config.kv_heads,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        facts="| | |\n|---|---|\n" + "".join(f"| {key} | {value.replace('|', '&#124;')} |\n" for key, value in rows.items()),
        settings=f"\n## The whole configuration\n\n```yaml\n{settings.strip()}\n```\n" if settings else "",
    )


def describe_run(source: Path) -> tuple[dict[str, str], str]:
    """What is known of a checkpoint of ours: facts for the table, and the run's config.yaml. Both may be empty."""
    folder = checkpoint.find(source).resolve()
    if not checkpoint.is_ours(folder):
        return {}, ""
    about, run = checkpoint.read_config(folder), folder.parent.parent
    settings = read_text(run / "config.yaml")
    trained: dict[str, Any] = yaml.safe_load(settings) or {}
    metrics: dict[str, Any] = {}
    for line in read_text(run / "metrics.jsonl").splitlines():
        row = json.loads(line)
        if row["step"] <= about.get("step", 0):  # what the run did later is not in this checkpoint
            metrics |= row | {f"{key} at": row["step"] for key in row}
    facts = {"data": data_of(trained.get("data", {})), "started from": trained.get("init_from")}
    if "tokens" in about:
        facts["tokens"] = f"{about['tokens']:,} seen in {about['step']:,} steps"
    if "train/loss" in metrics:
        facts["training loss"] = f"{metrics['train/loss']:.4f} (step {metrics['train/loss at']:,})"
    if "val/loss" in metrics:
        facts["validation loss"] = (
            f"{metrics['val/loss']:.4f}, perplexity {metrics['val/ppl']:.2f}, {metrics['val/bpb']:.4f} bits per byte "
            f"(step {metrics['val/loss at']:,})"
        )
    if "command" in about:
        facts["command"] = f"`python {about['command']}`"
    return {key: value for key, value in facts.items() if value}, settings


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def data_of(data: dict[str, Any]) -> str:
    if data.get("name"):
        return f"{data['name']} on the Hugging Face hub"
    if paths := data.get("path"):
        return f"files: {', '.join(paths) if isinstance(paths, list) else paths}"
    return "Python's standard library" if data.get("source") == "stdlib" else ""
