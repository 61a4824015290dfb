"""config.json and ModelConfig, in both directions: that of a checkpoint of ours, and those of Hugging Face's families.

What is not supported is refused by name. Dropout is not read: it belongs to a training run, not to an architecture.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from model import ModelConfig
from model.config import ROPE_SCALING
from weights.checkpoint import FORMAT, read_json

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
    "rope_theta": (None, "rope_theta"),
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
# What a family is when its config.json leaves the key out. None: derived from the other numbers.
LLAMA: dict[str, Any] = {"context_length": 2048, "n_kv_heads": None, "head_dim": None, "norm_eps": 1e-6, "rope_theta": 10000.0}
LLAMA |= {"bias": False, "mlp_bias": False, "tie_embeddings": False}
UNSAID: dict[str, dict[str, Any]] = {
    "gpt2": {"d_ff": None, "norm_eps": 1e-5, "tie_embeddings": True},
    "llama": LLAMA,
    "mistral": {**LLAMA, "context_length": 131072, "n_kv_heads": 8},
    "qwen2": {**LLAMA, "context_length": 32768, "n_kv_heads": 32},
    "qwen3": {**LLAMA, "context_length": 32768, "n_kv_heads": 32, "head_dim": 128},
}
# The values that we support of keys that change the computation, where a config.json has them.
ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
# Ours and theirs: the numbers of Llama 3's stretched RoPE.
SCALING = {key: key for key in ROPE_SCALING} | {"original_context_length": "original_max_position_embeddings"}


def read_config(folder: Path) -> tuple[str, ModelConfig]:
    """The format (ours, or Hugging Face's model_type) and the architecture that a folder's config.json describes."""
    path = folder / "config.json"
    described = read_json(path)
    try:
        if described.get("format") != FORMAT:
            return str(described.get("model_type")), to_model_config(described)
        if unknown := sorted(described["model"].keys() - {field.name for field in fields(ModelConfig)}):
            raise ValueError(f"model keys that this version does not know: {', '.join(unknown)}")
        return FORMAT, ModelConfig(**described["model"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not what it should be ({type(error).__name__}: {error}): fetch it again") from None


def to_model_config(described: dict[str, Any]) -> ModelConfig:
    """Theirs -> ours, or a ValueError that names what we don't support."""
    family = described.get("model_type")
    if family not in GIVEN:
        raise ValueError(f"model_type={family} is not supported, only {', '.join(GIVEN)}")
    # What RoPE needs stands in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling` (before).
    described = described | (described.get("rope_scaling") or described.get("rope_parameters") or {})  # both: as transformers
    described["rope_type"] = described.get("rope_type", described.get("type", "default"))
    refuse_unsupported(described)
    keys, unsaid, scaling = keys_of(family), UNSAID[family], SCALING if described["rope_type"] == "llama3" else {}
    needed = [theirs for ours, theirs in {**keys, **scaling}.items() if ours not in unsaid]
    if missing := [key for key in needed if key not in described]:
        raise ValueError(f"{', '.join(missing)} is missing")
    values: dict[str, Any] = {ours: described.get(theirs, unsaid.get(ours)) for ours, theirs in keys.items()}
    stretched = {ours: described[theirs] for ours, theirs in scaling.items()}
    return ModelConfig(**values, **GIVEN[family], rope_scaling=stretched or None)


def keys_of(family: str) -> dict[str, str]:
    column = 0 if family == "gpt2" else 1
    return {ours: theirs for ours, both in KEYS.items() if (theirs := both[column]) and ours not in GIVEN[family]}


def refuse_unsupported(described: dict[str, Any]) -> None:
    for key, values in ONLY.items():
        if key in described and described[key] not in values:
            raise ValueError(f"{key}={described[key]} is not supported, only {' or '.join(map(str, values))}")
    if described["model_type"] == "mistral" and (window := described.get("sliding_window", 4096)) is not None:
        raise ValueError(f"sliding_window={window} is not supported, only None")
    if others := set(described.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layer_types has {', '.join(sorted(others))}, only full_attention is supported")


def from_model_config(config: ModelConfig, family: str) -> dict[str, Any]:
    """Ours -> theirs, as far as the family can say it: `to_model_config` of the answer tells what it says."""
    values = filled_in(config)
    described = {"model_type": family, **{theirs: values[ours] for ours, theirs in keys_of(family).items()}}
    if family == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
        return {**described, **dropout, "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
    described["architectures"] = [f"{family.capitalize()}ForCausalLM"]
    described |= {"hidden_act": "silu", "attention_dropout": config.dropout}
    if config.rope_scaling is not None:  # the older spelling of RoPE's numbers, which all versions read
        numbers = {theirs: config.rope_scaling[ours] for ours, theirs in SCALING.items()}
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
