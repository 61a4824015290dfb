"""Models in Hugging Face's formats: GPT-2 and the Llama family (Llama, Mistral, Qwen2, Qwen3), without `transformers`.

From config.json and safetensors, whole or in shards. What is not supported is refused by name before any weight is
read, and nothing is unpickled.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from model import Transformer
from weights.blank import allocate, skeleton
from weights.huggingface_config import read_config
from weights.safetensors_file import DTYPES, StoredTensor, stored_tensors

# Ours, GPT-2's, the Llama family's; "*" is the number of the block.
# Several names: theirs, stacked by rows, are our one. ^T: stored transposed (Conv1D is a Linear turned round).
NAMES = {
    "embed": ("wte", "embed_tokens"),
    "position.table": ("wpe", None),
    "blocks.*.attention_norm": ("h.*.ln_1", "layers.*.input_layernorm"),
    "blocks.*.attention.qkv": (
        "h.*.attn.c_attn ^T",
        "layers.*.self_attn.q_proj layers.*.self_attn.k_proj layers.*.self_attn.v_proj",
    ),
    "blocks.*.attention.q_norm": (None, "layers.*.self_attn.q_norm"),
    "blocks.*.attention.k_norm": (None, "layers.*.self_attn.k_norm"),
    "blocks.*.attention.out": ("h.*.attn.c_proj ^T", "layers.*.self_attn.o_proj"),
    "blocks.*.mlp_norm": ("h.*.ln_2", "layers.*.post_attention_layernorm"),
    "blocks.*.mlp.up": ("h.*.mlp.c_fc ^T", "layers.*.mlp.gate_proj layers.*.mlp.up_proj"),
    "blocks.*.mlp.down": ("h.*.mlp.c_proj ^T", "layers.*.mlp.down_proj"),
    "norm": ("ln_f", "norm"),
    "head": ("lm_head", "lm_head"),
}
HEAD = "lm_head.weight"  # alone without the prefix of all others (which files of a bare GPT2Model or LlamaModel lack)
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.")  # masks and tables that older files carry along


@dataclass(frozen=True)
class Piece:
    """Some rows of one of our parameters, and the tensor of theirs that holds them."""

    ours: str
    rows: slice
    theirs: str
    shape: tuple[int, ...]  # of theirs
    transposed: bool


def pieces(model: Transformer, family: str) -> Iterator[Piece]:
    """Every parameter of ours in terms of theirs. A tied head is no parameter of its own, on either side."""
    config = model.config
    stacked = {
        "blocks.*.attention.qkv": [n * config.head_width for n in (config.n_heads, config.kv_heads, config.kv_heads)],
        "blocks.*.mlp.up": [config.hidden_width, config.hidden_width],
    }
    for ours, parameter in model.named_parameters():
        module, kind = ours.rsplit(".", 1)
        number = re.search(r"\d+", module)
        module = re.sub(r"\d+", "*", module)
        names, mark, _ = (NAMES[module][family != "gpt2"] or "").partition(" ^T")
        transposed = bool(mark) and kind == "weight"
        sizes = stacked[module] if " " in names else [parameter.size(0)]
        start = 0
        for name, size in zip(names.split(), sizes, strict=True):
            theirs = full_name(name.replace("*", number[0] if number else "") + f".{kind}", family)
            shape = (size, *parameter.shape[1:])
            yield Piece(ours, slice(start, start + size), theirs, shape[::-1] if transposed else shape, transposed)
            start += size


def full_name(name: str, family: str) -> str:
    prefix = "transformer." if family == "gpt2" else "model."
    return name if name == HEAD or name.startswith(prefix) else prefix + name


def load(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """A folder's model and its own tokenizer. Raises ValueError, in one line, for what cannot be loaded."""
    return load_model(folder, device, dtype), load_tokenizer(folder)


def load_model(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Transformer:
    """The model alone; its dtype is that of the stored embedding unless told otherwise."""
    family, config = read_config(folder)
    model = skeleton(config)
    wanted = list(pieces(model, family))
    found = find_weights(folder, family)
    check(wanted, found, folder, config.tie_embeddings)
    allocate(model, device, dtype or DTYPES[found[wanted[0].theirs].dtype])
    parameters = dict(model.named_parameters())
    for piece in wanted:
        rows = parameters[piece.ours].detach()[piece.rows]
        found[piece.theirs].copy_to(rows.T if piece.transposed else rows)
    if config.tie_embeddings and HEAD in found:
        head = torch.empty_like(model.embed.weight)
        found[HEAD].copy_to(head)
        if not torch.equal(head, model.embed.weight):
            raise ValueError(f"{folder}: {HEAD} is not the embedding, though tie_word_embeddings is true: set it to false")
    return model


def find_weights(folder: Path, family: str) -> dict[str, StoredTensor]:
    """All tensors of model.safetensors, or of the shards that its index lists, under their full names."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.exists():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is damaged: fetch it again") from None
    found: dict[str, StoredTensor] = {}
    for file in files:
        if not file.exists():
            raise ValueError(missing_file(file))
        found |= {full_name(name, family): tensor for name, tensor in stored_tensors(file).items() if not BUFFERS.search(name)}
    return found


def missing_file(file: Path) -> str:
    pickled = sorted(file.parent.glob("pytorch_model*.bin"))
    if not pickled:
        return f"{file} is missing: fetch it, or choose a model that has it (other formats are not read)"
    return (
        f"{file} is missing, and {pickled[0].name} is a pickle, which can run code when it is read: convert it, if you "
        "trust it, with transformers' AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    )


def check(wanted: list[Piece], found: dict[str, StoredTensor], folder: Path, tied: bool) -> None:
    """Refuse a file whose weights are not those of the model, naming them."""
    shapes = {piece.theirs: piece.shape for piece in wanted}
    required = set(shapes)
    if tied:
        shapes[HEAD] = wanted[0].shape
    wrong = [
        f"{name} {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in found and found[name].shape != shape
    ]
    problems = {
        "lacks weights": sorted(required - found.keys()),
        "has unknown weights": sorted(found.keys() - shapes.keys()),
        "has weights of another shape": wrong,
        "has weights of another kind": [
            f"{name} ({tensor.dtype})" for name, tensor in found.items() if tensor.dtype not in DTYPES
        ],
    }
    for problem, names in problems.items():
        if names:
            more = f" ... ({len(names)} in all)" if len(names) > 3 else ""
            raise ValueError(f"{folder} {problem}: {', '.join(names[:3])}{more}; its config.json describes another model")
