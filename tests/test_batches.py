import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from data.batches import IGNORED, Windows, permute
from data.token_file import TokenFile, TokenWriter, token_dtype


def token_file(folder: Path, n_tokens: int, shard: int = 1 << 28) -> TokenFile:
    """The ids 0, 1, 2, ..., so that an id is its own position."""
    dtype = token_dtype(n_tokens)
    writer = TokenWriter(folder, "train", dtype, shard=shard)
    writer.append(np.arange(n_tokens))
    return TokenFile(folder, "train", dtype, n_tokens, shard=shard)


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 2**40))
@example(65536, 7, 0)
@example(100_003, 7, 1)
def test_the_order_is_a_permutation_for_any_seed_and_epoch(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


def test_the_order_looks_random():
    """Neighbours, epochs and seeds are uncorrelated: 200 correlations of 1000 pairs, in standard deviations."""
    n = 1000
    orders = [permute(np.arange(n), n, seed, 0).astype(float) for seed in range(201)]
    following = [permute(np.arange(n), n, seed, 1).astype(float) for seed in range(200)]
    pairs = {
        "neighbours": [(order[:-1], order[1:]) for order in orders[:200]],
        "epochs": list(zip(orders, following, strict=False)),
        "seeds": list(zip(orders, orders[1:], strict=False)),
        "identity": [(order, np.arange(n)) for order in orders[:200]],
    }
    for name, chosen in pairs.items():
        scores = [np.corrcoef(a, b)[0, 1] * n**0.5 for a, b in chosen]
        assert abs(np.mean(scores)) < 4 / 200**0.5, name
        assert 0.8 < np.std(scores) < 1.2, name


def test_small_orders_are_all_equally_likely():
    counts = np.zeros(27)
    for seed in range(1200):
        counts[permute(np.arange(3), 3, seed, 0) @ [9, 3, 1]] += 1
    counts = counts[counts > 0]
    assert len(counts) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 20.5  # chi-squared, 5 degrees of freedom: 0.1%


def test_an_order_of_any_length_takes_no_memory():
    n = 10**12
    found = permute(np.arange(5), n, 1, 0)
    assert len(set(found.tolist())) == 5 and found.min() >= 0 and found.max() < n


@pytest.mark.parametrize("n_tokens", [9, 10, 11, 16, 17, 18, 24, 25, 100, 1001])
@pytest.mark.parametrize("seed", [None, 0, 5])
def test_every_id_but_the_first_is_a_target_once_an_epoch(n_tokens, seed, tmp_path):
    windows = Windows(token_file(tmp_path, n_tokens), 8, seed)
    for epoch in range(3):
        start = epoch * len(windows)
        tokens, targets = windows.batch(range(start, start + len(windows)))
        assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, n_tokens))
        counted = targets != IGNORED
        assert torch.equal(tokens[counted] + 1, targets[counted])


def test_batches_are_int64_on_the_cpu(tmp_path):
    tokens, targets = Windows(token_file(tmp_path, 100), 8, 0).batch([3, 1, 4])
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()


def test_a_window_depends_on_seed_and_position_alone(tmp_path):
    windows = Windows(token_file(tmp_path, 1001), 8, 3)
    n = len(windows)
    whole = windows.batch(range(2 * n))[0]
    in_threes = torch.cat([windows.batch(range(i, min(i + 3, 2 * n)))[0] for i in range(0, 2 * n, 3)])
    assert torch.equal(whole, in_threes)
    by_rank = [windows.batch(range(rank, 2 * n, 2))[0] for rank in range(2)]
    assert torch.equal(whole[0::2], by_rank[0]) and torch.equal(whole[1::2], by_rank[1])
    assert torch.equal(Windows(windows.tokens, 8, 3).batch([n + 5])[0], whole[n + 5 : n + 6])
    assert not torch.equal(whole[:n], whole[n:])
    assert not torch.equal(whole[:n], Windows(windows.tokens, 8, 4).batch(range(n))[0])


