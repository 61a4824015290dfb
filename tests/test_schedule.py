"""The learning rate at the corners of its schedule."""

import pytest

from training.schedule import ScheduleConfig, learning_rate_share


def shares(steps: int = 100, **changes) -> list[float]:
    config = ScheduleConfig(**{"warmup_steps": 10, "final": 0.1, **changes})
    return [learning_rate_share(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_warms_up_in_a_line_from_above_zero(name):
    assert shares(name=name)[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_never_rises_after_the_warm_up_and_ends_near_its_final_share(name):
    after = shares(name=name, decay_fraction=0.4)[10:]
    assert all(a >= b for a, b in zip(after, after[1:], strict=False))
    assert after[0] == pytest.approx(1)
    assert 0.1 <= after[-1] < 0.13


def test_cosine_is_halfway_in_the_middle():
    assert shares(warmup_steps=0)[50] == pytest.approx((1 + 0.1) / 2)


def test_wsd_stays_until_its_decay_and_falls_in_a_line():
    values = shares(name="wsd", decay_fraction=0.4, final=0.0)
    assert values[10:61] == [1.0] * 51
    assert values[80] == pytest.approx(0.5)


def test_a_decay_that_begins_in_the_warm_up_makes_no_jump():
    values = shares(steps=30, name="wsd", warmup_steps=20, decay_fraction=1.0, final=0.0)
    assert values == pytest.approx([min((step + 1) / 20, (30 - step) / 30) for step in range(30)])


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    assert shares(steps=5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    "wrong", [{"name": "step"}, {"warmup_steps": -1}, {"final": 1.5}, {"final": float("nan")}, {"decay_fraction": 0.0}]
)
def test_impossible_values_are_refused_by_key(wrong):
    with pytest.raises(ValueError, match=rf"schedule\.{next(iter(wrong))}"):
        ScheduleConfig(**wrong)
