"""What the model chose, and what else it might have said."""

import math

from data.tokenizer import Tokenizer
from model.generation import Step
from sampling.text import spell

HEADING = f"{'token':<20} {'p':>6} {'ln p':>8}   the best of the others"


def alternatives(tokenizer: Tokenizer, step: Step, row: int, count: int) -> str:
    """One line under HEADING: the id that the row got, its probability, its logarithm, and the `count` best others.

    The probabilities are the model's own, before penalties, temperature and filters.
    """
    chosen = step.ids[row]
    assert chosen is not None, "the row had ended"
    logarithms = step.logits[row, : tokenizer.n_vocab].float().log_softmax(dim=-1)
    best = logarithms.topk(min(count + 1, logarithms.numel())).indices.tolist()
    others = [token for token in best if token != chosen][:count]
    ln_p = logarithms[chosen].item()
    shown = "  ".join(f"{quoted(tokenizer, token)} {logarithms[token].exp().item():.4f}" for token in others)
    return f"{quoted(tokenizer, chosen):<20} {math.exp(ln_p):.4f} {ln_p:8.3f}   {shown}"


def quoted(tokenizer: Tokenizer, token: int) -> str:
    return f"'{spell(tokenizer, token)}'"
