"""Attention: each position asks (a query), is asked (a key) and answers (a value).

Shapes: b rows, t queries, s keys, h query heads, g query heads to a key head, d width of a head.
"""

import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor, nn

from model.cache import LayerCache
from model.config import check_heads
from model.linear import Linear
from model.positions import Position


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor = True) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d)) v, written as the equation (Vaswani et al. 2017, eq. 1): to read and test.

    q (..., t, d), k and v (..., s, d) -> context (..., t, d) and weights (..., t, s), whose rows sum to 1.
    Dot products of unit-variance vectors have variance d: undivided by sqrt(d), they saturate softmax.
    `causal`: True hides the keys after each query, the last query standing at the last key; or a mask of
    one's own, boolean (True: visible) or added to the scores. The weights take O(t s) memory: hence the
    fused kernel below.
    """
    scores = einsum(q, k, "... t d, ... s d -> ... t s") / math.sqrt(q.size(-1))
    mask = causal_mask(q.size(-2), k.size(-2), q.device) if causal is True else causal
    if isinstance(mask, Tensor):
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1)
    return einsum(weights, v, "... t s, ... s d -> ... t d"), weights


def causal_mask(t: int, s: int, device: torch.device | None = None) -> Tensor:
    """(t, s), True where a key is visible: up to the diagonal that ends at the last query and last key."""
    return torch.ones(t, s, dtype=torch.bool, device=device).tril(s - t)


def attention_mask(position: Position, q_at: Tensor, k_at: Tensor) -> Tensor:
    """What to add to the scores: -inf where a key comes after its query, else the position's bias, or 0.

    (t, s), or (b, 1, t, s) when rows differ; with a bias (h, t, s) or (b, h, t, s).
    """
    visible = k_at <= q_at[..., None]
    if visible.dim() == 3:
        visible = visible[:, None]
    bias = position.bias(q_at, k_at)
    return torch.where(visible, 0.0 if bias is None else bias, -math.inf)


def same_document(tokens: Tensor, end_of_text: int) -> Tensor:
    """(b, t) ids -> (b, 1, t, t), True where query and key are of one document. An end-of-text begins the next: what follows it
    is predicted from it alone, as a text is that is written from nothing."""
    document = (tokens == end_of_text).cumsum(dim=-1)
    return (document[:, :, None] == document[:, None, :])[:, None]


class HeadNorm(nn.RMSNorm):
    """RMSNorm in the type of its input, which autocast makes narrower than its weight: no fused kernel takes both."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class MultiHeadAttention(nn.Module):
    """h attentions side by side, each in its own subspace of width d, concatenated and projected.

    (b, t, d_model) -> (b, t, d_model) (Vaswani et al. 2017, 3.2.2). With n_kv_heads < n_heads, groups of
    query heads share a key and value head (GQA, Ainslie et al. 2023; one in all: MQA, Shazeer 2019), which
    shrinks the cache by the same factor. `qk_norm` normalises each head's queries and keys, so that scores
    cannot grow with the weights (Henry et al. 2020).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        qkv_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_heads(d_model, n_heads, n_kv_heads, head_dim)
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        self.head_width = head_dim or d_model // n_heads
        self.dropout = dropout
        heads = self.n_heads + 2 * self.n_kv_heads
        self.qkv = Linear(d_model, heads * self.head_width, bias=bias if qkv_bias is None else qkv_bias)
        self.q_norm = HeadNorm(self.head_width, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(self.head_width, eps=norm_eps) if qk_norm else nn.Identity()
        self.out = Linear(n_heads * self.head_width, d_model, bias=bias)

    def project(self, x: Tensor, position: Position, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, t, d_model) -> queries (b, h, t, d), keys and values (b, kv_heads, t, d), positions applied."""
        heads = rearrange(self.qkv(x), "b t (h d) -> b h t d", d=self.head_width)
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=1)
        q, k = position.rotate(self.q_norm(q), self.k_norm(k), at)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        position: Position | None = None,
        at: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """`mask` None: the keys are those of x itself, each query seeing its own and those before it."""
        if at is None:
            at = torch.arange(x.size(1), device=x.device)
        q, k, v = self.project(x, position or Position(), at)
        if cache is not None:
            k, v = cache.append(k, v, at, read=k.size(2) if mask is None else mask.size(-1))
        context = fused_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.out(rearrange(context, "b h t d -> b t (h d)"))


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """The same equation in torch's fused kernel, which where it can does not store the (t, s) weights (Dao et al. 2022).

    q (b, h, t, d), k and v (b, h / g, s, d) -> (b, h, t, d). `mask` None: causal, the last query at the last key. (torch's
    is_causal puts the first query at the first key, which is the same for t = s only.)
    """
    if mask is None and q.size(2) != k.size(2):
        mask = causal_mask(q.size(2), k.size(2), q.device)
    groups = q.size(1) // k.size(1)
    same_for_all_heads = mask is None or mask.dim() == 2 or mask.size(-3) == 1
    if groups > 1 and q.size(2) == 1 and same_for_all_heads:
        # One new token: a group's heads line up as if they were t, so the cache is read once, not g times.
        q = rearrange(q, "b (kv g) 1 d -> b kv g d", g=groups)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return rearrange(context, "b kv g d -> b (kv g) 1 d")
    if groups > 1:
        k, v = (repeat(z, "b kv s d -> b (kv g) s d", g=groups) for z in (k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout)
