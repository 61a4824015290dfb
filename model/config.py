"""The numbers that define an architecture, and which of them fit together."""

from dataclasses import dataclass
from math import inf
from typing import Any

POSITIONS = ("rope", "learned", "sinusoidal", "alibi", "none")
NORMS = ("rmsnorm", "layernorm")
MLPS = ("swiglu", "gelu", "relu2")


@dataclass(kw_only=True)
class ModelConfig:
    """One architecture; every number that a checkpoint needs to rebuild its model.

    `None` means: derived from the others (`n_kv_heads` = `n_heads`, `head_dim` = d_model / n_heads, `d_ff` from the MLP kind,
    `qkv_bias` = `mlp_bias` = `bias`), except `vocab_size`, which the tokenizer fills in. Raises ValueError when they do not fit.
    """

    vocab_size: int | None = None
    context_length: int = 256
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int | None = None
    d_model: int = 384
    d_ff: int | None = None
    head_dim: int | None = None
    position: str = "rope"
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"
    bias: bool = False
    qkv_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    tie_embeddings: bool = True
    dropout: float = 0.0
    rope_theta: float = 10000.0
    # Llama 3's stretching of slow rotations: factor, low_freq_factor, high_freq_factor, original_context_length.
    rope_scaling: Any = None  # dict[str, float] | None (typed so, OmegaConf would not take it from the command line)
    zero_init: bool = False  # start each block as the identity: its two output projections are zero

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "context_length", "n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff", "head_dim")
        for name in sizes:
            value = getattr(self, name)
            left_out = value is None and name in ("vocab_size", "n_kv_heads", "d_ff", "head_dim")
            if not left_out and not (isinstance(value, int) and 1 <= value < 2**31):
                raise ValueError(f"model.{name}={value} must be a whole number of at least 1 (and below 2^31)")
        for name in ("bias", "qk_norm", "tie_embeddings", "zero_init"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"model.{name}={getattr(self, name)} must be true or false")
        for name, kinds in (("position", POSITIONS), ("norm", NORMS), ("mlp", MLPS)):
            if getattr(self, name) not in kinds:
                raise ValueError(f"model.{name}={getattr(self, name)} is not one of {', '.join(kinds)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} must be at least 0 and below 1")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above 0, and finite")
        if (scaling := self.rope_scaling) is not None:
            if not isinstance(scaling, dict) or set(scaling) != set(ROPE_SCALING):
                raise ValueError(f"model.rope_scaling={scaling} must be a dictionary of {', '.join(ROPE_SCALING)}")
            if not all(isinstance(value, int | float) and 0 < value < inf for value in scaling.values()):
                raise ValueError(f"model.rope_scaling={scaling} must hold numbers above 0")
        check_heads(self.d_model, self.n_heads, self.n_kv_heads, self.head_dim)
        if self.position == "rope" and self.head_width % 2:
            raise ValueError(
                f"model.position=rope turns pairs of dimensions: the head width {self.head_width} "
                f"(d_model={self.d_model} / n_heads={self.n_heads}) must be even"
            )
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"model.position=sinusoidal needs an even d_model, got {self.d_model}")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def hidden_width(self) -> int:
        """Width of the MLP. SwiGLU has three matrices instead of two, hence 8/3 instead of 4 (Shazeer 2020), in steps of 32."""
        if self.d_ff is not None:
            return self.d_ff
        return 32 * -(-8 * self.d_model // (3 * 32)) if self.mlp == "swiglu" else 4 * self.d_model


ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")


def check_heads(d_model: int, n_heads: int, n_kv_heads: int | None, head_dim: int | None) -> None:
    """Raise ValueError unless d_model splits into the heads, and the query heads into groups that share a key head."""
    if n_heads < 1 or (n_kv_heads is not None and n_kv_heads < 1):
        raise ValueError(f"n_heads={n_heads} and n_kv_heads={n_kv_heads} must be at least 1")
    if head_dim is None and d_model % n_heads:
        raise ValueError(f"d_model={d_model} does not split into n_heads={n_heads} equal heads")
    if n_kv_heads is not None and n_heads % n_kv_heads:
        raise ValueError(f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}")