def test_without_a_seed_windows_come_in_order(tmp_path):
    tokens, _ = Windows(token_file(tmp_path, 33), 8, None).batch(range(5))
    assert tokens[:, 0].tolist() == [0, 8, 16, 24, 0]


def test_fewer_windows_than_a_batch_repeat_epoch_by_epoch(tmp_path):
    windows = Windows(token_file(tmp_path, 17), 8, 0)
    assert len(windows) == 2
    tokens, targets = windows.batch(range(10))
    assert sorted(tokens[:, 0].tolist()) == [0] * 5 + [8] * 5
    assert (targets != IGNORED).all()


@pytest.mark.parametrize("n_tokens", [0, 1, 8])
def test_fewer_tokens_than_a_window_are_refused(n_tokens, tmp_path):
    tokens = token_file(tmp_path, n_tokens)
    with pytest.raises(ValueError, match=f"train.bin holds {n_tokens} tokens; model.context_length=8 needs at least 9"):
        Windows(tokens, 8, 0)


def test_windows_cross_shards(tmp_path):
    sharded, whole = token_file(tmp_path, 1000, shard=7), np.arange(1000)
    assert len(list(tmp_path.glob("*.bin"))) == 143
    for start, stop in [(0, 1000), (6, 8), (7, 14), (13, 30), (999, 1000), (500, 500)]:
        assert np.array_equal(sharded.read(start, stop), whole[start:stop])
    tokens, _ = Windows(sharded, 16, 1).batch(range(63))
    assert torch.equal(tokens - tokens[:, :1], torch.arange(16).expand(63, 16))


def test_a_writer_goes_on_where_it_is_told(tmp_path):
    dtype = token_dtype(1000)
    TokenWriter(tmp_path, "train", dtype, shard=10).append(np.arange(57))
    for kept in (57, 50, 33, 10, 3, 0):
        writer = TokenWriter(tmp_path, "train", dtype, kept, shard=10)
        writer.append(np.arange(kept, 58))
        assert np.array_equal(TokenFile(tmp_path, "train", dtype, 58, shard=10).read(0, 58), np.arange(58))
        writer.truncate(57)


@pytest.mark.parametrize(("n_vocab", "itemsize"), [(257, 2), (65536, 2), (65537, 4), (200_019, 4)])
def test_ids_take_two_bytes_where_they_fit(n_vocab, itemsize, tmp_path):
    dtype = token_dtype(n_vocab)
    assert dtype.itemsize == itemsize
    TokenWriter(tmp_path, "train", dtype).append(np.array([n_vocab - 1]))
    assert TokenFile(tmp_path, "train", dtype, 1).read(0, 1).tolist() == [n_vocab - 1]


def test_a_file_of_the_wrong_size_is_refused(tmp_path):
    token_file(tmp_path, 100)
    with pytest.raises(ValueError, match="train.bin is damaged"):
        TokenFile(tmp_path, "train", np.dtype("<u2"), 101)


def test_a_huge_file_is_ready_at_once_and_batches_cost_little(tmp_path):
    n_tokens = 5 << 30
    shard = 1 << 28
    for index in range(n_tokens // shard):  # sparse: 10 GB that take no room on the disk
        with (tmp_path / (f"train.{index}.bin" if index else "train.bin")).open("wb") as file:
            file.truncate(2 * shard)
    began = time.monotonic()
    windows = Windows(TokenFile(tmp_path, "train", np.dtype("<u2"), n_tokens), 256, 0)
    windows.batch(range(16))
    assert time.monotonic() - began < 1
    costs = []
    for step in range(20):
        began = time.process_time()
        windows.batch(range(16 * step, 16 * step + 16))
        costs.append(time.process_time() - began)
    assert sorted(costs)[10] < 0.005  # tens of times that where the system reads ahead by megabytes
