"""A model can learn a source to its entropy, and no further: on held-out text its loss lies between the two."""

import math

import numpy as np
import pytest
import torch

from data.batches import Windows
from model import ModelConfig, Transformer
from tests.token_files import token_file
from training.objective import NextTokenLoss
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer, set_learning_rate
from training.schedule import ScheduleConfig, learning_rate_share

SYMBOLS, CONTEXT, STEPS, BATCH = 8, 32, 300, 32


def markov_chain(length: int, generator: np.random.Generator, transitions: np.ndarray) -> np.ndarray:
    uniform = generator.random(length)
    follows = [np.searchsorted(ends, uniform, side="right").clip(max=SYMBOLS - 1).tolist() for ends in transitions.cumsum(1)]
    ids = [0]
    for i in range(1, length):
        ids.append(follows[ids[-1]][i])
    return np.array(ids)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_loss_reaches_the_entropy_of_a_markov_source_and_does_not_pass_it(tmp_path, name):
    generator = np.random.default_rng(0)
    transitions = generator.dirichlet(np.full(SYMBOLS, 0.5), SYMBOLS)
    train = token_file(tmp_path / "train", markov_chain(300_000, generator, transitions))
    held_out = token_file(tmp_path / "val", markov_chain(60_000, generator, transitions))

    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=SYMBOLS, context_length=CONTEXT, n_layers=2, n_heads=2, d_model=32, qk_norm=True))
    objective = NextTokenLoss(model)
    optimizer = make_optimizer(OptimizerConfig(name=name, lr=0.01), model)
    schedule = ScheduleConfig(warmup_steps=20, final=0.0)
    windows = Windows(train, CONTEXT, seed=0)
    for step in range(STEPS):
        set_learning_rate(optimizer, learning_rate_share(schedule, step, STEPS))
        loss, n = objective(*windows.batch(range(step * BATCH, (step + 1) * BATCH)))
        (loss / n).backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    validation = Windows(held_out, CONTEXT, seed=None)
    tokens, targets = validation.batch(range(len(validation) - 1))
    with torch.no_grad():
        log_p = model(tokens).log_softmax(-1)
    ours = -log_p.gather(-1, targets[..., None])[..., 0].flatten().double().numpy()
    true = -np.log(transitions[tokens.numpy(), targets.numpy()]).flatten()
    stationary = np.linalg.matrix_power(transitions, 200)[0]
    entropy = -(stationary[:, None] * transitions * np.log(transitions)).sum()
    difference = ours - true  # the same tokens, so that the luck of the draw cancels
    error = difference.std() / math.sqrt(len(difference))
    assert -3 * error < difference.mean() < 0.02 * entropy, (difference.mean(), error, entropy)
