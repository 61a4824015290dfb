"""A model of ours as a Hugging Face folder: `python -m weights.export RUN_OR_CHECKPOINT OUT`.

GPT-2's format or one of the Llama family's, whichever expresses the architecture. Biases that the format has and the
model has not are written as zeros.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.foreign_tokenizer import ForeignTokenizer
from data.tokenizer import TiktokenTokenizer, Tokenizer
from model import ModelConfig, Transformer
from weights import load
from weights.checkpoint import new_folder
from weights.export_tokenizer import save_tokenizer
from weights.huggingface import as_theirs, skeleton
from weights.huggingface_config import GIVEN, filled_in, from_model_config, to_model_config
from weights.model_card import model_card


def export(source: str | Path, out: Path) -> str:
    """Write the folder `out`, complete or not at all; returns the format. Raises ValueError naming a key that no format has."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: choose another name, or remove it")
    model, tokenizer = load(source)
    family = choose_family(model.config)
    described = from_model_config(model.config, family)
    with new_folder(out) as folder:
        save_file(to_theirs(model, to_model_config(described), family), folder / "model.safetensors", {"format": "pt"})
        if isinstance(tokenizer, TiktokenTokenizer):
            save_tokenizer(tokenizer, folder, model.config.context_length)
        else:
            tokenizer.save(folder)  # in the format it came in
        ids = special_ids(tokenizer)
        dtype = str(model.embed.weight.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps({**described, **ids, "torch_dtype": dtype}, indent=2) + "\n")
        # Ids that only pad the head are never chosen here: nor should they be there.
        padding = list(range(tokenizer.n_vocab, model.embed.num_embeddings))
        generation = {**ids, **({"suppress_tokens": padding} if padding else {})}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        (folder / "README.md").write_text(model_card(Path(source), out.name, model, family))
    return family


def choose_family(config: ModelConfig) -> str:
    """The first format that has all the architecture needs, or a ValueError with what the nearest one lacks."""
    lacking = {family: lacks(family, config) for family in GIVEN}
    family = min(lacking, key=lambda family: len(lacking[family]))
    if keys := lacking[family]:
        raise ValueError(f"{', '.join(keys)} cannot be exported: no Hugging Face format has it (the nearest is {family}'s)")
    return family


def lacks(family: str, config: ModelConfig) -> list[str]:
    """The keys whose values come back changed from this family's config.json."""
    try:
        said = filled_in(to_model_config(from_model_config(config, family)))
    except ValueError:  # numbers that only fit without RoPE
        return [f"model.position={config.position}"]
    meant = filled_in(config)
    keys = [key for key in meant if said[key] != meant[key] and not (said[key] is True and key.endswith("bias"))]
    without = {"dropout", "zero_init"} | ({"rope_theta", "rope_scaling"} if config.position != "rope" else set())
    if family == "llama" and config.d_model % config.n_heads:
        keys.append("head_dim")  # transformers' own rule
    return [f"model.{key}={meant[key]}" for key in keys if key not in without]


def to_theirs(model: Transformer, config: ModelConfig, family: str) -> dict[str, Tensor]:
    """The tensors of a model of this family that computes what ours does; `config` is ours as read back from the family's."""
    ours = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in skeleton(config).named_parameters():
        if name not in ours:
            ours[name] = torch.zeros(p.shape, dtype=model.embed.weight.dtype)
    return {name: view.contiguous() for name, view in as_theirs(ours, config, family).items()}


def special_ids(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """Text begins after end-of-text here; a foreign tokenizer may have a token of its own for that, and for padding."""
    ids: dict[str, int | list[int]] = {"eos_token_id": tokenizer.ends if len(tokenizer.ends) > 1 else tokenizer.end_of_text}
    for name in ("bos_token", "pad_token"):
        own = tokenizer.named(name) if isinstance(tokenizer, ForeignTokenizer) else None
        ids[f"{name}_id"] = tokenizer.end_of_text if own is None else own
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a run, or one of its checkpoints, as a Hugging Face folder.")
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder that does not exist yet")
    given = parser.parse_args()
    try:
        family = export(given.source, given.out)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    size = sum(path.stat().st_size for path in given.out.iterdir())
    print(f"{given.out}: {family} format, {size / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
