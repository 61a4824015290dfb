"""Ids one by one to text that can be printed at once."""

import codecs
from collections.abc import Sequence

from data.tokenizer import Tokenizer


class TextStream:
    """Gives text as soon as its characters are whole and it cannot be the beginning of a stop string.

    Of the stop string that is complete first, and of what follows, nothing is given. Bytes that are no UTF-8
    become U+FFFD. The ids are those of a text that goes on: a foreign tokenizer's leading blank is kept.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ValueError("an empty stop string would stop at once: give a text of at least one character")
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self.held = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._give(self.decoder.decode(self.tokenizer.token_bytes(token)), final=False)

    def flush(self) -> str:
        return self._give(self.decoder.decode(b"", final=True), final=True)

    def _give(self, text: str, final: bool) -> str:
        self.held += "" if self.stopped else text
        ends = [(self.held.find(stop) + len(stop), -len(stop)) for stop in self.stop if stop in self.held]
        if ends:  # the first to end and, of these, the longest
            self.stopped, self.held = True, self.held[: sum(min(ends))]
        uncertain = 0 if final or self.stopped else self._uncertain()
        given, self.held = self.held[: len(self.held) - uncertain], self.held[len(self.held) - uncertain :]
        return given

    def _uncertain(self) -> int:
        """The length of the longest end of the held text with which a stop string begins."""
        longest = min(len(self.held), max(map(len, self.stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self.held[-n:]) for s in self.stop)), 0)
