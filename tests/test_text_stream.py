from hypothesis import given
from hypothesis import strategies as st

from data.text_stream import TextStream
from data.tokenizer import TokenizerConfig, build_tokenizer

BYTES = build_tokenizer(TokenizerConfig("bytes"), list)


def stream(text: str, stop: tuple[str, ...] = ()) -> list[str]:
    """What each byte of the text, and the end, makes the stream give."""
    out = TextStream(BYTES, stop)
    return [*(out.push(byte) for byte in text.encode()), out.flush()]


def until_stop(text: str, stop: tuple[str, ...]) -> str:
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[:end].removesuffix(max(found, key=len))
    return text


def test_characters_are_given_whole():
    assert stream("aé€😀") == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


@given(st.text())
def test_all_text_is_given(text):
    assert "".join(stream(text)) == text


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_given(text, stop):
    assert "".join(stream(text, tuple(stop))) == until_stop(text, tuple(stop))


def test_text_is_held_only_while_it_may_become_a_stop_string():
    out = TextStream(BYTES, ["\n\n"])
    assert [out.push(byte) for byte in b"a\nb\n"] == ["a", "", "\nb", ""]
    assert not out.stopped
    assert [out.push(byte) for byte in b"\nc"] == ["", ""]
    assert out.stopped and out.flush() == ""


def test_a_stop_string_inside_one_token_ends_the_text():
    bpe = build_tokenizer(TokenizerConfig("bpe", 300), lambda: ["xENDy " * 50])
    ids = bpe.encode("xENDy")
    assert len(ids) < 5
    out = TextStream(bpe, ["END"])
    assert "".join(map(out.push, ids)) == "x"


def test_bytes_that_end_inside_a_character_are_replaced():
    out = TextStream(BYTES)
    assert [out.push(byte) for byte in "€".encode()[:2]] == ["", ""]
    assert out.flush() == "\ufffd"


def test_an_empty_stop_string_is_refused():
    try:
        TextStream(BYTES, ["a", ""])
    except ValueError as error:
        assert "empty stop string" in str(error)
    else:
        raise AssertionError
