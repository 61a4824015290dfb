"""What the model chose, and what else it might have said."""

import re

import pytest
import torch

from model import Sampling
from sampling.alternatives import alternatives
from sampling.text import write
from tests.tiny_models import BYTES, tiny


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=3.0, top_k=20, repetition_penalty=2.0)], ids=repr
)
def test_shows_the_models_own_probabilities_best_others_first(sampling):
    model = tiny(vocab_size=300, dtype=torch.float64)
    text = list(b"abc")
    for written in write(model, BYTES, ["abc"], 8, sampling=sampling):
        chosen = written.step.ids[0]
        logits = model(torch.tensor([text]))[0, -1]
        logits[257:] = -torch.inf
        p = logits.softmax(-1)
        line = alternatives(BYTES, written.step, 0, 4)
        found = [float(number) for number in re.findall(r" (\d\.\d{4})(?= |$)", line)]
        others = [q for i, q in enumerate(p.tolist()) if i != chosen]
        assert found == pytest.approx([p[chosen].item(), *sorted(others, reverse=True)[:4]], abs=6e-5)
        assert float(re.search(r"(-?\d+\.\d{3})\b(?!\d)", line)[1]) == pytest.approx(p[chosen].log().item(), abs=6e-4)
        text.append(chosen)


def test_names_tokens_and_asks_for_no_more_than_there_are():
    written = next(write(tiny(vocab_size=300), BYTES, ["\n"], 1, sampling=Sampling(temperature=0)))
    line = alternatives(BYTES, written.step, 0, 1000)
    assert "'\\n'" in line and "'<|endoftext|>'" in line
    assert len(re.findall(r"0\.\d{4}", line)) == 257
    assert alternatives(BYTES, written.step, 0, 0).count("'") == 2
