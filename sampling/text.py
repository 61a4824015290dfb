"""Prompts to text: ids for the model, whole characters for the reader."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.text_stream import TextStream
from data.tokenizer import Tokenizer
from model import Transformer, stream
from model.generation import Step


@dataclass
class Written:
    """What one step adds. `pieces[r]`: the characters of row r that are now whole and no part of a stop string."""

    pieces: list[str]
    step: Step


def complete(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int, **options: Any) -> list[str]:
    """The continuation of each prompt, without the prompt. The options are those of `write`."""
    texts = [""] * len(prompts)
    for written in write(model, tokenizer, prompts, max_new_tokens, **options):
        texts = [text + piece for text, piece in zip(texts, written.pieces, strict=True)]
    return texts


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    stop: Sequence[str] = (),
    special: bool = False,
    **options: Any,
) -> Iterator[Written]:
    """Continue the prompts, step by step, until end-of-text, a stop string, or max_new_tokens.

    stop       strings that end a row, wherever tokens begin and end; neither they nor end-of-text are part of the text
    special    text in a prompt that spells a special token means that token
    options    sampling, seeds, overflow, use_cache, compile: see `model.stream`
    """
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    pieces = [""] * len(prompts)

    def until(r: int, token: int) -> bool:
        pieces[r] = streams[r].push(token)
        return streams[r].stopped

    ids = [prompt_ids(tokenizer, prompt, special) for prompt in prompts]
    steps = stream(model, ids, max_new_tokens, n_vocab=tokenizer.n_vocab, stop_ids=tokenizer.ends, until=until, **options)

    def with_text() -> Iterator[Written]:
        """Each step with the pieces that it filled, and at a row's end what was held back."""
        for step in steps:
            for r, (token, ended) in enumerate(zip(step.ids, step.ended, strict=True)):
                if token is not None and ended is not None:
                    pieces[r] += streams[r].flush()
            yield Written(pieces.copy(), step)
            pieces[:] = [""] * len(pieces)

    return with_text()


def prompt_ids(tokenizer: Tokenizer, prompt: str, special: bool = False) -> list[int]:
    """The prompt after what the tokenizer's makers put before every text; if that is nothing at all, end-of-text."""
    ids, prefix = tokenizer.encode(prompt, special=special), tokenizer.prefix
    if ids[: len(prefix)] != prefix:  # a chat prompt may spell it out
        ids = prefix + ids
    return ids or [tokenizer.end_of_text]


def spell(tokenizer: Tokenizer, token: int) -> str:
    """A token for the eye: line ends and other invisible characters as \\n, \\t, bytes that are no character as \\xe2."""
    spelled = tokenizer.token_bytes(token)
    try:
        return repr(spelled.decode())[1:-1]
    except UnicodeDecodeError:
        return repr(spelled)[2:-1]
