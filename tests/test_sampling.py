"""The distribution drawn is the one described, and a draw depends on nothing but its row's scores, seed and position.

The statistical tests compare counts with expectations by chi-square at a level of one in a million: their seeds are fixed,
and a right implementation with other seeds would fail one run in a million.
"""

import math
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import Sampling
from model.sampling import Chooser, draw, keep_min_p, keep_top_k, keep_top_p, penalise, signed, uniform

LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.5, -3.0, 1.0, -inf])
N = 40_000


def chi_square_limit(degrees: int) -> float:
    """The value that chi-square exceeds once in a million (Wilson and Hilferty's approximation)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + 4.7534 * math.sqrt(a)) ** 3


def assert_drawn_from(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * probabilities[possible].double()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert statistic < chi_square_limit(max(1, int(possible.sum()) - 1)), (counts, expected)


def drawn(sampling: Sampling, logits: torch.Tensor = LOGITS, seen: torch.Tensor | None = None, seed: int = 3) -> torch.Tensor:
    """How often each id comes in N draws at the positions 0 .. N - 1."""
    seeds = torch.full((N,), seed)
    seen = None if seen is None else seen.expand(N, -1)
    ids = sampling.choose(logits.expand(N, -1), seen, seeds, torch.arange(N))
    return torch.bincount(ids, minlength=logits.numel())


def softmax(kept: dict[int, float]) -> torch.Tensor:
    """The distribution over ids with the scores given."""
    weights = torch.zeros(LOGITS.numel(), dtype=torch.float64)
    for i, score in kept.items():
        weights[i] = math.exp(score)
    return weights / weights.sum()


SCORES = {i: score for i, score in enumerate(LOGITS.tolist()) if score > -inf}


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), SCORES),
        (Sampling(temperature=0.5), {i: 2 * s for i, s in SCORES.items()}),
        (Sampling(temperature=3.0), {i: s / 3 for i, s in SCORES.items()}),
        (Sampling(top_k=1), {0: 2.0}),
        (Sampling(top_k=3), {0: 2.0, 4: 1.5, 6: 1.0}),
        (Sampling(top_k=7), SCORES),
        (Sampling(top_k=1000), SCORES),
        # the probabilities are .40 .24 .15 .09 .05 .02 .003 for the ids 0 4 6 2 3 1 5
        (Sampling(top_p=0.39), {0: 2.0}),
        (Sampling(top_p=0.6), {0: 2.0, 4: 1.5}),
        (Sampling(top_p=0.7), {0: 2.0, 4: 1.5, 6: 1.0}),
        (Sampling(min_p=1.0), {0: 2.0}),
        (Sampling(min_p=0.3), {0: 2.0, 4: 1.5, 6: 1.0}),  # e^-1 = .37 of the best, e^-1.5 = .22
        (Sampling(min_p=0.2), {0: 2.0, 4: 1.5, 6: 1.0, 2: 0.5}),
        (Sampling(temperature=0.5, min_p=0.3), {0: 4.0, 4: 3.0}),  # after the temperature: e^-2 = .14
        (Sampling(temperature=2.0, top_k=3, top_p=0.6), {0: 1.0, 4: 0.75}),  # of .42 .33 .25: those that top_k left
        (Sampling(top_k=2, min_p=0.3), {0: 2.0, 4: 1.5}),
    ],
    ids=repr,
)
def test_draws_from_the_distribution_described(sampling, kept):
    torch.testing.assert_close(sampling.probabilities(LOGITS[None])[0].double(), softmax(kept), rtol=1e-5, atol=1e-7)
    assert_drawn_from(drawn(sampling), softmax(kept))


def test_seen_ids_are_penalised_towards_less_whatever_their_sign():
    seen = torch.tensor([True, True, False, True, False, False, False, True])
    penalised = {**SCORES, 0: 2.0 / 1.5, 1: -1.0 * 1.5, 3: 0.0}
    sampling = Sampling(repetition_penalty=1.5, temperature=0.5)
    assert_drawn_from(drawn(sampling, seen=seen), softmax({i: 2 * s for i, s in penalised.items()}))
    assert torch.equal(penalise(LOGITS, None, 1.5), LOGITS)


@pytest.mark.parametrize("neutral", [{}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}, {"repetition_penalty": 1.0}], ids=repr)
def test_neutral_values_change_nothing(neutral):
    seen = torch.ones(8, dtype=torch.bool)
    expected = torch.stack([Sampling().choose(LOGITS[None], None, torch.tensor([5]), torch.tensor([at])) for at in range(200)])
    found = Sampling(**neutral).choose(LOGITS.expand(200, -1), seen.expand(200, -1), torch.full((200,), 5), torch.arange(200))
    assert torch.equal(found, expected[:, 0])
    assert torch.equal(Sampling(**neutral).probabilities(LOGITS[None]), LOGITS[None].softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-45])
def test_no_temperature_takes_the_best_whatever_the_seed(temperature):
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(0))
    for seed in (0, 1):
        ids = Sampling(temperature=temperature).choose(logits, None, torch.full((500,), seed), torch.arange(500))
        assert torch.equal(ids, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_small_temperatures_take_the_best_where_it_is_clear(temperature):
    ids = Sampling(temperature=temperature).choose(1000 * LOGITS.expand(99, -1), None, torch.arange(99), torch.arange(99))
    assert (ids == 0).all()


def test_penalties_hold_without_temperature_too():
    seen = torch.tensor([[True] + 7 * [False]])
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert greedy.choose(LOGITS[None], seen, torch.tensor([0]), torch.tensor([0])).item() == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": inf},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": -2},
        {"repetition_penalty": inf},
        {"repetition_penalty": 1e-40},
    ],
    ids=repr,
)
def test_refuses_impossible_values_naming_them(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Sampling(**wrong)


scores = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12, unique=True)


@settings(deadline=None)
@given(scores=scores, k=st.integers(1, 15), p=st.floats(0.01, 1), least=st.floats(0.001, 1))
def test_filters_keep_what_their_definitions_keep(scores, k, p, least):
    logits = torch.tensor([scores])
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    odds = [math.exp(score) for score in scores]
    p_of = [o / sum(odds) for o in odds]

    def kept(filtered: torch.Tensor) -> set[int]:
        assert (filtered[filtered > -inf] == logits[filtered > -inf]).all()
        return set((filtered[0] > -inf).nonzero()[:, 0].tolist())

    assert kept(keep_top_k(logits, k)) == set(order[:k])
    nucleus = kept(keep_top_p(logits, p))
    n = len(nucleus)
    assert nucleus == set(order[:n]) and n >= 1
    assert sum(p_of[i] for i in order[:n]) > p - 1e-5 and sum(p_of[i] for i in order[: n - 1]) < p + 1e-5
    for i in range(len(scores)):
        if abs(p_of[i] - least * max(p_of)) > 1e-6:
            assert (i in kept(keep_min_p(logits, least))) == (p_of[i] > least * max(p_of))


def test_the_best_is_left_whatever_the_filters():
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    for filters in ({"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}, {"repetition_penalty": 1e-3, "temperature": 1e-5}):
        kept = Sampling(**filters).probabilities(scores)
        assert kept.argmax() == 1 and kept.sum() == pytest.approx(1)


def test_a_draw_depends_on_its_own_row_only():
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    seeds, at = torch.arange(64) % 7, torch.arange(64) // 3
    sampling = Sampling(top_k=20, top_p=0.9, min_p=0.01, temperature=0.8)
    together = sampling.choose(logits, None, seeds, at)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sampling.choose(logits[order], None, seeds[order], at[order]), together[order])
    alone = torch.cat([sampling.choose(logits[r : r + 1], None, seeds[r : r + 1], at[r : r + 1]) for r in range(64)])
    assert torch.equal(alone, together)


def test_draws_leave_the_global_generators_alone():
    before = torch.get_rng_state()
    drawn(Sampling())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_ends_of_the_unit_interval_draw_possible_ids():
    probabilities = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]])
    largest = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert draw(probabilities, torch.zeros(1, dtype=torch.float64)).item() == 2
    assert draw(probabilities, largest).item() == 4
    assert draw(torch.full((1, 1000), 1e-3), largest).item() == 999


def test_rare_ids_are_drawn_as_rarely_as_they_should_be():
    """A quarter of a million ids, each one rounding step of float32's cumulative sum apart."""
    probabilities = torch.full((1, 250_000), 1 / 250_000)
    u = torch.arange(20, dtype=torch.float64) / 20 + 0.025
    ids = draw(probabilities.expand(20, -1), u)
    assert ((ids - 250_000 * u).abs() <= 1).all()


