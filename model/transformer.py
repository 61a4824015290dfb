"""The decoder-only transformer: ids in, a score for every possible next id out.

Shapes: b rows, t tokens, d_model the width of the residual stream, vocab the number of ids.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import MultiHeadAttention, attention_mask, same_document
from model.cache import KVCache, LayerCache
from model.config import ModelConfig
from model.linear import Linear
from model.positions import Position, make_position


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016), or RMSNorm, which leaves out the mean and the shift (Zhang and Sennrich 2019)."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(config.d_model, eps=config.norm_eps)


class Gelu(nn.Module):
    """down(gelu(up(x))), with the tanh form of GELU (Hendrycks and Gimpel 2016; GPT-2)."""

    def __init__(self, d_model: int, d_ff: int, bias: bool):
        super().__init__()
        self.up = Linear(d_model, d_ff, bias=bias)
        self.down = Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Relu2(Gelu):
    """down(relu(up(x))^2) (So et al. 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020); gate and up are the two halves of one matrix."""

    def __init__(self, d_model: int, d_ff: int, bias: bool):
        super().__init__()
        self.up = Linear(d_model, 2 * d_ff, bias=bias)
        self.down = Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


MLP = {"gelu": Gelu, "relu2": Relu2, "swiglu": SwiGLU}


class Block(nn.Module):
    """Pre-norm: each half reads a normalised copy of the residual stream and adds what it found (Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            head_dim=config.head_dim,
            bias=config.bias,
            qkv_bias=config.qkv_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            dropout=config.dropout,
        )
        self.mlp_norm = make_norm(config)
        mlp_bias = config.bias if config.mlp_bias is None else config.mlp_bias
        self.mlp = MLP[config.mlp](config.d_model, config.hidden_width, mlp_bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, position: Position, at: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), position, at, mask, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    position: Position,
    at: Tensor,
    mask: Tensor | None,
    layers: Sequence[LayerCache | None],
) -> Tensor:
    for block, layer in zip(blocks, layers, strict=True):
        x = block(x, position, at, mask, layer)
    return x


class Transformer(nn.Module):
    """(b, t) ids -> (b, t, vocab) logits; logits[:, i] depend on tokens[:, : i + 1] only."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set: give a number, or let the tokenizer fill it in")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.position = make_position(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = make_norm(config)
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        self.initialise()
        self.tie()

    def initialise(self) -> None:
        """Every weight N(0, 0.02^2), every bias 0; the two projections into the residual stream are smaller by sqrt(2 n_layers),
        so that its variance does not grow with depth (Radford et al. 2019), or zero."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                if name.endswith(("attention.out", "mlp.down")):
                    module.weight.data.mul_(0 if self.config.zero_init else 1 / math.sqrt(2 * self.config.n_layers))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def tie(self) -> None:
        """One matrix reads ids and scores them (Press and Wolf 2017), if the config says so."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def features(self, tokens: Tensor, cache: KVCache | None = None, end_of_text: int | None = None) -> Tensor:
        """(b, t) ids -> (b, t, d_model), one head away from logits. A cache already holds what came before, and is filled.
        Attention does not cross an `end_of_text` (which is for training: no cache)."""
        at, mask = self.place(tokens.size(1), cache)
        if end_of_text is not None:
            assert cache is None, "documents are kept apart in training only"
            mask = attention_mask(self.position, at, at) if mask is None else mask
            mask = torch.where(same_document(tokens, end_of_text), mask, -math.inf)
        x = self.transform(tokens, at, mask, [None] * len(self.blocks) if cache is None else cache.layers)
        if cache is not None:
            cache.advance(tokens.size(1))
        return x

    def place(self, t: int, cache: KVCache | None) -> tuple[Tensor, Tensor | None]:
        """Where the next t tokens stand, (t,) or (b, t), and the mask over the keys that they read; None: simply causal."""
        before, device = 0 if cache is None else cache.longest, self.embed.weight.device
        if before + t > self.config.context_length:
            raise ValueError(f"{before} + {t} tokens exceed model.context_length={self.config.context_length}")
        read = t if cache is None else cache.reach(t)
        if cache is None or before == 0:
            at = k_at = torch.arange(t, device=device)
            if type(self.position).bias is Position.bias:
                return at, None
        else:
            at, k_at = cache.positions(t), torch.arange(read, device=device)
        return at, attention_mask(self.position, at, k_at).to(self.embed.weight.dtype)

    def transform(
        self,
        tokens: Tensor,
        at: Tensor,
        mask: Tensor | None,
        layers: Sequence[LayerCache | None],
        run: Callable[..., Tensor] = run_blocks,
    ) -> Tensor:
        """What `features` does with tensors alone, and so can be compiled, with `run` to call the blocks."""
        x = self.dropout(self.position.embed(self.embed(tokens), at))
        return self.norm(run(self.blocks, x, self.position, at, mask, layers))

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        return self.head(self.features(tokens, cache))

    def new_cache(self, rows: int, capacity: int | None = None) -> KVCache:
        """An empty cache of this model's shape, dtype and device."""
        weight = self.embed.weight
        return KVCache(self.config, rows, capacity, weight.dtype, weight.device)
