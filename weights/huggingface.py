"""Models from safetensors files: ours, and those of GPT-2 and the Llama family (Llama, Mistral, Qwen2, Qwen3).

What does not fit is refused by name before any weight is read, and nothing is unpickled.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from model import ModelConfig, Transformer
from model.positions import make_position
from weights.checkpoint import FORMAT, Stored, bare, read_json, stored
from weights.huggingface_config import read_config

# Ours, GPT-2's, the Llama family's; "*" is the number of the block.
# a|b: theirs, stacked by rows, are our one. ^T: stored transposed (Conv1D is a Linear turned round).
NAMES = {
    "embed": ("wte", "embed_tokens"),
    "position.table": ("wpe", None),
    "blocks.*.attention_norm": ("h.*.ln_1", "layers.*.input_layernorm"),
    "blocks.*.attention.qkv": ("h.*.attn.c_attn ^T", "layers.*.self_attn.q_proj|k_proj|v_proj"),
    "blocks.*.attention.q_norm": (None, "layers.*.self_attn.q_norm"),
    "blocks.*.attention.k_norm": (None, "layers.*.self_attn.k_norm"),
    "blocks.*.attention.out": ("h.*.attn.c_proj ^T", "layers.*.self_attn.o_proj"),
    "blocks.*.mlp_norm": ("h.*.ln_2", "layers.*.post_attention_layernorm"),
    "blocks.*.mlp.up": ("h.*.mlp.c_fc ^T", "layers.*.mlp.gate_proj|up_proj"),
    "blocks.*.mlp.down": ("h.*.mlp.c_proj ^T", "layers.*.mlp.down_proj"),
    "norm": ("ln_f", "norm"),
    "head": ("lm_head", "lm_head"),
}
HEAD = "lm_head.weight"  # alone without the prefix of all others (which files of a bare GPT2Model or LlamaModel lack)
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.")  # masks and tables that older files carry along
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WithoutDraws(TorchFunctionMode):
    """Weights need no random values; on the meta device drawing them would load much of torch's compiler, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **kwargs)


def skeleton(config: ModelConfig) -> Transformer:
    """The model's names and shapes, on the meta device."""
    with torch.device("meta"), WithoutDraws():
        return Transformer(config)


def read_model(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Transformer:
    """The model of a folder; its dtype is that of the stored embedding unless told otherwise.

    No memory is touched before a weight is read into it, and the largest come first: the peak is the model's own size.
    """
    family, config = read_config(folder)
    model, found = skeleton(config), find_weights(folder, family)
    wanted = as_theirs(dict(model.named_parameters()), config, family)
    embedding = next(iter(wanted))
    tied_head = config.tie_embeddings and HEAD in found  # stored all the same
    if tied_head:
        wanted[HEAD] = wanted[embedding]
    check(wanted, found, folder)
    if tied_head and not torch.equal(found[HEAD].read(), found[embedding].read()):
        raise ValueError(f"{folder}: {HEAD} is not the embedding, though tie_word_embeddings is true: set it to false")
    dtype = dtype or DTYPES[found[embedding].dtype]
    weights = {name: torch.empty(p.shape, device=device, dtype=dtype) for name, p in model.named_parameters()}
    for name, view in sorted(as_theirs(weights, config, family).items(), key=lambda item: -item[1].numel()):
        view.copy_(found[name].read())
    model.position = make_position(config).to(device)  # some kinds compute a table
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    return model


def find_weights(folder: Path, family: str) -> dict[str, Stored]:
    """All tensors of model.safetensors, or of the shards that its index lists, under their full names."""
    index, files = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"{index} lists no weights (weight_map): fetch it again")
        files = set(map(str, listed.values()))
    tensors = {name: tensor for file in sorted(files) for name, tensor in stored(folder / file).items()}
    return {full_name(name, family): tensor for name, tensor in tensors.items() if not BUFFERS.search(name)}


def check(wanted: dict[str, Tensor], found: dict[str, Stored], folder: Path) -> None:
    """Refuse files whose weights are not those of the model, naming them."""
    shapes = {name: (found[name].shape, list(view.shape)) for name, view in wanted.items() if name in found}
    problems = {
        "lacks weights": sorted(wanted.keys() - found.keys()),
        "has unknown weights": sorted(found.keys() - wanted.keys()),
        "has weights of another shape": [f"{name} {a} instead of {b}" for name, (a, b) in shapes.items() if a != b],
        "has weights of another kind": [f"{name} ({at.dtype})" for name, at in found.items() if at.dtype not in DTYPES],
    }
    for problem, names in problems.items():
        if names:
            more = f" ... ({len(names)} in all)" if len(names) > 3 else ""
            raise ValueError(f"{folder} {problem}: {', '.join(names[:3])}{more}; its config.json describes another model")


def as_theirs(weights: Mapping[str, Tensor], config: ModelConfig, family: str) -> dict[str, Tensor]:
    """Our weights under the names of a family (or of our own format), as views: read to save a model, written to load one.

    A tied head is no weight of its own, on either side.
    """
    stacked = {
        "blocks.*.attention.qkv": [n * config.head_width for n in (config.n_heads, config.kv_heads, config.kv_heads)],
        "blocks.*.mlp.up": [config.hidden_width, config.hidden_width],
    }
    views = {}
    for ours, weight in weights.items():
        module, kind = ours.rsplit(".", 1)
        number = re.search(r"\d+", module)
        module = re.sub(r"\d+", "*", module)
        named = module if family == FORMAT else NAMES[module][family != "gpt2"]
        assert named is not None, f"{family} has no {module}"
        named, mark, _ = named.replace("*", number[0] if number else "").partition(" ^T")
        stem, names = named[: named.rfind(".") + 1], named[named.rfind(".") + 1 :].split("|")
        parts = weight.split(stacked[module]) if len(names) > 1 else [weight]
        for name, part in zip(names, parts, strict=True):
            views[full_name(f"{stem}{name}.{kind}", family)] = part.T if mark and kind == "weight" else part
    return views


def full_name(name: str, family: str) -> str:
    """The name in a file of a whole model, saved from within no wrapper."""
    if family == FORMAT:
        return bare(name)
    prefix = "transformer." if family == "gpt2" else "model."
    return name if name == HEAD or name.startswith(prefix) else prefix + name
