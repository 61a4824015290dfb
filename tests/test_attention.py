"""Attention as the equation, as the fused kernel, and as a module: three ways to say the same."""

import math
import warnings

import pytest
import torch
from einops import rearrange, repeat
from torch.profiler import ProfilerActivity, profile

from model import MultiHeadAttention, scaled_dot_product_attention
from model.attention import attention_mask, causal_mask, fused_attention
from model.positions import Alibi, Position, Rotary
from tests.tiny_models import HEADS


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("d", [4, 64, 256])
def test_dot_products_have_variance_d_and_scaled_ones_variance_1(d):
    q, k = randn(400, d), randn(400, d, seed=1)
    assert (q @ k.T).var().item() == pytest.approx(d, rel=0.1)
    _, weights = scaled_dot_product_attention(q, k, k, causal=False)
    scores = weights.log()  # but for a constant a row, which softmax hides
    assert scores.var(dim=-1).mean().item() == pytest.approx(1, rel=0.1)


def test_is_the_equation_term_by_term():
    q, k, v = randn(3, 4), randn(5, 4, seed=1), randn(5, 2, seed=2)
    context, weights = scaled_dot_product_attention(q, k, v, causal=False)
    for i in range(3):
        terms = [math.exp(sum(q[i, c] * k[j, c] for c in range(4)) / math.sqrt(4)) for j in range(5)]
        for j in range(5):
            assert weights[i, j].item() == pytest.approx(terms[j] / sum(terms))
        expected = sum(terms[j] / sum(terms) * v[j] for j in range(5))
        torch.testing.assert_close(context[i], expected)


@pytest.mark.parametrize(("t", "s"), [(6, 6), (2, 6), (1, 6)])
def test_rows_sum_to_1_and_masked_weights_are_exactly_0(t, s):
    _, weights = scaled_dot_product_attention(randn(2, 3, t, 8), randn(2, 3, s, 8, seed=1), randn(2, 3, s, 8, seed=2))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, t, dtype=torch.float64))
    for i in range(t):
        last = s - t + i  # the last query stands at the last key
        assert (weights[..., i, last + 1 :] == 0).all()
        assert (weights[..., i, : last + 1] > 0).all()


def test_a_query_and_key_of_one_token_are_aligned_at_the_end():
    """torch's own is_causal would show the last of six tokens the first key only."""
    assert causal_mask(1, 6).all()
    assert causal_mask(2, 3).tolist() == [[True, True, False], [True, True, True]]


def test_without_mask_and_positions_outputs_follow_a_permutation_of_the_inputs():
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    q, k, v = (randn(2, 7, 8, seed=i) for i in range(3))
    context, _ = scaled_dot_product_attention(q, k, v, causal=False)
    permuted, _ = scaled_dot_product_attention(q[:, order], k[:, order], v[:, order], causal=False)
    torch.testing.assert_close(permuted, context[:, order])

    attention, x = MultiHeadAttention(32, 4).double(), randn(2, 7, 32)
    everything = torch.ones(7, 7, dtype=torch.bool)
    torch.testing.assert_close(attention(x[:, order], mask=everything), attention(x, mask=everything)[:, order])


@pytest.mark.parametrize("position", [Rotary(16, 8, 10000.0), Alibi(4)])
def test_with_positions_they_do_not(position):
    order = torch.tensor([3, 1, 0, 2, 6, 5, 4])
    attention, x, at = MultiHeadAttention(32, 4).double(), randn(2, 7, 32), torch.arange(7)
    bias = position.bias(at, at)
    mask = torch.zeros(7, 7) if bias is None else bias
    straight = attention(x, position, at, mask)[:, order]
    assert (attention(x[:, order], position, at, mask) - straight).abs().max() > 1e-3


def masks(h: int, t: int, s: int) -> dict[str, torch.Tensor | None]:
    q_at, k_at = torch.arange(s - t, s), torch.arange(s)
    rows = torch.stack([q_at, (q_at - 1).clamp(min=0)])  # two rows of unequal length
    return {
        "plain": None,
        "aligned": attention_mask(Position(), q_at, k_at),
        "ragged": attention_mask(Position(), rows, k_at),
        "alibi": attention_mask(Alibi(h), q_at, k_at),
        "ragged alibi": attention_mask(Alibi(h), rows, k_at),
    }


MASKED = [(kind, t) for kind in ("aligned", "ragged", "alibi", "ragged alibi") for t in (9, 4, 1)]


