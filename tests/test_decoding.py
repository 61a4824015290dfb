"""The compiled step says what the model says, without being compiled twice, whatever the text, the room and the weights."""

import warnings

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch._dynamo.utils import counters

from model import Sampling, Transformer, generate, stream
from model.cache import BLOCK
from model.decoding import AT_ONCE, SHALLOW, Compiled, OneToken, matrix_vector, warm_up
from tests.tiny_models import HEADS, POSITIONS, random_ids, tiny

GREEDY = Sampling(temperature=0)
DEEP = 2 * AT_ONCE
assert DEEP > SHALLOW


@pytest.fixture(autouse=True)
def must_compile():
    """A model that cannot be compiled is run as it is: here that would prove nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="decoding could not be compiled")
        yield


@pytest.fixture
def no_recompilation():
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture(scope="module")
def compiled() -> Transformer:
    """Compiled for two rows; all other tests of this module find the program ready."""
    torch.compiler.reset()
    model = tiny(context_length=2 * BLOCK + 8, n_kv_heads=2, qk_norm=True)
    assert warm_up(model, rows=2) is not None
    return model


def difference(model: Transformer, rows: int, filled: int, room: int | None, steps: int) -> float:
    """How far the compiled step's scores are from the model's, at most, over `steps` steps after `filled` tokens."""
    ids, worst = random_ids(rows, filled + steps), 0.0
    with torch.no_grad():
        caches = [model.new_cache(rows, room) for _ in range(2)]
        for cache in caches:
            model(ids[:, :filled], cache)
        step = Compiled(model, caches[0])
        for n in range(filled, filled + steps):
            one = torch.tensor(ids[:, n : n + 1].tolist())  # as generation makes it
            worst = max(worst, (step(one) - model(one, caches[1])).abs().max().item())
        assert caches[0].longest == filled + steps and torch.equal(caches[0].lengths, caches[1].lengths)
    return worst


@pytest.mark.parametrize(
    ("filled", "room"),
    [(filled, room) for filled in (1, BLOCK - 4, 2 * BLOCK - 4) for room in (None, BLOCK, 2 * BLOCK) if filled < (room or 999)],
)
def test_compiled_once_for_all_lengths_and_rooms(compiled, no_recompilation, filled, room):
    """From one block of lengths to the next, too, and where what is read is all the room there is."""
    steps = min(8, (room or compiled.config.context_length) - filled)
    assert difference(compiled, 2, filled, room, steps) < 1e-4


@pytest.mark.parametrize("overflow", ["slide", "stop"])
def test_greedy_text_is_the_same(compiled, no_recompilation, overflow):
    """Two rows of unequal length, past the end of the context."""
    prompts = [random_ids(1, n, seed=n)[0].tolist() for n in (3, 2 * BLOCK - 10)]
    texts = [generate(compiled, prompts, 40, sampling=GREEDY, overflow=overflow, compile=c) for c in (True, False)]
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [40, 40 if overflow == "slide" else 18]


def test_follows_the_weights_through_training(compiled, no_recompilation):
    before = {name: p.detach().clone() for name, p in compiled.named_parameters()}
    first = difference(compiled, 2, 5, None, 3)
    compiled.train()
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(random_ids(2, 9)).logsumexp(dim=-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    prompts = random_ids(2, 4).tolist()
    texts = [generate(compiled, prompts, 20, sampling=GREEDY, compile=c) for c in (True, False)]
    assert compiled.training and not torch.equal(before["embed.weight"], compiled.embed.weight)
    compiled.eval()
    with torch.no_grad():
        for name, p in compiled.named_parameters():
            p.copy_(before[name])
    assert texts[0] == texts[1]
    assert difference(compiled, 2, 5, None, 3) == first


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
def test_rewritten_products_are_the_same(position, layout, rows):
    model = tiny(position=position, n_kv_heads=HEADS[layout], bias=True, dtype=torch.float64)
    ids = random_ids(rows, 9)
    with torch.no_grad():
        caches = [model.new_cache(rows) for _ in range(2)]
        for cache in caches:
            model(ids[:, :5], cache)
        for n in range(5, 9):
            with OneToken():
                ours = model(ids[:, n : n + 1], caches[0])
            torch.testing.assert_close(ours, model(ids[:, n : n + 1], caches[1]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_lose_nothing(dtype):
    """Summed in float32 at least: off by no more than the rounding of the result."""
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in ((1, 1, 500), (300, 500), (300,)))
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(matrix_vector(x, weight, bias).double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-4)


@torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/c++",)})
def test_no_compiler_is_told_and_decoding_goes_on_without(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    model, prompts = tiny(), random_ids(2, 5).tolist()
    with pytest.warns(UserWarning, match="could not be compiled and goes on without: .*compiler") as told:
        text = generate(model, prompts, 9, sampling=GREEDY, compile=True)
        assert warm_up(model, 2) is None
    notices = [str(warning.message) for warning in told if "could not be compiled" in str(warning.message)]
    assert len(notices) == 2 and not any("\n" in notice for notice in notices)
    assert text == generate(model, prompts, 9, sampling=GREEDY)


def test_a_context_of_one_token_has_no_step_to_compile():
    model = tiny(context_length=1)
    assert warm_up(model, 2) is not None
    texts = [generate(model, [[3], [5]], 5, sampling=GREEDY, compile=c) for c in (True, False)]
    assert texts[0] == texts[1]


def test_compiling_is_for_the_cached_step():
    with pytest.raises(ValueError, match="leave use_cache=False out"):
        generate(tiny(), [[1]], 2, use_cache=False, compile=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "layout", "dtype", "rows", "most"),
    [  # rope has no bias on the scores, alibi has one
        ("rope", "mha", torch.float32, 1, 1e-4),
        ("rope", "gqa", torch.float64, 3, 1e-10),
        ("rope", "mqa", torch.bfloat16, 1, 0.5),
        ("alibi", "gqa", torch.float32, 3, 1e-4),
        ("alibi", "mha", torch.bfloat16, 1, 0.5),
    ],
)
def test_every_kind_of_model(position, layout, dtype, rows, most):
    torch.compiler.reset()
    layers = DEEP if rows == 1 else 2
    sizes = {"context_length": 2 * BLOCK, "n_layers": layers, "n_kv_heads": HEADS[layout]}
    model = tiny(position=position, bias=rows == 1, dtype=dtype, **sizes)
    with torch.no_grad():
        assert warm_up(model, rows) is not None
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert difference(model, rows, BLOCK - 3, None, 6) < most


@pytest.mark.parametrize("layers", [DEEP, SHALLOW + 1])
def test_the_blocks_of_a_deep_model_share_one_compilation(layers):
    """Also where their number has no divisor but itself."""
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    assert warm_up(tiny(n_layers=layers), 1) is not None
    assert counters["stats"]["unique_graphs"] - before == 2  # some blocks and the head


@pytest.mark.slow
def test_texts_that_take_turns_keep_to_their_own_programs():
    """The first step of a text looks for the programs that fit its model; the steps of others come between that and the next."""
    torch.compiler.reset()
    models = [
        tiny(seed=1),
        tiny(seed=2, n_layers=DEEP),
        tiny(seed=4, mlp="relu2", norm="layernorm", bias=True, dtype=torch.float64),
    ]
    cases = [(model, random_ids(rows, 4, seed=rows).tolist()) for model, rows in zip(models, (1, 1, 2), strict=True)]
    texts = [stream(model, prompts, 20, sampling=GREEDY, compile=True) for model, prompts in cases]
    together = list(zip(*texts, strict=True))
    for n, (model, prompts) in enumerate(cases):
        alone = stream(model, prompts, 20, sampling=GREEDY)
        for one, step in zip(alone, together, strict=True):
            assert step[n].ids == one.ids
            torch.testing.assert_close(step[n].logits, one.logits, rtol=0, atol=1e-4)
