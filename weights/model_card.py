"""The README.md of an exported model: what it is, what it was trained on, how well it did, and how to use it."""

import json
import shlex
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

A decoder-only language model of {parameters:,} parameters in the {family} format: {config.n_layers} layers of width
{config.d_model}, {config.n_heads} heads ({config.kv_heads} of keys and values), a context of {config.context_length} tokens,
a vocabulary of {config.vocab_size}.

{facts}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{title}")
model = AutoModelForCausalLM.from_pretrained("{title}")
ids = tokenizer("Once", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50, do_sample=True)[0]))
```
"""


def model_card(source: Path, title: str, model: Transformer, family: str) -> str:
    facts, blocks = describe_run(source) if source.exists() else ({}, [])
    rows = [f"| {key} | {value.replace('|', '&#124;')} |\n" for key, value in (facts or {"converted from": str(source)}).items()]
    size, facts_table = sum(p.numel() for p in model.parameters()), "".join(["| | |\n|---|---|\n", *rows])
    card = CARD.format(title=title, family=family, config=model.config, parameters=size, facts=facts_table)
    return card + "".join(f"\n## {heading}\n\n```{language}\n{text}\n```\n" for heading, language, text in blocks if text)


def describe_run(source: Path) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """What is known of a checkpoint of ours: facts for the table; blocks with its command and config.yaml."""
    folder = checkpoint.find(source).resolve()
    about, run = checkpoint.read_json(folder / "config.json"), folder.parent.parent
    if about.get("format") != checkpoint.FORMAT:
        return {}, []
    settings = read_text(run / "config.yaml").strip()
    try:
        trained = yaml.safe_load(settings)
    except yaml.YAMLError:
        trained = None
    trained = trained if isinstance(trained, dict) else {}  # a damaged file costs facts, not the export
    rows = [json.loads(line) for line in read_text(run / "metrics.jsonl").splitlines() if line.endswith("}")]
    rows = [row for row in rows if row["step"] <= about.get("step", 0)]  # what the run did later is not in this checkpoint
    facts = {"data": data_of(trained.get("data", {})), "started from": trained.get("init_from")}
    if "tokens" in about:
        facts["tokens"] = f"{about['tokens']:,} seen in {about['step']:,} steps"
    if row := last(rows, "train/loss"):
        facts["training loss"] = f"{row['train/loss']:.4f} (step {row['step']:,})"
    if row := last(rows, "val/loss"):
        quality = f"{row['val/loss']:.4f}, perplexity {row['val/ppl']:.2f}, {row['val/bpb']:.4f} bits per byte"
        facts["validation loss"] = f"{quality} (step {row['step']:,})"
    blocks = [("The command", "bash", command_of(about)), ("The whole configuration", "yaml", settings)]
    return {key: value for key, value in facts.items() if value}, blocks


def last(rows: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    return next((row for row in reversed(rows) if row.get(key) is not None), None)


def command_of(about: dict[str, Any]) -> str:
    """What to type beside train.py to do the same, whatever started it, from wherever."""
    words = shlex.split(about.get("command", ""))
    at = next((i for i, word in enumerate(words) if Path(word).name == "train.py"), None)
    return "" if at is None else shlex.join(["python", "train.py", *words[at + 1 :]])


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def data_of(data: dict[str, Any]) -> str:
    if data.get("name"):
        return f"{data['name']} on the Hugging Face hub"
    if paths := data.get("path"):
        return f"files: {', '.join(paths) if isinstance(paths, list) else paths}"
    return "Python's standard library" if data.get("source") == "stdlib" else ""
