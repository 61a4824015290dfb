"""How far a preparation is: one line that renews itself on a terminal, a line every ten seconds elsewhere."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

Report = Callable[[str], None]


def to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def progress_bar(what: str, report: Report | None, n_tokens: int) -> tqdm:
    """n_tokens are there already."""
    settings: dict[str, Any] = {}
    if report is not None or not sys.stderr.isatty():
        say = report or to_stderr
        lines = SimpleNamespace(write=lambda text: say(text.strip()) if text.strip() else None, flush=lambda: None)
        settings = {"mininterval": 10, "delay": 10, "ncols": 0, "file": lines}
    return tqdm(desc=what, initial=n_tokens, unit=" tokens", unit_scale=True, leave=False, miniters=1, **settings)
