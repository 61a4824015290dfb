"""A step can be recorded and replayed: nothing in it depends on what the host counts, and nothing waits for the device.

There need be no GPU: `Tape` is a recording as CUDA's is (it repeats the operations on the same memory, does nothing while
recording, and knows nothing of Python), and torch's device "meta" has no numbers to hand out.
"""

import gc
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import ModelConfig, Sampling, Transformer, stream
from model.cache import BLOCK
from model.generation import Cached, Row, run
from model.recording import Recorded, recorder
from model.sampling import Chooser
from tests.tiny_models import POSITIONS, random_ids, tiny

GREEDY = Sampling(temperature=0)
FILTERED = Sampling(temperature=1.5, top_k=30, top_p=0.95, min_p=0.001, repetition_penalty=1.1)
RAGGED = [[1, 2, 3], [4] * 9, [5, 6] * 5, [7, 8, 9, 10, 11]]


class Tape(TorchDispatchMode):
    """Records a step's operations; `replay` repeats them on the tensors that they had, results included."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.replayed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for declared, value in zip(func._schema.arguments, args, strict=False):
            if declared.is_write:
                self.before.setdefault(id(value), (value, value.clone()))
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def record(self, step):
        self.operations, self.before = [], {}
        with self:
            results = step()
        for value, was in reversed(self.before.values()):
            value.copy_(was)
        operations = self.operations

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, old in operations:
                for was, now in zip(tree_leaves(old), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                        was.copy_(now)

        return replay, results


class StaysOn(TorchDispatchMode):
    """No operation may meet a tensor of another device: copies between devices cannot be recorded either."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        met = [leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        assert set(met) <= {self.device}, f"{func} meets {met}"
        return result


def written(model, prompts, n, record, ahead, *, sampling=FILTERED, overflow="slide", stop_ids=(), n_vocab=45):
    """As `stream` writes, but with steps recorded, and the next one begun before the last ids are read."""
    rows = [Row(list(prompt)) for prompt in prompts]
    chooser = Chooser(sampling, prompts, range(len(prompts)), 50, n_vocab, torch.device("cpu"))
    writer = Cached(model, chooser, rows, n)
    writer.step.record, writer.runs_ahead = record, ahead
    return list(run(writer, rows, n, set(stop_ids), None, overflow))


def assert_alike(steps, expected):
    assert [(step.ids, step.ended) for step in steps] == [(step.ids, step.ended) for step in expected]
    for step, plain in zip(steps, expected, strict=True):
        running = [r for r, token in enumerate(plain.ids) if token is not None]
        torch.testing.assert_close(step.logits[running], plain.logits[running], rtol=0, atol=1e-10)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_replayed_steps_write_what_a_step_at_a_time_writes(position, ahead):
    model = tiny(position=position, n_kv_heads=2, context_length=12, dtype=torch.float64)
    for options in ({}, {"overflow": "stop"}, {"stop_ids": (3, 17, 30, 31, 32, 33), "sampling": GREEDY}):
        tape = Tape()
        steps = written(model, RAGGED, 40, tape.record, ahead, **options)
        assert tape.replayed > (0 if options.get("overflow") == "stop" else 5)
        assert_alike(steps, list(stream(model, RAGGED, 40, n_vocab=45, **{"sampling": FILTERED, **options})))


@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_token_with_nothing_before_it_has_a_recording_of_its_own(context):
    model = tiny(context_length=context, dtype=torch.float64)
    for prompts in ([[1]], [[2, 3][:context]], [[1], [5, 4][:context]]):
        steps = written(model, prompts, 20, Tape().record, True)
        assert_alike(steps, list(stream(model, prompts, 20, sampling=FILTERED, n_vocab=45)))


def test_each_block_of_lengths_has_its_own_recording():
    model = tiny(context_length=2 * BLOCK + 20, dtype=torch.float64)
    prompts, tape = random_ids(2, BLOCK - 10).tolist(), Tape()
    steps = written(model, prompts, BLOCK + 60, tape.record, True)  # into the third block, and back by a slide
    assert_alike(steps, list(stream(model, prompts, BLOCK + 60, sampling=FILTERED, n_vocab=45)))
    assert tape.replayed == BLOCK + 60 - 1 - 3  # all but the prompts' step and one of each block


@pytest.mark.parametrize("sampling", [GREEDY, FILTERED], ids=["greedy", "filtered"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_step_never_asks_the_device_for_a_number(position, sampling):
    sizes = {"vocab_size": 50, "context_length": 300, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32}
    with torch.device("meta"), torch.no_grad():
        model = Transformer(ModelConfig(**sizes, position=position))
        rows = [Row([1] * 100), Row([1] * 5)]
        chooser = Chooser(sampling, [row.window for row in rows], [0, 1], 50, 45, torch.device("meta"))
        writer = Cached(model, chooser, rows, 100)
        writer.cache.advance(100)
        with StaysOn("meta"):
            ids, logits = writer.step.work()
        assert ids.is_meta and logits.is_meta and ids.shape == (2,) and logits.shape == (2, 50)
        with pytest.raises(RuntimeError):  # as anything else does that would wait
            bool(logits.max() > 3)


def test_what_cannot_be_recorded_is_told_once_and_decoding_goes_on():
    def fails(step):
        Tape().record(step)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = tiny(context_length=12)
    for prompts in (RAGGED, [[1] * 10]):  # the second fills the context with the step that fails
        with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted when stream is capturing$") as told:
            steps = written(model, prompts, 30, fails, True)
        assert len(told) == 1
        assert_alike(steps, list(stream(model, prompts, 30, sampling=FILTERED, n_vocab=45)))


def test_the_cache_goes_when_the_text_is_written():
    """At once: a cache may be most of the memory, and what Python finds by looking for cycles it finds late."""
    model, rows = tiny(), [Row([1, 2, 3])]
    gc.disable()
    try:
        writer = Cached(model, Chooser(GREEDY, [[1]], [0], 50, None, torch.device("cpu")), rows, 5)
        memory = weakref.ref(writer.cache)
        steps = list(run(writer, rows, 5, set(), None, "slide"))
        del writer
        assert len(steps) == 5 and memory() is None
    finally:
        gc.enable()


def test_results_are_kept_when_the_next_replay_writes_over_them():
    counter = torch.zeros(())
    step = Recorded(lambda: (counter.add_(1),), lambda: 0, Tape().record)
    assert step()[0] == 1
    results = [step()[0] for _ in range(3)]
    assert results == [2, 3, 4]


def test_only_on_cuda_and_only_without_hooks():
    model = tiny()
    assert recorder(model, torch.device("cpu")) is None
    assert recorder(model, torch.device("cuda")) is not None
    hook = model.blocks[1].register_forward_hook(lambda *_: None)
    assert recorder(model, torch.device("cuda")) is None
    hook.remove()
    assert recorder(model.train(), torch.device("cuda")) is None  # a failure may cost training its random numbers
    assert recorder(model.eval(), torch.device("cuda")) is not None


@pytest.mark.parametrize("ahead", [False, True])
def test_scores_that_are_no_numbers_are_refused_whatever_is_on_its_way(ahead):
    model = tiny(context_length=12)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN"):
        written(model, RAGGED, 4, Tape().record, ahead)
