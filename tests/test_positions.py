"""Five ways to tell where a token stands."""

import copy
import math

import pytest
import torch

from model import ModelConfig, Transformer
from model.positions import Alibi, Learned, Position, Rotary, Sinusoidal, frequencies, make_position, stretch
from tests.tiny_models import POSITIONS, random_ids, tiny

LLAMA = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context_length": 8192}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rope_is_a_rotation_of_complex_numbers():
    rope, q = Rotary(32, 8, theta=100.0), randn(1, 1, 5, 8)
    at = torch.tensor([0, 1, 2, 17, 31])
    turned, turned_key = rope.rotate(q, q, at)
    assert torch.equal(turned, turned_key)
    pairs = torch.complex(q[..., :4], q[..., 4:])  # dimension i with i + d/2
    speed = torch.tensor([100.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    expected = pairs * torch.polar(torch.ones(5, 4, dtype=torch.float64), at[:, None] * speed)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], dim=-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(turned[..., 0, :], q[..., 0, :])


def test_rope_scores_depend_on_the_distance_only():
    rope, q, k = Rotary(64, 16, 10000.0), randn(1, 1, 1, 16), randn(1, 1, 1, 16, seed=1)

    def score(q_at: int, k_at: int) -> float:
        turned_q, _ = rope.rotate(q, k, torch.tensor([q_at]))
        _, turned_k = rope.rotate(q, k, torch.tensor([k_at]))
        return (turned_q * turned_k).sum().item()

    assert score(5, 3) == pytest.approx(score(40, 38), abs=1e-5) == pytest.approx(score(63, 61), abs=1e-5)
    assert abs(score(5, 3) - score(5, 2)) > 1e-2


def test_rope_takes_positions_of_each_row():
    rope, q = Rotary(32, 8, 10000.0), randn(2, 3, 4, 8)
    at = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])
    together = rope.rotate(q, q, at)[0]
    for r in range(2):
        torch.testing.assert_close(together[r : r + 1], rope.rotate(q[r : r + 1], q[r : r + 1], at[r])[0])


def test_rope_scaling_slows_long_waves_by_the_factor_and_leaves_short_ones():
    plain = frequencies(128, 500000.0)
    slowed = stretch(plain, LLAMA)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    torch.testing.assert_close(slowed[short], plain[short])
    torch.testing.assert_close(slowed[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any() and (slowed[between] < plain[between]).all() and (slowed[between] > plain[between] / 8).all()
    assert (slowed.diff() <= 0).all()
    assert not torch.equal(Rotary(64, 128, 500000.0, LLAMA).table, Rotary(64, 128, 500000.0).table)


def test_sinusoids_are_the_formula():
    sinusoidal = Sinusoidal(64, 8)
    added = sinusoidal.embed(torch.zeros(1, 64, 8), torch.arange(64))[0]
    for at in (0, 1, 10, 63):
        for i in range(4):
            angle = at / 10000 ** (2 * i / 8)
            assert added[at, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert added[at, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)
    x = torch.ones(1, 1, 8)
    torch.testing.assert_close(sinusoidal.embed(x, torch.tensor([5])) - added[5], x * math.sqrt(8))


def test_alibi_slopes_are_the_published_ones():
    assert Alibi(8).table.flatten().tolist() == [2.0**-i for i in range(1, 9)]
    twelve = Alibi(12).table.flatten().tolist()
    assert twelve[:8] == [2.0**-i for i in range(1, 9)]
    assert twelve[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_alibi_lowers_scores_by_slope_times_distance():
    bias = Alibi(2).bias(torch.arange(4), torch.arange(4))
    assert bias.shape == (2, 4, 4)
    for head, slope in enumerate((1 / 16, 1 / 256)):
        for q in range(4):
            for k in range(q + 1):
                assert bias[head, q, k].item() == pytest.approx(-slope * (q - k))
    rows = Alibi(2).bias(torch.tensor([[3], [1]]), torch.arange(4))
    assert rows.shape == (2, 2, 1, 4)
    torch.testing.assert_close(rows[0], bias[:, 3:4])
    torch.testing.assert_close(rows[1, :, :, :2], bias[:, 1:2, :2])


def test_learned_positions_are_a_trained_table():
    model = tiny(position="learned")
    model(random_ids(1, 5)).sum().backward()
    gradient = model.position.table.weight.grad
    assert gradient.shape == (16, 32)
    assert (gradient[:5] != 0).any(dim=1).all() and (gradient[5:] == 0).all()


def test_none_does_nothing():
    x, at = randn(1, 3, 8), torch.arange(3)
    none = make_position(ModelConfig(position="none"))
    assert none.embed(x, at) is x
    assert none.rotate(x, x, at) == (x, x)
    assert none.bias(at, at) is None
    assert type(none) is Position


@pytest.mark.parametrize("position", POSITIONS)
def test_the_order_of_earlier_tokens_matters_with_positions_and_to_one_layer_without_them_not(position):
    """The last of one layer's tokens sees a set, unless positions tell; more layers can count what each token saw."""
    model = tiny(position=position, n_layers=1, dtype=torch.float64)
    ids = random_ids(1, 10)
    shuffled = torch.cat([ids[:, :9].flip(1), ids[:, 9:]], dim=1)
    difference = (model(ids)[0, -1] - model(shuffled)[0, -1]).abs().max().item()
    assert difference < 1e-10 if position == "none" else difference > 1e-3


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "alibi"])
def test_computed_tables_stay_float32_and_out_of_the_checkpoint(position):
    model = tiny(position=position, n_heads=3, d_model=30, n_kv_heads=3)  # slopes and waves that bfloat16 cannot hold
    table = model.position.table.clone()
    model.to(torch.bfloat16)
    assert model.position.table.dtype == torch.float32 and torch.equal(model.position.table, table)
    model.double()
    assert torch.equal(model.position.table, table)
    assert not [name for name in model.state_dict() if name.startswith("position")]
    assert torch.equal(copy.deepcopy(model).position.table, table)


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "alibi"])
def test_computed_tables_follow_the_model_to_another_device(position):
    config = ModelConfig(vocab_size=50, d_model=32, n_heads=4, position=position)
    with torch.device("meta"):
        model = Transformer(config)
    assert model.position.table.device.type == "meta"
    model.to_empty(device="cpu")
    assert torch.equal(model.position.table, Transformer(config).position.table)


def test_kinds_are_chosen_by_name():
    kinds = {name: type(make_position(ModelConfig(position=name))) for name in POSITIONS}
    assert kinds == {"rope": Rotary, "learned": Learned, "sinusoidal": Sinusoidal, "alibi": Alibi, "none": Position}