@pytest.mark.parametrize(
    ("kind", "t"), [("plain", 9), ("plain", 1), ("plain, longer keys", 4), ("plain, longer keys", 1), *MASKED]
)
@pytest.mark.parametrize("layout", HEADS)
def test_fused_is_the_reference_forward_and_backward(layout, kind, t):
    h, kv, s = 4, HEADS[layout], t if kind == "plain" else 9
    inputs = [randn(2, h, t, 8), randn(2, kv, s, 8, seed=1), randn(2, kv, s, 8, seed=2)]
    mask, ahead = masks(h, t, s).get(kind), randn(2, h, t, 8, seed=3)
    results = []
    for fused in (True, False):
        q, k, v = (z.clone().requires_grad_() for z in inputs)
        if fused:
            context = fused_attention(q, k, v, mask)
        else:
            wide = (repeat(z, "b kv s d -> b (kv g) s d", g=h // kv) for z in (k, v))
            context, _ = scaled_dot_product_attention(q, *wide, causal=True if mask is None else mask)
        context.backward(ahead)
        results.append([context.detach(), q.grad, k.grad, v.grad])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_is_the_reference_within_the_rounding_of_smaller_types(dtype):
    q, k, v = (randn(2, 4, 32, 16, seed=i) for i in range(3))
    exact, _ = scaled_dot_product_attention(q, k, v)
    fused = fused_attention(q.to(dtype), k.to(dtype), v.to(dtype))
    assert (fused - exact).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("layout", HEADS)
def test_the_module_is_heads_side_by_side_concatenated_and_projected(layout):
    kv = HEADS[layout]
    attention, x = MultiHeadAttention(32, 4, kv, bias=True).double(), randn(2, 5, 32)
    rows = attention.qkv.weight, attention.qkv.bias
    w_q, w_k, w_v = zip(*(z.split([32, 8 * kv, 8 * kv]) for z in rows), strict=True)
    contexts = []
    for head in range(4):
        own = slice(8 * head, 8 * head + 8)
        shared = slice(8 * (head * kv // 4), 8 * (head * kv // 4) + 8)
        q = x @ w_q[0][own].T + w_q[1][own]
        k = x @ w_k[0][shared].T + w_k[1][shared]
        v = x @ w_v[0][shared].T + w_v[1][shared]
        contexts.append(scaled_dot_product_attention(q, k, v)[0])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(contexts, dim=-1)))


def test_can_be_built_and_called_alone():
    attention = MultiHeadAttention(30, 3)
    assert attention(torch.randn(2, 7, 30)).shape == (2, 7, 30)
    assert attention(torch.randn(1, 1, 30)).shape == (1, 1, 30)


def test_qk_norm_bounds_the_scores_whatever_the_weights():
    attention, x = MultiHeadAttention(32, 4, qk_norm=True).double(), 1000 * randn(2, 9, 32)
    q, k, _ = attention.project(x, Position(), torch.arange(9))
    scores = q @ rearrange(k, "b h s d -> b h d s") / math.sqrt(8)
    assert scores.abs().max() <= math.sqrt(8) + 1e-6


def test_qk_norm_under_autocast_is_given_one_type():
    """torch warns, and leaves its fused kernel, where the weight is wider than the input."""
    attention, x = MultiHeadAttention(32, 4, qk_norm=True), randn(2, 9, 32).float()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            attention(x).sum().backward()
    finally:
        torch.set_warn_always(False)
    assert attention.q_norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [((30, 4), ("30", "4")), ((32, 0), ("0",)), ((32, 4, 3), ("4", "3")), ((32, 4, 8), ("4", "8")), ((32, 4, 0), ("0",))],
)
def test_refuses_heads_that_do_not_fit_naming_the_numbers(arguments, numbers):
    with pytest.raises(ValueError) as error:
        MultiHeadAttention(*arguments)
    assert all(f"={number}" in str(error.value) for number in numbers)
    assert "\n" not in str(error.value)


def allocated(compute) -> int:
    """Bytes asked for on the CPU while `compute` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        compute()
    return sum(max(0, event.self_cpu_memory_usage) for event in record.key_averages())


def test_memory_of_the_equation_grows_with_t_squared_that_of_the_kernel_with_t():
    def needed(attend, t):
        q = torch.randn(1, 2, t, 16)
        return allocated(lambda: attend(q, q, q))

    t = 1024
    square = 2 * t * t * 4  # one float32 weight for each pair of tokens and head
    assert needed(scaled_dot_product_attention, t) > square
    assert needed(fused_attention, t) < square / 4
    assert needed(scaled_dot_product_attention, 2 * t) / needed(scaled_dot_product_attention, t) > 3.5
    assert needed(fused_attention, 2 * t) / needed(fused_attention, t) < 2.5
