"""How far a long preparation is: a bar on a terminal, a line every ten seconds elsewhere. Always on stderr."""

import sys
import time
from collections.abc import Callable

Report = Callable[[str], None]


def to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class Progress:
    """`show` is cheap enough to be called for every piece of text."""

    def __init__(self, what: str, report: Report | None) -> None:
        self.what = what
        self.terminal = report is None and sys.stderr.isatty()
        self.report = report or to_stderr
        self.began = self.shown = time.monotonic()
        self.first: float | None = None  # the share already done when this process began

    def show(self, n_bytes: int, share: float | None) -> None:
        """n_bytes were tokenised since the beginning; share is the part of the work that is done, if known."""
        now = time.monotonic()
        if self.first is None:
            self.first = share or 0.0
        if now - self.shown >= (0.2 if self.terminal else 10.0):
            self.shown = now
            line = f"{self.what}: {self._line(n_bytes, share, now - self.began)}"
            if self.terminal:
                sys.stderr.write(f"\r{line:<78}")
                sys.stderr.flush()
            else:
                self.report(line)

    def _line(self, n_bytes: int, share: float | None, seconds: float) -> str:
        rate = f"{n_bytes / 1e6:,.0f} MB of text, {n_bytes / 1e6 / seconds:.1f} MB/s"
        gained = (share or 0.0) - (self.first or 0.0)
        if share is None or gained <= 0:
            return rate
        left = int(seconds / gained * max(0.0, 1 - share))
        return f"{share:4.0%} {rate}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    def close(self) -> None:
        if self.terminal:
            sys.stderr.write(f"\r{'':<78}\r")
