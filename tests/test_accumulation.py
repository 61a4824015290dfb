"""A batch is one batch, however many micro-batches it is cut into."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from data.batches import Windows
from model import ModelConfig, Transformer
from tests.token_files import token_file
from training.batches import Batches, check_batch
from training.objective import IGNORED, NextTokenLoss, recompute_blocks
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer
from training.ranks import Ranks
from training.update import Precision, accumulate

CPU = torch.device("cpu")


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiples of odd numbers, modulo 40; rows have 0 to 15 ignored targets, the first has no other."""
    first = torch.randint(0, 20, (rows, 1), generator=torch.Generator().manual_seed(step)) * 2 + 1
    ids = first * torch.arange(1, 18) % 40
    targets = ids[:, 1:].clone()
    for row in range(rows):
        targets[row, : 16 if row == 0 else 2 * row] = IGNORED
    return ids[:, :-1], targets


def trainee(dtype: torch.dtype = torch.float32, **changes) -> NextTokenLoss:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 32}
    return NextTokenLoss(Transformer(ModelConfig(**sizes, **changes)).to(dtype))


def backward(objective: NextTokenLoss, step: int, micro: int) -> float:
    tokens, targets = batch(step)
    pieces = list(zip(tokens.split(micro), targets.split(micro), strict=True))
    n_targets, precision = int((targets != IGNORED).sum()), Precision(CPU, torch.float32)
    return accumulate(objective, pieces, n_targets, ranks=Ranks(), seed=(0, step), precision=precision).item()


def gradients(objective: NextTokenLoss) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_loss_and_gradients_do_not_depend_on_the_micro_batch(micro, dtype, tolerance):
    whole, cut = trainee(dtype), trainee(dtype)
    assert backward(cut, 0, micro) == pytest.approx(backward(whole, 0, 8), rel=tolerance)
    assert (gradients(cut) - gradients(whole)).norm() <= tolerance * gradients(whole).norm()


def test_the_gradient_is_that_of_the_mean_over_the_targets_that_count():
    objective = trainee(torch.float64)
    loss = backward(objective, 0, 2)
    found = gradients(objective)
    objective.zero_grad()
    tokens, targets = batch(0)
    mean = torch.nn.functional.cross_entropy(objective.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-12)
    torch.testing.assert_close(found, gradients(objective), rtol=1e-9, atol=1e-12)


def test_losses_of_20_steps_do_not_depend_on_the_micro_batch():
    found = []
    for micro in (8, 4, 1):
        objective = trainee()
        optimizer = make_optimizer(OptimizerConfig(lr=1e-2), objective.model)
        losses = []
        for step in range(20):
            losses.append(backward(objective, step, micro))
            clip_gradients(objective.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    assert found[0][-1] < found[0][0] - 0.5
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert found[2] == pytest.approx(found[0], abs=1e-5)


def test_clipping_looks_at_the_whole_batch():
    """Not at each micro-batch's gradient, which is larger in sum than the sum."""
    objective = trainee()
    backward(objective, 0, 1)
    norm = gradients(objective).norm()
    assert clip_gradients(objective.parameters(), 0.1).item() == pytest.approx(norm.item(), rel=1e-5)
    assert gradients(objective).norm().item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_activations_give_the_same_gradients(dropout):
    kept, recomputed = trainee(dropout=dropout), trainee(dropout=dropout)
    recompute_blocks(recomputed.model)
    assert backward(recomputed, 0, 4) == backward(kept, 0, 4)
    assert torch.equal(gradients(recomputed), gradients(kept))


def test_recomputation_keeps_less_for_the_backward_pass():
    def kept(recompute: bool) -> int:
        objective, sizes = trainee(), dict[int, int]()
        if recompute:
            recompute_blocks(objective.model)

        def pack(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            objective(*batch(0))
        return sum(sizes.values())

    assert kept(recompute=True) < kept(recompute=False) / 2


@dataclass
class Rank(Ranks):
    """One of several, as far as dividing goes: it sees no other, so it counts its own targets only."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return value


def test_dropout_is_decided_by_seed_step_rank_and_micro_batch_and_by_nothing_else():
    objective, (tokens, targets) = trainee(dropout=0.3), batch(0)
    n, precision = int((targets != IGNORED).sum()), Precision(CPU, torch.float32)

    def loss(seed: int = 0, step: int = 0, rank: int = 0, copies: int = 1) -> float:
        torch.manual_seed(len(losses))
        pieces, ranks = [(tokens, targets)] * copies, Rank(rank)
        return accumulate(objective, pieces, copies * n, ranks=ranks, seed=(seed, step), precision=precision).item()

    losses: list[float] = []
    for changed in ({}, {"seed": 1}, {"step": 1}, {"rank": 1}, {"copies": 2}):
        losses.append(loss(**changed))
    assert len(set(losses)) == 5
    assert loss() == losses[0]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("position", [0, 8, 37])
def test_ranks_and_micro_batches_share_out_the_batch_in_order(tmp_path, world, position):
    windows = Windows(token_file(tmp_path, np.arange(700) % 251), 16, seed=3)
    tokens, targets = windows.batch(range(position, position + 8))
    shares = [Batches(windows, 8, 2, Rank(rank, world), CPU).at(position) for rank in range(world)]
    assert all(len(pieces) == 8 // world // 2 for pieces, _ in shares)
    assert torch.equal(torch.cat([piece[0] for pieces, _ in shares for piece in pieces]), tokens)
    assert torch.equal(torch.cat([piece[1] for pieces, _ in shares for piece in pieces]), targets)
    assert sum(n for _, n in shares) == int((targets != IGNORED).sum())


def test_targets_that_the_last_window_repeats_are_not_counted(tmp_path):
    windows = Windows(token_file(tmp_path, np.arange(100)), 16, seed=None)  # 7 windows for 99 targets
    _, n = Batches(windows, 7, 7, Ranks(), CPU).at(0)
    assert n == 99


@pytest.mark.parametrize(
    ("batch_size", "micro", "world", "message"),
    [
        (5, None, 2, "batch_size=5 does not divide over 2 ranks: use a multiple of 2"),
        (2, None, 4, "batch_size=2 does not divide over 4 ranks"),
        (8, 3, 1, "micro_batch_size=3 does not divide the 8 sequences of each rank, batch_size=8 over 1 rank"),
        (8, 8, 2, "micro_batch_size=8 does not divide the 4 sequences of each rank, batch_size=8 over 2 rank"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(batch_size, micro, world, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        check_batch(batch_size, micro, world)


def test_the_micro_batch_is_a_ranks_whole_share_unless_told():
    assert check_batch(8, None, 2) == 4
    assert check_batch(8, 2, 2) == 2