@pytest.mark.parametrize(
    ("seeds", "at"), [(torch.zeros(N, dtype=torch.long), torch.arange(N)), (torch.arange(N), torch.full((N,), 7))]
)
def test_numbers_are_uniform_and_uncorrelated_over_positions_and_over_seeds(seeds, at):
    u = uniform(seeds, at)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert_drawn_from(torch.histc(u.float(), 64, 0, 1).double(), torch.full((64,), 1 / 64))
    pairs = (8 * u[:-1]).long() * 8 + (8 * u[1:]).long()  # a number and the next one
    assert_drawn_from(torch.bincount(pairs, minlength=64).double(), torch.full((64,), 1 / 64))


def test_neighbouring_seeds_and_positions_never_meet():
    """If seed + 1 at a position drew what seed draws at the next, samples would be shifted copies of one another."""
    seeds, at = torch.meshgrid(torch.arange(-50, 50), torch.arange(100), indexing="ij")
    assert uniform(seeds.flatten(), at.flatten()).unique().numel() == 100 * 100


def test_numbers_never_change():
    """Published samples name a seed; these are SplitMix64's, so another program can draw them, too."""
    found = [uniform(torch.tensor([seed]), torch.tensor([at])).item() for seed, at in ((0, 0), (0, 1), (1, 0), (-1, 5))]

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output for seed 0 that the generator's authors give
    assert found == [(mix((mix(seed % 2**64) + at) % 2**64) >> 11) / 2**53 for seed, at in ((0, 0), (0, 1), (1, 0), (-1, 5))]


