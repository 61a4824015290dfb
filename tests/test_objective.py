"""The loss is the mean surprise of the targets that count, however the batch and the head are cut."""

import math

import pytest
import torch
import torch.nn.functional as F

from model import ModelConfig, Transformer
from training import objective
from training.objective import IGNORED, NextTokenLoss


def tiny(**changes) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 32}
    return Transformer(ModelConfig(**{**sizes, **changes}))


def batch(ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 40, (6, 17), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[0, :ignored] = IGNORED
    return ids[:, :-1], targets


def test_is_the_sum_of_the_cross_entropies_of_the_targets_that_count():
    model, (tokens, targets) = tiny(), batch(ignored=5)
    loss, n = NextTokenLoss(model)(tokens, targets)
    log_p = model(tokens).log_softmax(-1)
    expected = -sum(log_p[i, j, targets[i, j]] for i in range(6) for j in range(16) if targets[i, j] != IGNORED)
    assert n == 6 * 16 - 5
    torch.testing.assert_close(loss, expected)


def test_a_new_model_is_as_surprised_as_a_uniform_guess():
    loss, n = NextTokenLoss(tiny())(*batch())
    assert abs(loss.item() / n.item() - math.log(40)) < 0.05


END = 7
PACKED = [[3, 9, END, 4, 8, 8, 1, END, 2, 5, 6], [END, 2, 2, 5, 3, 1, 9, 4, 6, 8, 0]]
DOCUMENTS = ([(0, 2), (2, 7), (7, 11)], [(0, 11)])  # an end-of-text begins the next one


@pytest.mark.parametrize("position", ["rope", "alibi", "none", "learned"])
def test_no_gradient_crosses_from_one_document_to_another(position):
    model = tiny(position=position)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(10)
    embedded: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda module, args, out: embedded.append(out.requires_grad_()) or out)
    tokens = torch.tensor(PACKED)
    for end_of_text, crosses in ((END, False), (None, True)):
        for row, documents in enumerate(DOCUMENTS):
            for start, stop in documents:
                targets = torch.full_like(tokens, IGNORED)
                targets[row, start:stop] = 1
                loss, _ = NextTokenLoss(model, end_of_text)(tokens, targets)
                (gradient,) = torch.autograd.grad(loss, embedded.pop())
                reached = gradient[row].abs().amax(-1) > 0
                assert reached[start:stop].all() and reached[:start].any() == (crosses and start > 0)
                assert not reached[stop:].any() and not gradient[1 - row].any()


@pytest.mark.parametrize("position", ["rope", "alibi", "none"])  # which see distances only
def test_a_document_kept_apart_is_worth_what_it_is_worth_alone(position):
    model, tokens = tiny(position=position), torch.tensor(PACKED)
    together = model.features(tokens, end_of_text=END)
    for row, documents in enumerate(DOCUMENTS):
        for start, stop in documents:
            torch.testing.assert_close(together[row, start:stop], model.features(tokens[row : row + 1, start:stop])[0])


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_cut_into_chunks_gives_the_same_loss_and_gradients(monkeypatch, tie):
    model, (tokens, targets) = tiny(tie_embeddings=tie).double(), batch(ignored=3)
    whole, _ = NextTokenLoss(model)(tokens, targets)
    whole.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(objective, "WHOLE", 40 * 14)  # 7 tokens a chunk, the last one smaller
    seen, linear = [], F.linear

    def watched(*args):
        out = linear(*args)
        seen.append(out.numel() if out.size(-1) == 40 else 0)
        return out

    monkeypatch.setattr(F, "linear", watched)
    chunked, _ = NextTokenLoss(model)(tokens, targets)
    chunked.backward()
    assert 0 < max(seen) <= 40 * 14, "logits of the whole batch were made"
    torch.testing.assert_close(chunked, whole)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-10, atol=1e-14)


def test_a_batch_without_targets_adds_nothing():
    tokens, targets = batch()
    loss, n = NextTokenLoss(tiny())(tokens, torch.full_like(targets, IGNORED))
    assert loss.item() == 0 and n.item() == 0


def test_scores_in_bfloat16_are_summed_in_float32():
    model, (tokens, targets) = tiny().bfloat16(), batch()
    loss, _ = NextTokenLoss(model)(tokens, targets)
    exact = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact)
