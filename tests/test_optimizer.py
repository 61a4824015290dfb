"""Which weights decay, what Muon does to a matrix, and that clipping is by the joint norm."""

import copy

import pytest
import torch

from model import ModelConfig, Transformer
from training.muon import orthogonalise
from training.objective import NextTokenLoss
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer, set_learning_rate


def tiny(**changes) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 32, "bias": True}
    return Transformer(ModelConfig(**{**sizes, **changes}))


def gradients(model: Transformer) -> None:
    ids = torch.randint(0, 40, (4, 17), generator=torch.Generator().manual_seed(1))
    loss, n = NextTokenLoss(model)(ids[:, :-1], ids[:, 1:])
    (loss / n).backward()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_weight_is_in_one_group_and_only_matrices_decay(name):
    model = tiny(qk_norm=True, position="learned", norm="layernorm")
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.3), model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters())) == len(decay)
    for p in model.parameters():
        assert decay[id(p)] == (0.3 if p.dim() == 2 else 0.0)


def test_muon_takes_the_matrices_in_the_blocks_and_adamw_the_rest():
    model = tiny(tie_embeddings=False)
    optimizer = make_optimizer(OptimizerConfig(name="muon", lr=0.02, adam_lr=0.001), model)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        assert rates[id(p)] == (0.02 if "blocks." in name and p.dim() == 2 else 0.001), name
    set_learning_rate(optimizer, 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.0005, 0.01]


def test_the_adamw_inside_muon_is_torchs():
    config = OptimizerConfig(name="muon", adam_lr=0.01, weight_decay=0.1)
    ours, theirs = tiny(), tiny()
    optimizer = make_optimizer(config, ours)
    reference = make_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.1), theirs)
    for _ in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            model.zero_grad()
            torch.manual_seed(7)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            opt.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not ("blocks." in name and p.dim() == 2):
            torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_adamw_follows_its_equation():
    """Algorithm 2 of Loshchilov and Hutter, on the head, which decays."""
    model = tiny(bias=False, tie_embeddings=False)
    w = model.head.weight
    optimizer = make_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.2, beta1=0.7, beta2=0.9, eps=1e-2), model)
    expected, m, v = w.detach().clone(), torch.zeros_like(w), torch.zeros_like(w)
    for step in (1, 2, 3):
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        m, v = 0.7 * m + 0.3 * w.grad, 0.9 * v + 0.1 * w.grad**2
        expected *= 1 - 0.1 * 0.2
        expected -= 0.1 * m / (1 - 0.7**step) / ((v / (1 - 0.9**step)).sqrt() + 1e-2)
        optimizer.step()
    torch.testing.assert_close(w.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 48), (2, 48, 16)])
def test_orthogonalise_keeps_the_directions_and_levels_the_singular_values(shape):
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    m = u @ torch.diag_embed(torch.linspace(0.05, 3, min(shape[1:])).expand(shape[0], -1)) @ vh
    mixed = u.mT @ orthogonalise(m) @ vh.mT  # diagonal, if the directions are kept
    values = torch.diagonal(mixed, dim1=-2, dim2=-1)
    assert values.min() > 0.5 and values.max() < 1.3
    assert (mixed - torch.diag_embed(values)).abs().max() < 1e-3


@pytest.mark.parametrize("shape", [(2, 128, 48), (2, 32, 96)])
@pytest.mark.parametrize("floor", [0.0, 1e-2])
def test_orthogonalise_follows_its_polynomial_where_the_matrix_has_nearly_no_rank(shape, floor):
    """In float32, against the steps one by one in float64."""
    m = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    values = torch.logspace(0, -7, u.size(-1), dtype=torch.float64)
    x = m = u * torch.where(values > floor, values, 0.0) @ vh
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    assert (orthogonalise(m.float()) - x).norm() < 1e-3 * x.norm()


def test_a_batch_of_equal_shapes_is_orthogonalised_as_one_by_one():
    m = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalise(m), torch.cat([orthogonalise(one[None]) for one in m]))


@pytest.mark.parametrize("kind", ["up", "down"])  # tall, and wide
def test_muon_follows_its_equation(kind):
    model = tiny(bias=False)
    w = getattr(model.blocks[0].mlp, kind).weight
    optimizer = make_optimizer(OptimizerConfig(name="muon", lr=0.1, weight_decay=0.2, momentum=0.9), model)
    expected, buffer = w.detach().clone(), torch.zeros_like(w)
    for step in range(2):
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        g = w.grad
        buffer = 0.9 * buffer + 0.1 * g
        direction = orthogonalise((0.1 * g + 0.9 * buffer)[None])[0]
        expected = (1 - 0.1 * 0.2) * expected - 0.1 * max(1, w.size(0) / w.size(1)) ** 0.5 * direction
        optimizer.step()
    torch.testing.assert_close(w.detach(), expected)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_dict_goes_on_where_it_was(name):
    model = tiny()
    optimizer = make_optimizer(OptimizerConfig(name=name), model)
    gradients(model)
    optimizer.step()
    twin = copy.deepcopy(model)
    resumed = make_optimizer(OptimizerConfig(name=name), twin)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (twin, resumed)):
        m.zero_grad()
        gradients(m)
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_clipping_is_by_the_joint_norm_and_can_be_off():
    model = tiny()
    gradients(model)
    joint = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(clip_gradients(model.parameters(), None), joint)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]).norm(), joint)
    torch.testing.assert_close(clip_gradients(model.parameters(), 0.01), joint)
    assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("key", ["lr", "adam_lr", "weight_decay", "beta1", "beta2", "eps", "grad_clip", "momentum"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_impossible_values_are_refused_by_key(key, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{key}="):
        OptimizerConfig(**{key: value})