def test_any_integer_is_a_seed():
    assert signed(2**63) == -(2**63) and signed(-1) == signed(2**64 - 1) == -1 and signed(5 + 2**64) == 5


def test_ids_that_stand_for_nothing_are_never_chosen():
    for sampling in (Sampling(temperature=0), Sampling(temperature=2.0), Sampling(top_k=5), Sampling(repetition_penalty=1.3)):
        logits = torch.zeros(500, 12)
        logits[:, 9:] = 30.0
        chooser = Chooser(sampling, [[1]] * 500, range(500), 12, n_vocab=9, device=torch.device("cpu"))
        assert chooser.choose(logits).max() < 9
        assert (logits[:, 9:] == -inf).all()


@pytest.mark.parametrize("score", [math.nan, inf, -inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=5)], ids=repr)
def test_scores_that_are_no_numbers_give_no_id(sampling, score):
    logits = torch.zeros(2, 12)
    logits[1, 3 if score != -inf else slice(None)] = score
    chooser = Chooser(sampling, [[1], [1]], [0, 1], 12, n_vocab=9, device=torch.device("cpu"))
    ids = chooser.choose(logits).tolist()
    assert ids[1] == -1 and 0 <= ids[0] < 9


def test_prompts_and_chosen_ids_count_as_seen():
    greedy = Sampling(temperature=0, repetition_penalty=2.5)
    chooser = Chooser(greedy, [[0, 2], [5]], [0, 0], 8, n_vocab=None, device=torch.device("cpu"))
    assert [chooser.choose(LOGITS.repeat(2, 1)).tolist() for _ in range(3)] == [[4, 0], [6, 4], [0, 6]]
