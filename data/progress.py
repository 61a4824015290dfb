"""How far a preparation is: one line that renews itself on a terminal, a line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable

Report = Callable[[str], None]


def to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


class Progress:
    def __init__(self, what: str, report: Report | None) -> None:
        self.what, self.report = what, report or to_stderr
        self.terminal = report is None and sys.stderr.isatty()
        self.began = self.shown = 0.0
        self.first: tuple[int, float] | None = None  # what was done before: by an earlier process, or of another split

    def show(self, n_tokens: int, share: float | None) -> None:
        """`share` is the part of the work that is done, if it is known."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.began, self.shown = (n_tokens, share or 0.0), now, now
        if now - self.shown < (0.2 if self.terminal else 10.0):
            return
        self.shown = now
        rate, gained = (n_tokens - self.first[0]) / (now - self.began), (share or 0.0) - self.first[1]
        line = f"{self.what}: {n_tokens / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M tokens/s"
        if share is not None and gained > 0:
            left = int((now - self.began) / gained * max(0.0, 1 - share))
            line += f", {share:.0%}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        if self.terminal:
            sys.stderr.write(f"\r{line:<78}")
            sys.stderr.flush()
        else:
            self.report(line)

    def close(self) -> None:
        if self.terminal:
            sys.stderr.write(f"\r{'':<78}\r")
