"""Generation is exact: with the cache or without, in a batch or alone, through slides and ends, row by row the same."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import Sampling, Transformer, generate, stream
from model.generation import OVERFLOWS
from tests.tiny_models import HEADS, POSITIONS, random_ids, successor_model, tiny

GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.3)
FILTERED = Sampling(temperature=1.5, top_k=30, top_p=0.95, min_p=0.001, repetition_penalty=1.1)
RAGGED = [[1, 2, 3], [4] * 9, [5, 6] * 5, [7, 8, 9, 10, 11]]
CONTEXT, LENGTH = 12, 24  # three slides or more for each of these


def by_hand(model: Transformer, prompt: list[int], n: int) -> list[int]:
    """Greedy text by the rule: a text that outgrows the context keeps the last half of it and goes on."""
    window, new = prompt[-model.config.context_length :], []
    for _ in range(n):
        new.append(int(model(torch.tensor([window]))[0, -1].argmax()))
        window = [*window, new[-1]]
        if len(window) > model.config.context_length:
            window = window[-max(1, model.config.context_length // 2) :]
    return new


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_greedy_text_is_the_best_next_id_again_and_again_through_slides(position, use_cache):
    model, prompt = tiny(position=position), random_ids(1, 10)[0].tolist()
    assert generate(model, [prompt], 40, sampling=GREEDY, use_cache=use_cache) == [by_hand(model, prompt, 40)]


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
def test_cached_is_uncached_and_together_is_alone(position, layout, overflow):
    model = tiny(position=position, n_kv_heads=HEADS[layout], context_length=CONTEXT)
    for sampling in (GREEDY, FILTERED):
        options = {"sampling": sampling, "overflow": overflow}
        cached = generate(model, RAGGED, LENGTH, **options)
        assert cached == generate(model, RAGGED, LENGTH, **options, use_cache=False)
        expected = [CONTEXT - len(prompt) if overflow == "stop" else LENGTH for prompt in RAGGED]
        assert [len(row) for row in cached] == expected
    for r in (0, 2):  # two that slide at different steps
        assert generate(model, [RAGGED[r]], LENGTH, **options, seeds=r) == [cached[r]]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_scores_are_equal_to_ten_digits_through_slides(position, qk_norm):
    model = tiny(position=position, n_kv_heads=2, qk_norm=qk_norm, context_length=CONTEXT, dtype=torch.float64)
    both = (stream(model, RAGGED, LENGTH, sampling=SAMPLED, use_cache=use_cache) for use_cache in (True, False))
    for cached, whole in zip(*both, strict=True):
        torch.testing.assert_close(cached.logits, whole.logits, rtol=0, atol=1e-10)
        assert cached.ids == whole.ids


@pytest.mark.filterwarnings("ignore:of a prompt")
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_batch_is_row_by_row_what_each_prompt_gives_alone(data):
    overflow = data.draw(st.sampled_from(OVERFLOWS), "overflow")
    context = data.draw(st.integers(1 if overflow == "slide" else 2, 20), "context_length")
    longest = 24 if overflow == "slide" else context - 1
    model = tiny(
        position=data.draw(st.sampled_from(POSITIONS), "position"),
        n_kv_heads=data.draw(st.sampled_from([1, 2, 4]), "key heads"),
        context_length=context,
        dtype=torch.float64,
    )
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=3), "lengths")
    prompts = [random_ids(1, n, seed=r)[0].tolist() for r, n in enumerate(lengths)]
    options = {
        "max_new_tokens": data.draw(st.integers(0, 30), "max_new_tokens"),
        "sampling": data.draw(st.sampled_from([GREEDY, SAMPLED, FILTERED]), "sampling"),
        "stop_ids": data.draw(st.lists(st.integers(0, 49), max_size=3), "stop_ids"),
        "overflow": overflow,
    }
    seeds = data.draw(st.lists(st.integers(-(2**70), 2**70), min_size=len(prompts), max_size=len(prompts)), "seeds")
    together = generate(model, prompts, seeds=seeds, **options)
    assert together == generate(model, prompts, seeds=seeds, use_cache=False, **options)
    for prompt, seed, row in zip(prompts, seeds, together, strict=True):
        assert generate(model, [prompt], seeds=[seed], **options) == [row]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:of a prompt")
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_batch_at_length(data):
    test_any_batch_is_row_by_row_what_each_prompt_gives_alone.hypothesis.inner_test(data)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_that_ends_changes_no_other(use_cache):
    model = tiny(dtype=torch.float64)
    options = {"sampling": SAMPLED, "use_cache": use_cache}
    free = list(stream(model, RAGGED, 40, **options))
    ends = {0: 3, 2: 11}  # row: the step at which it is ended
    steps = {r: itertools.count(1) for r in range(4)}
    ended = list(stream(model, RAGGED, 40, **options, until=lambda r, token: next(steps[r]) == ends.get(r)))
    for n, (before, after) in enumerate(zip(free, ended, strict=True), 1):
        for r in range(4):
            if n > ends.get(r, 40):
                assert after.ids[r] is None and after.ended[r] == "stop"
            else:
                assert after.ids[r] == before.ids[r]
                torch.testing.assert_close(after.logits[r], before.logits[r], rtol=0, atol=1e-10)


def test_rows_say_why_they_ended():
    model = successor_model(b"abcdefgh", context_length=12)

    def ends(prompts: list[bytes], n: int, **options) -> list[str | None]:
        *_, last = stream(model, [list(p) for p in prompts], n, sampling=GREEDY, **options)
        return last.ended

    assert ends([b"a", b"b"], 5) == ["length", "length"]
    assert ends([b"a", b"b", b"abcdefg"], 9, overflow="stop", stop_ids=[ord("e")]) == ["stop", "stop", "context"]
    assert ends([b"a"], 9, until=lambda r, token: token == ord("d")) == ["stop"]
    assert ends([b"abcde"], 7, overflow="stop") == ["context"]  # its last token fills the context
    assert generate(model, [list(b"ab")], 9, sampling=GREEDY, stop_ids=[ord("d")]) == [list(b"cd")]
    assert generate(model, [list(b"d")], 3, sampling=GREEDY, stop_ids=[ord("d")]) == [list(b"efg")]  # a prompt ends nothing


def test_a_stream_ends_when_all_rows_have():
    model = successor_model(b"abcdefgh")
    steps = list(stream(model, [list(b"a"), list(b"c")], 50, sampling=GREEDY, stop_ids=[ord("e")]))
    assert [step.ids for step in steps] == [[ord("b"), ord("d")], [ord("c"), ord("e")], [ord("d"), None], [ord("e"), None]]


def snapshot(model: Transformer) -> dict:
    return {
        "modes": [module.training for module in model.modules()],
        "state": {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()},
        "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "random": torch.get_rng_state(),
        "enabled": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_the_model_is_left_as_it_was(mode, interrupted):
    model = tiny(dropout=0.5).train(mode != "eval")
    if mode == "mixed":
        model.blocks[0].eval()
    torch.rand(1)  # leaves the generator where no seed puts it
    before = snapshot(model)
    steps = stream(model, RAGGED, 40, sampling=FILTERED)
    for n, _ in enumerate(steps):
        between = snapshot(model)  # whoever reads a stream may train on
        assert between["modes"] == before["modes"] and between["enabled"] == before["enabled"]
        if interrupted and n == 3:
            steps.close()
            break
    after = snapshot(model)
    for name, (tensor, address) in after.pop("state").items():
        expected, expected_address = before["state"][name]
        assert torch.equal(tensor, expected) and address == expected_address
    assert torch.equal(after.pop("random"), before["random"])
    assert all(after[key] == before[key] for key in after)
    assert all(grad is None for _, grad in after["gradients"])


def test_an_error_leaves_the_model_as_it_was_too():
    model = tiny(dropout=0.5).train()

    def fail(*_) -> None:
        raise RuntimeError("in the middle")

    model.blocks[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        generate(model, RAGGED, 5)
    assert model.training and model.blocks[0].training and torch.is_grad_enabled()


def test_logits_carry_no_graph():
    for step in stream(tiny().train(), RAGGED, 3):
        assert not step.logits.requires_grad


def test_a_second_call_gives_the_same_and_dropout_plays_no_part():
    model = tiny(dropout=0.5)
    first = generate(model, RAGGED, 40, sampling=SAMPLED)
    assert generate(model, RAGGED, 40, sampling=SAMPLED) == first
    assert generate(model.train(), RAGGED, 40, sampling=SAMPLED) == first


def test_a_training_step_between_calls_changes_the_text_and_no_law():
    model = tiny(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = generate(model, RAGGED, 40, sampling=SAMPLED)
    model.train()
    model(random_ids(2, 9)).logsumexp(-1).mean().backward()
    optimizer.step()
    cached = generate(model, RAGGED, 40, sampling=SAMPLED)
    assert cached != before
    assert cached == generate(model, RAGGED, 40, sampling=SAMPLED, use_cache=False)
    assert model.training and all(p.grad is not None for p in model.parameters())


def test_streams_can_run_side_by_side():
    model = tiny()
    alone = [[step.ids for step in stream(model, RAGGED, 30, sampling=SAMPLED, seeds=s)] for s in (1, 2)]
    both = zip(*(stream(model, RAGGED, 30, sampling=SAMPLED, seeds=s) for s in (1, 2)), strict=True)
    assert [list(ids) for ids in zip(*((a.ids, b.ids) for a, b in both), strict=True)] == alone


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=5.0)], ids=repr)
def test_ids_beyond_the_tokenizer_are_never_written(sampling):
    """The head is padded to 64 rows, and the padding would win every time."""
    model = tiny(vocab_size=64, tie_embeddings=False)
    with torch.no_grad():
        model.head.weight[50:] = 100 * model.head.weight[50:].abs()
    prompts = [[1, 2], [3]]
    assert max(max(row) for row in generate(model, prompts, 30, sampling=sampling)) >= 50
    for use_cache in (True, False):
        for step in stream(model, prompts, 30, sampling=sampling, n_vocab=50, use_cache=use_cache):
            assert max(step.ids) < 50
            assert (step.logits[:, 50:] == -torch.inf).all()


def test_seeds_reproduce_and_a_number_stands_for_a_run_of_seeds():
    model = tiny()
    prompts = [[1, 2, 3]] * 4
    together = generate(model, prompts, 30, sampling=SAMPLED, seeds=7)
    assert together == generate(model, prompts, 30, sampling=SAMPLED, seeds=[7, 8, 9, 10])
    assert [generate(model, [[1, 2, 3]], 30, sampling=SAMPLED, seeds=7 + i)[0] for i in range(4)] == together
    assert len({tuple(row) for row in together}) == 4
    with pytest.raises(ValueError, match="3 seeds for 4 prompts"):
        generate(model, prompts, 1, seeds=[1, 2, 3])


def test_prompts_that_are_alike_are_read_once_and_give_what_each_gives_alone():
    model, read = tiny(), []
    prompts = [RAGGED[r] for r in (0, 1, 0, 2, 2, 1)]
    alone = [generate(model, [prompt], 30, sampling=SAMPLED, seeds=r)[0] for r, prompt in enumerate(prompts)]
    model.embed.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape))
    assert generate(model, prompts, 30, sampling=SAMPLED) == alone
    assert read[:2] == [(3, 10), (6, 1)]


def test_each_token_is_drawn_by_its_rows_seed_and_its_position():
    model, seeds = tiny(), [3, 1, 4, 1]
    for n, step in enumerate(stream(model, RAGGED, 20, sampling=SAMPLED, seeds=seeds)):
        at = torch.tensor([len(prompt) + n for prompt in RAGGED])
        assert step.ids == SAMPLED.choose(step.logits, None, torch.tensor(seeds), at).tolist()


def test_sampling_draws_from_the_models_distribution():
    model = tiny(dtype=torch.float64)
    n = 4000
    first = torch.tensor([row[0] for row in generate(model, [[1, 2, 3]] * n, 1, sampling=Sampling())])
    expected = n * model(torch.tensor([[1, 2, 3]]))[0, -1].softmax(-1)
    counts = torch.bincount(first, minlength=50)
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    assert common.sum() > 5
    assert statistic < 100  # 38 degrees of freedom at most: exceeded by chance in one of 10 million


def test_every_prompt_of_a_step_is_scored_in_bfloat16_too():
    model = tiny(dtype=torch.bfloat16)
    rows = generate(model, RAGGED, 40, sampling=SAMPLED)
    assert [len(row) for row in rows] == [40] * 4
    cached, whole = (next(iter(stream(model, RAGGED, 1, use_cache=c))).logits for c in (True, False))
    assert cached.dtype == torch.bfloat16 and torch.equal(cached, whole)


def test_a_prompt_longer_than_the_context_keeps_its_last_tokens_with_a_warning():
    model, prompt = tiny(), random_ids(1, 30)[0].tolist()
    for use_cache in (True, False):
        with pytest.warns(UserWarning, match="30 tokens.*last 16"):
            found = generate(model, [prompt], 20, sampling=GREEDY, use_cache=use_cache)
        assert found == generate(model, [prompt[-16:]], 20, sampling=GREEDY)


@pytest.mark.parametrize("length", [16, 17])
def test_a_prompt_that_fills_the_context_is_refused_when_text_may_not_slide(length):
    with pytest.raises(ValueError, match=f"{length} tokens.*context of 16.*overflow=slide"):
        generate(tiny(), [[1] * length], 5, overflow="stop")
    assert len(generate(tiny(), [[1] * 15], 5, overflow="stop")[0]) == 1


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_context_of_one_token_works(use_cache):
    model = tiny(context_length=1)
    assert generate(model, [[3], [5]], 9, sampling=GREEDY, use_cache=use_cache) == [by_hand(model, [t], 9) for t in (3, 5)]


def test_no_tokens_asked_for_none_given():
    assert generate(tiny(), RAGGED, 0) == [[], [], [], []]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompt"),
        ([[1], []], {}, "empty.*end-of-text"),
        ([[50]], {}, "50 to 50.*49"),
        ([[-1, 3]], {}, "-1 to 3"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([[1]], {"overflow": "wrap"}, "overflow=wrap.*slide, stop"),
    ],
)
def test_refuses_what_cannot_be_continued_before_the_first_step(prompts, options, message):
    with pytest.raises(ValueError, match=message) as error:
        stream(tiny(), prompts, **{"max_new_tokens": 5, **options})
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("position", POSITIONS)
def test_a_real_context_slides_the_same_way(position):
    """A context of several blocks, a long text, three slides."""
    model = tiny(position=position, context_length=300, dtype=torch.float64)
    prompts = [random_ids(1, n, seed=n)[0].tolist() for n in (3, 290, 150)]
    cached = generate(model, prompts, 420, sampling=SAMPLED)
    assert cached == generate(model, prompts, 420, sampling=SAMPLED, use_cache=False)
