"""With the cache the model says what it says without: any position, any heads, any pieces, any mixture of lengths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import KVCache, ModelConfig, Transformer
from model.cache import BLOCK
from tests.tiny_models import HEADS, POSITIONS, random_ids, tiny

CHUNKS = {"at once": [12], "1 + 11": [1, 11], "one by one": [1] * 12, "5 + 1 + 4 + 2": [5, 1, 4, 2]}


@torch.no_grad()
def in_chunks(model: Transformer, ids: torch.Tensor, chunks: list[int], cache: KVCache | None = None) -> torch.Tensor:
    cache = model.new_cache(ids.size(0)) if cache is None else cache
    return torch.cat([model(chunk, cache) for chunk in ids.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
def test_cached_is_uncached(position, layout, qk_norm):
    model, ids = tiny(position=position, n_kv_heads=HEADS[layout], qk_norm=qk_norm), random_ids(2, 12)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model.to(dtype)
        whole = model(ids)
        for chunks in CHUNKS.values():
            cached = in_chunks(model, ids, chunks)
            torch.testing.assert_close(cached, whole, rtol=0, atol=tolerance)
            assert torch.equal(cached.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
def test_cached_is_uncached_within_the_rounding_of_bfloat16(position, layout):
    exact = tiny(position=position, n_kv_heads=HEADS[layout], dtype=torch.float64)
    model, ids = tiny(position=position, n_kv_heads=HEADS[layout], dtype=torch.bfloat16), random_ids(4, 12)
    exact.load_state_dict(model.state_dict())
    truth = exact(ids)
    rounding = (model(ids) - truth).abs().max()
    for chunks in CHUNKS.values():
        assert (in_chunks(model, ids, chunks) - truth).abs().max() < 2 * rounding


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cached_is_uncached_for_any_shape_and_any_pieces(data):
    kv, groups = data.draw(st.integers(1, 3), "key heads"), data.draw(st.integers(1, 3), "queries to a key")
    model = tiny(
        seed=data.draw(st.integers(0, 99), "seed"),
        dtype=torch.float64,
        position=data.draw(st.sampled_from(POSITIONS), "position"),
        n_heads=kv * groups,
        n_kv_heads=kv,
        d_model=kv * groups * 2 * data.draw(st.integers(1, 4), "half a head"),
        qk_norm=data.draw(st.booleans(), "qk_norm"),
        norm=data.draw(st.sampled_from(["rmsnorm", "layernorm"]), "norm"),
    )
    lengths = data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=4), "lengths")
    ids = random_ids(len(lengths), 16, seed=data.draw(st.integers(0, 99), "ids"))
    pieces = data.draw(st.sampled_from([[5], [1] * 5, [2, 3], [3, 1, 1], [1, 4], [1], [4]]), "pieces")
    cache = model.new_cache(len(lengths))
    with torch.no_grad():
        model(ids[:, : max(lengths)], cache)
        cache.cut(lengths)
        after = torch.stack([row[n : n + sum(pieces)] for row, n in zip(ids, lengths, strict=True)])
        cached = in_chunks(model, after, pieces, cache)
        for r, n in enumerate(lengths):
            alone = model(ids[r : r + 1, : n + sum(pieces)])[0, n:]
            torch.testing.assert_close(cached[r], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("position", POSITIONS)
def test_blocks_are_crossed_unnoticed(position):
    model, ids = tiny(position=position, context_length=300, dtype=torch.float64), random_ids(2, 300)
    with torch.no_grad():
        whole = model(ids)
    cached = in_chunks(model, ids, [BLOCK - 2, 1, 1, 1, 1, 100, BLOCK - 100 - 2, 1, 1, 300 - 2 * BLOCK - 2])
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-10)


def test_what_lies_beyond_a_row_is_never_seen():
    model, ids = tiny(dtype=torch.float64), random_ids(2, 8)
    cache = model.new_cache(2)
    for layer in cache.layers:
        layer.keys.fill_(1e3)
        layer.values.fill_(1e3)
    torch.testing.assert_close(in_chunks(model, ids, [4, 1, 3], cache), model(ids), rtol=0, atol=1e-10)


def test_text_can_be_taken_back():
    model, ids, other = tiny(dtype=torch.float64), random_ids(2, 16), random_ids(2, 16, seed=2)
    cache = model.new_cache(2)
    in_chunks(model, ids, [16], cache)
    cache.cut([4, 4])
    again = in_chunks(model, other[:, 4:], [1, 11], cache)
    expected = model(torch.cat([ids[:, :4], other[:, 4:]], dim=1))[:, 4:]
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-10)


def test_a_row_can_be_filled_anew_without_touching_the_others():
    model, ids, other = tiny(dtype=torch.float64), random_ids(3, 8), random_ids(1, 5, seed=2)
    cache = model.new_cache(3)
    with torch.no_grad():
        model(ids[:, :6], cache)
        model(other[:, :4], cache.row(1))
        cache.cut([6, 4, 6])
        newest = torch.stack([ids[0, 6:7], other[0, 4:5], ids[2, 6:7]])
        logits = model(newest, cache)[:, 0]
        expected = torch.stack([model(ids[:1, :7])[0, -1], model(other)[0, -1], model(ids[2:, :7])[0, -1]])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_rows_can_be_copied_from_another_cache():
    model, ids = tiny(dtype=torch.float64), random_ids(2, 9)
    once, cache = model.new_cache(2), model.new_cache(3)
    with torch.no_grad():
        model(ids[:, :8], once)
        once.cut([8, 5])
        cache.copy_from(once, [1, 0, 1])
        logits = model(torch.stack([ids[1, 5:6], ids[0, 8:9], ids[1, 5:6]]), cache)[:, 0]
        short, long = model(ids[1:, :6])[0, -1], model(ids[:1])[0, -1]
    torch.testing.assert_close(logits, torch.stack([short, long, short]), rtol=0, atol=1e-10)
    assert cache.lengths.tolist() == [6, 9, 6] and cache.longest == 9


def test_memory_is_allocated_once_and_written_in_place():
    model, ids = tiny(), random_ids(2, 12)
    cache = model.new_cache(2)
    before = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    addresses = [tensor.data_ptr() for tensor in before]
    in_chunks(model, ids, [3, 1, 8], cache)
    after = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert all(a is b for a, b in zip(after, before, strict=True)) and [t.data_ptr() for t in after] == addresses
    assert cache.lengths.tolist() == [12, 12] and cache.longest == 12


@pytest.mark.parametrize(("filled", "read"), [(0, BLOCK), (BLOCK - 2, BLOCK), (BLOCK - 1, BLOCK), (BLOCK, 2 * BLOCK)])
def test_keys_are_read_in_whole_blocks_as_far_as_the_cache_is_filled(filled, read):
    cache = KVCache(ModelConfig(vocab_size=50, context_length=1000), 2)
    cache.advance(filled)
    assert cache.capacity == 8 * BLOCK and cache.reach(1) == read
    one = torch.ones(2, 6, 1, 64)
    keys, values = cache.layers[0].append(one, 2 * one, cache.positions(1), cache.reach(1))
    assert keys.shape == values.shape == (2, 6, read, 64)
    assert keys.sum() == 2 * 6 * 64 and (keys[:, :, filled] == 1).all() and (values[:, :, filled] == 2).all()


def test_fewer_key_heads_shrink_it():
    def elements(n_kv_heads: int) -> int:
        cache = tiny(n_kv_heads=n_kv_heads).new_cache(2)
        return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)

    assert elements(4) == 2 * elements(2) == 4 * elements(1)


def test_has_the_type_of_the_model():
    assert tiny(dtype=torch.bfloat16).new_cache(1).layers[0].keys.dtype == torch.bfloat16


def test_refuses_more_than_it_has_room_for():
    model = tiny(context_length=300)
    cache = model.new_cache(1, capacity=100)
    with pytest.raises(ValueError, match=f"{BLOCK} slots.*130"):
        in_chunks(model, random_ids(1, 130), [100, 30], cache)
    with pytest.raises(ValueError, match=f"{BLOCK} slots.*130"):
        model(random_ids(1, 130), model.new_cache(1, capacity=100))


def test_refuses_more_than_the_context():
    model = tiny()
    with pytest.raises(ValueError, match=r"12 \+ 5 tokens exceed model.context_length=16"):
        in_chunks(model, random_ids(1, 17), [12, 5])
