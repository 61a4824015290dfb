"""From prompts to text: whole characters, stop strings wherever they fall, and nothing of what ends a text."""

import pytest
import torch

from data.tokenizer import TiktokenTokenizer, TokenizerConfig, build_tokenizer
from model import Sampling, generate
from sampling.text import complete, prompt_ids, spell, write
from tests.tiny_models import BYTES, successor_model, tiny

GREEDY = Sampling(temperature=0)


def bpe(text: str):
    return build_tokenizer(TokenizerConfig(name="bpe", vocab_size=300), lambda: [text])


def pieces(text: str, prompt: str, n: int, **options) -> list[str]:
    """What a model that is certain of `text` adds to a prompt, step by step."""
    model = successor_model(text.encode(), end=options.pop("end", None))
    steps = list(write(model, BYTES, [prompt], n, sampling=GREEDY, **options))
    return [written.pieces[0] for written in steps]


def test_characters_come_whole():
    assert pieces("aé€z", "a", 6) == ["", "é", "", "", "€", "z"]


def test_a_character_cut_off_at_the_end_is_marked_as_such():
    assert pieces("aé€z", "a", 4) == ["", "é", "", "\ufffd"]


@pytest.mark.parametrize(
    ("stop", "expected", "steps"),
    [
        (["d"], "bc", 3),
        (["cde"], "b", 4),  # over three tokens
        (["x", "ef", "cde"], "b", 4),
        (["cdx"], "bcdefgh", 7),  # begins like the text, and is not in it
        (["é"], "bcdefgh", 7),
    ],
)
def test_text_ends_before_a_stop_string_and_shows_nothing_of_it(stop, expected, steps):
    found = pieces("abcdefgh", "a", 7, stop=stop)
    assert "".join(found) == expected and len(found) == steps
    shown = ""
    for piece in found:
        shown += piece
        assert expected.startswith(shown)


def test_a_stop_string_in_the_prompt_ends_nothing():
    assert "".join(pieces("abcdefgh", "abc", 3, stop=["bc", "cd"])) == "def"


def test_what_was_held_back_for_a_stop_string_is_given_at_the_end():
    assert "".join(pieces("abcdefgh", "a", 3, stop=["defg"])) == "bcd"
    assert "".join(pieces("abcd", "a", 9, stop=["cdx"], end=BYTES.end_of_text)) == "bcd"


def test_text_ends_at_end_of_text_without_it():
    found = pieces("abcd", "a", 50, end=BYTES.end_of_text)
    assert found == ["b", "c", "d", ""]


def test_text_ends_at_any_of_the_tokenizers_ends():
    tokenizer = TiktokenTokenizer("bytes", BYTES.pattern, BYTES.ranks, BYTES.special)
    tokenizer.ends = [256, ord("f")]
    assert complete(successor_model(b"abcdefgh"), tokenizer, ["a", "g"], 20, sampling=GREEDY) == ["bcde", "habcde"]


def test_rows_end_on_their_own():
    model = successor_model(b"abcdefgh")
    options = {"sampling": GREEDY, "stop": ["ef", "hab"]}
    assert complete(model, BYTES, ["a", "f"], 6, **options) == ["bcd", "g"]
    for prompt, text in (("a", "bcd"), ("f", "g")):
        assert complete(model, BYTES, [prompt], 6, **options) == [text]


def test_pieces_add_up_to_the_decoded_ids():
    tokenizer = bpe("the cat sat on the mat, the rat ate the hat " * 20)
    model = tiny(vocab_size=320)
    prompts = ["the cat", "a", "éß€"]
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    options = {"sampling": Sampling(temperature=1.5), "seeds": 4}
    new = generate(model, ids, 60, n_vocab=tokenizer.n_vocab, stop_ids=[tokenizer.end_of_text], **options)
    expected = [tokenizer.decode([t for t in row if t != tokenizer.end_of_text]) for row in new]
    assert complete(model, tokenizer, prompts, 60, **options) == expected


@pytest.mark.parametrize("prompt", ["", "\n", " ", "\ufffd", "\x00", "<|endoftext|>", "-x"])
def test_odd_prompts_are_continued(prompt):
    for tokenizer in (BYTES, bpe("some words, and more of the same words " * 20)):
        (text,) = complete(tiny(vocab_size=300), tokenizer, [prompt], 5)
        assert isinstance(text, str)


def test_an_empty_prompt_begins_a_text():
    assert prompt_ids(BYTES, "") == [BYTES.end_of_text]
    assert prompt_ids(BYTES, "\n") == [10]


def test_text_that_spells_a_special_token_is_text_unless_special():
    assert prompt_ids(BYTES, "a<|endoftext|>") == list(b"a<|endoftext|>")
    assert prompt_ids(BYTES, "a<|endoftext|>", special=True) == [97, BYTES.end_of_text]


def test_what_the_tokenizers_makers_put_before_every_text_comes_once():
    tokenizer = TiktokenTokenizer("bytes", BYTES.pattern, BYTES.ranks, BYTES.special)
    tokenizer.prefix = [256]
    assert prompt_ids(tokenizer, "a") == [256, 97]
    assert prompt_ids(tokenizer, "") == [256]
    assert prompt_ids(tokenizer, "<|endoftext|>a", special=True) == [256, 97]


def test_ids_beyond_the_tokenizer_are_never_written():
    model = tiny(vocab_size=400, tie_embeddings=False)
    with torch.no_grad():
        model.head.weight[257:] = 100 * model.head.weight[257:].abs()
    (written, *_) = write(model, BYTES, ["a"], 3, sampling=GREEDY)
    assert written.step.ids[0] < 257


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty stop string"):
        complete(tiny(vocab_size=300), BYTES, ["a"], 3, stop=[""])


def test_tokens_are_spelled_for_the_eye():
    assert [spell(BYTES, token) for token in b"a \n\t\\\xc3"] == ["a", " ", "\\n", "\\t", "\\\\", "\\xc3"]
    assert spell(BYTES, BYTES.end_of_text) == "<|endoftext|>"
