"""The model as a function: what it may see, what it adds up, what it starts from, and what it refuses."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from model import ModelConfig, Transformer
from model.config import MLPS, NORMS
from model.transformer import Gelu, Relu2, SwiGLU
from tests.tiny_models import HEADS, POSITIONS, random_ids, tiny


def influence(model: Transformer, length: int = 8) -> torch.Tensor:
    """(t, s): the largest |d logits[t] / d input[s]|, the input being the embeddings."""
    ids = random_ids(1, length)
    inputs = model.embed(ids).detach().requires_grad_()
    model.embed.register_forward_hook(lambda *_: inputs)
    logits = model(ids)[0]
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.dtype)
    rows = [torch.autograd.grad((logits[t] * probe[t]).sum(), inputs, retain_graph=True)[0] for t in range(length)]
    return torch.stack([row[0].abs().amax(-1) for row in rows])


def assert_causal(model: Transformer, reads_all: bool = True) -> None:
    found = influence(model)
    past = torch.ones_like(found, dtype=torch.bool).tril()
    assert (found[~past] == 0).all()
    assert not reads_all or (found[past] > 0).all()


@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
def test_logits_depend_on_all_tokens_so_far_and_on_no_later_one(position, layout):
    assert_causal(tiny(position=position, n_kv_heads=HEADS[layout]))


@pytest.mark.parametrize(("mlp", "norm", "qk_norm"), list(itertools.product(MLPS, NORMS, [False, True])))
def test_so_it_is_with_any_mlp_and_norm(mlp, norm, qk_norm):
    assert_causal(tiny(mlp=mlp, norm=norm, qk_norm=qk_norm, bias=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_future_stays_hidden_from_scores_in_the_thousands_and_in_bfloat16(position, dtype):
    model = tiny(position=position, dtype=dtype)
    assert_causal(model, reads_all=dtype == torch.float32)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[: 2 * 32] *= 1000  # queries and keys
    assert_causal(model, reads_all=False)  # softmax has become arg-max: it reads one token


def test_logits_are_the_head_applied_to_the_features():
    model, ids = tiny(), random_ids(2, 7)
    assert model.features(ids).shape == (2, 7, 32) and model(ids).shape == (2, 7, 50)
    assert torch.equal(model(ids), model.features(ids) @ model.head.weight.T)


def test_rows_are_independent_of_one_another():
    model, ids = tiny(dtype=torch.float64), random_ids(3, 9)
    alone = torch.cat([model(row[None]) for row in ids])
    torch.testing.assert_close(model(ids), alone, rtol=0, atol=1e-12)


def test_dropout_works_in_training_and_only_there():
    model, ids = tiny(dropout=0.5), random_ids(2, 9)
    assert torch.equal(model(ids), model(ids))
    evaluated = model(ids)
    model.train()
    torch.manual_seed(0)
    first = model(ids)
    assert not torch.equal(first, model(ids)) and not torch.equal(first, evaluated)
    torch.manual_seed(0)
    assert torch.equal(first, model(ids))
    no_attention_dropout = tiny(dropout=0.5).train()
    for block in no_attention_dropout.blocks:
        block.attention.dropout = 0.0
    torch.manual_seed(0)
    assert not torch.equal(first, no_attention_dropout(ids))


def test_each_block_adds_to_the_stream():
    model, x, at = tiny(), torch.randn(1, 5, 32), torch.arange(5)
    block = model.blocks[0]
    middle = x + block.attention(block.attention_norm(x), model.position, at)
    torch.testing.assert_close(block(x, model.position, at), middle + block.mlp(block.mlp_norm(middle)))


def test_mlps_are_their_formulas():
    x = torch.randn(3, 8)
    gelu, relu2, swiglu = Gelu(8, 12, True), Relu2(8, 12, True), SwiGLU(8, 12, True)
    hidden = gelu.up(x)
    cubic = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
    torch.testing.assert_close(gelu(x), gelu.down(hidden / 2 * (1 + torch.tanh(cubic))))
    torch.testing.assert_close(relu2(x), relu2.down(relu2.up(x).clamp(min=0) ** 2))
    gate, up = swiglu.up(x)[:, :12], swiglu.up(x)[:, 12:]
    torch.testing.assert_close(swiglu(x), swiglu.down(gate * torch.sigmoid(gate) * up))


@pytest.mark.parametrize("tie", [True, False])
def test_starts_as_an_even_guess_with_every_parameter_in_use(tie):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=50, context_length=16, n_layers=2, n_heads=2, d_model=32, tie_embeddings=tie))
    ids = random_ids(8, 17)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert (model.head.weight is model.embed.weight) == tie


def test_projections_into_the_stream_start_smaller_the_deeper_the_model():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=500, n_layers=8, n_heads=4, d_model=128, bias=True))
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for block in model.blocks:
        for into, inner in ((block.attention.out, block.attention.qkv), (block.mlp.down, block.mlp.up)):
            assert inner.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert into.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
            assert not into.bias.any() and not inner.bias.any()


def test_zero_init_starts_as_the_identity():
    model = Transformer(ModelConfig(vocab_size=50, n_layers=2, n_heads=2, d_model=32, zero_init=True))
    ids = random_ids(2, 9)
    torch.testing.assert_close(model.features(ids), model.norm(model.embed(ids)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"d_model": 30, "n_heads": 4}, ["d_model=30", "n_heads=4"]),
        ({"d_model": 30, "n_heads": 2}, ["15", "rope"]),
        ({"n_heads": 0}, ["n_heads=0"]),
        ({"n_heads": 4, "n_kv_heads": 3}, ["n_heads=4", "n_kv_heads=3"]),
        ({"n_heads": 4, "n_kv_heads": 0}, ["n_kv_heads=0"]),
        ({"d_model": 33, "n_heads": 3, "position": "sinusoidal"}, ["33"]),
        ({"context_length": 0}, ["context_length=0"]),
        ({"dropout": 1.5}, ["dropout=1.5"]),
        ({"position": "absolute"}, ["position=absolute", "rope", "alibi"]),
        ({"norm": "batch"}, ["norm=batch", "rmsnorm"]),
        ({"mlp": "relu"}, ["mlp=relu", "swiglu"]),
        ({"rope_scaling": {"factor": 2.0}}, ["factor", "low_freq_factor"]),
    ],
)
def test_refuses_numbers_that_do_not_fit_naming_them(changes, named):
    with pytest.raises(ValueError) as error:
        ModelConfig(**changes)
    assert all(name in str(error.value) for name in named), error.value
    assert "\n" not in str(error.value)


def test_an_odd_head_width_works_where_nothing_is_turned():
    model = Transformer(ModelConfig(vocab_size=50, context_length=16, d_model=30, n_heads=2, position="learned"))
    assert model(random_ids(1, 16)).isfinite().all()


def test_needs_a_vocabulary():
    with pytest.raises(ValueError, match="model.vocab_size"):
        Transformer(ModelConfig())


def test_refuses_a_text_longer_than_its_context():
    with pytest.raises(ValueError, match="17 tokens exceed model.context_length=16"):
        tiny()(random_ids(1, 17))
