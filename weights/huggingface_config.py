"""Hugging Face's config.json and our ModelConfig, in both directions.

What is not supported is refused by name. Dropout is not read: it belongs to a training run, not to an architecture.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model import ModelConfig

# Ours, GPT-2's, the Llama family's.
KEYS = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "context_length": ("n_positions", "max_position_embeddings"),
    "n_layers": ("n_layer", "num_hidden_layers"),
    "n_heads": ("n_head", "num_attention_heads"),
    "n_kv_heads": (None, "num_key_value_heads"),
    "d_model": ("n_embd", "hidden_size"),
    "d_ff": ("n_inner", "intermediate_size"),
    "head_dim": (None, "head_dim"),
    "norm_eps": ("layer_norm_epsilon", "rms_norm_eps"),
    "bias": (None, "attention_bias"),
    "mlp_bias": (None, "mlp_bias"),
    "tie_embeddings": ("tie_word_embeddings", "tie_word_embeddings"),
}
# What a family is without saying so in its config.json.
GIVEN: dict[str, dict[str, Any]] = {
    "gpt2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
    "llama": {},
    "mistral": {"bias": False, "mlp_bias": False},
    "qwen2": {"bias": False, "qkv_bias": True, "mlp_bias": False},
    "qwen3": {"qk_norm": True, "mlp_bias": False},
}
# What a config.json means when it leaves a key out. None: our own default, derived from the other numbers.
LLAMA: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "llama": LLAMA,
    "mistral": {**LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**LLAMA, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {**LLAMA, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
# The values that we support of keys that change the computation, where a config.json has them.
ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
# Theirs and ours: the numbers of Llama 3's stretched RoPE.
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context_length",
}


def read_config(folder: Path) -> tuple[str, ModelConfig]:
    """The family (Hugging Face's model_type) and the architecture that a folder's config.json describes."""
    path = folder / "config.json"
    try:
        described = json.loads(path.read_text())
        assert isinstance(described, dict)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {folder} is no Hugging Face model") from None
    except (ValueError, AssertionError):
        raise ValueError(f"{path} is not a JSON object: fetch it again") from None
    try:
        return str(described.get("model_type")), to_model_config(described)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def to_model_config(described: dict[str, Any]) -> ModelConfig:
    """Theirs -> ours, or a ValueError that names what we don't support."""
    family = described.get("model_type")
    if family not in GIVEN:
        raise ValueError(f"model_type={family} is not supported, only {', '.join(GIVEN)}")
    described = {**DEFAULTS[family], **described}
    refuse_unsupported(described)
    keys = keys_of(family)
    if missing := [theirs for theirs in keys.values() if theirs not in described]:
        raise ValueError(f"{', '.join(missing)} is missing")
    values = {ours: described[theirs] for ours, theirs in keys.items()}
    if family != "gpt2":
        values["rope_theta"], values["rope_scaling"] = rope(described)
    return ModelConfig(**{**values, **GIVEN[family]})


def keys_of(family: str) -> dict[str, str]:
    column = 0 if family == "gpt2" else 1
    return {ours: theirs for ours, both in KEYS.items() if (theirs := both[column]) and ours not in GIVEN[family]}


def refuse_unsupported(described: dict[str, Any]) -> None:
    only = {**ONLY, "sliding_window": (None,)} if described["model_type"] == "mistral" else ONLY
    for key, values in only.items():
        if key in described and described[key] not in values:
            raise ValueError(f"{key}={described[key]} is not supported, only {' or '.join(map(str, values))}")
    if others := set(described.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layer_types has {', '.join(sorted(others))}, only full_attention is supported")


def rope(described: dict[str, Any]) -> tuple[float, dict[str, float] | None]:
    """theta and scaling: both in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling` (before)."""
    found = described.get("rope_parameters") or described.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", described["rope_theta"])
    if found.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor={found['partial_rotary_factor']} is not supported, only 1")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind} is not supported, only default or llama3")
    if missing := [key for key in SCALING if key not in found]:
        raise ValueError(f"rope_scaling lacks {', '.join(missing)}")
    return theta, {ours: found[theirs] for theirs, ours in SCALING.items()}


def from_model_config(config: ModelConfig, family: str) -> dict[str, Any]:
    """Ours -> theirs, as far as the family can say it: `to_model_config` of the answer tells what it says."""
    values = filled_in(config)
    described = {theirs: values[ours] for ours, theirs in keys_of(family).items()}
    described["model_type"] = family
    if family == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
        return {**described, **dropout, "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
    described["architectures"] = [f"{family.capitalize()}ForCausalLM"]
    described |= {"hidden_act": "silu", "attention_dropout": config.dropout}
    described["rope_theta"] = config.rope_theta  # and rope_scaling: the older spelling, which all versions read
    if config.rope_scaling is not None:
        numbers = {theirs: config.rope_scaling[ours] for theirs, ours in SCALING.items()}
        described["rope_scaling"] = {"rope_type": "llama3", **numbers}
    if family == "mistral":
        described["sliding_window"] = None
    return described


def filled_in(config: ModelConfig) -> dict[str, Any]:
    """The config's values, with those that are derived from others in place of None."""
    values = asdict(config)
    values |= {"n_kv_heads": config.kv_heads, "head_dim": config.head_width, "d_ff": config.hidden_width}
    for key in ("qkv_bias", "mlp_bias"):
        values[key] = config.bias if values[key] is None else values[key]
    return values
