"""Documents from a Hugging Face hub dataset, read through `datasets`, at one commit of it.

Every failure becomes one line, within half a minute: the clients alone wait longer, or for ever.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import datasets
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from data.source import DataConfig, Document, Position, cell, no_column, text_key
from data.token_file import write_atomically

ROWS = 64  # read together
PATIENCE = 20.0  # seconds given to a busy server
T = TypeVar("T")


class HubDataset:
    """One split of a dataset."""

    notice = ""

    def __init__(self, config: DataConfig, split: str, commit: str | None = None) -> None:
        self.config, self.split, self.label = config, split, str(config.name)
        self.commit = commit or find_commit(config)
        self.identity = {"name": config.name, "subset": config.subset, "split": split, "val_split": config.val_split}
        self.identity |= {"column": config.text_column, "commit": self.commit}
        self.position = 0

    @property
    def size(self) -> int | None:
        return None if self.config.streaming else len(self.dataset)

    def val(self) -> "HubDataset | None":
        """data.val_split or, unasked, the split that the dataset itself calls `validation`."""
        name, subset, split = self.label, self.config.subset, self.config.val_split
        if split is None:
            splits = attempt(self.config, lambda: datasets.get_dataset_split_names(name, subset, revision=self.commit))
            split = "validation" if "validation" in splits and self.split != "validation" else None
        return HubDataset(self.config, split, self.commit) if split else None

    @cached_property
    def dataset(self) -> Any:
        config = self.config
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        settings = {"split": self.split, "revision": self.commit, "streaming": config.streaming}
        dataset = attempt(config, lambda: datasets.load_dataset(self.label, config.subset, **settings))
        columns = dataset.column_names or list(attempt(config, lambda: next(iter(dataset), {})))
        if config.text_column not in columns:
            raise no_column(config.text_column, columns, self.label)
        return dataset.select_columns([config.text_column])

    @cached_property
    def start(self) -> dict:
        """The state of a stream from which nothing was read."""
        return self.dataset.state_dict()

    def documents(self, after: Position = (None, 0)) -> Iterator[Document]:
        dataset, column, streaming = self.dataset, self.config.text_column, self.config.streaming
        state, skip = after
        if streaming:
            state = state or self.start
            dataset.load_state_dict(state)
        batches = dataset.iter(ROWS) if streaming else dataset.skip(skip).iter(ROWS)
        row = 0 if streaming else skip
        while True:
            with explained(self.config):
                batch = next(batches, None)
            if batch is None:
                return
            for index, value in enumerate(batch[column], 1):
                row += 1
                if not streaming or index > skip:
                    self.position = row
                    text = cell({column: value}, column, f"{self.label} {self.split} row {row}")
                    yield Document(text_key(text), [text], (state, index) if streaming else (None, row))
            if streaming:
                state, skip = dataset.state_dict(), 0

    def check(self) -> None:
        """A commit never changes."""


def find_commit(config: DataConfig) -> str:
    """What data.revision (or main) names now or, with HF_HUB_OFFLINE=1, what it named when it was last read."""
    known = Path(config.cache_dir, "commits.json")
    commits = json.loads(known.read_text()) if known.is_file() else {}
    key = f"{config.name}@{config.revision or 'main'}"
    if constants.is_offline_mode():
        if key not in commits:
            raise explain(config, [OfflineModeIsEnabled()])
        return commits[key]
    info = attempt(config, lambda: HfApi().dataset_info(str(config.name), revision=config.revision, timeout=5))
    known.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(known, json.dumps({**commits, key: info.sha}))
    return str(info.sha)


def attempt(config: DataConfig, action: Callable[[], T]) -> T:
    """The action's result; a busy server is asked again for a while."""
    give_up, pause = time.monotonic() + PATIENCE, 0.25
    while True:
        try:
            with explained(config):
                return action()
        except (ValueError, OSError) as error:
            answers = [cause.response for cause in causes(error) if isinstance(cause, HfHubHTTPError)]
            busy = any(answer.status_code == 429 or answer.status_code >= 500 for answer in answers)
            if not busy or time.monotonic() + pause > give_up:
                raise
        time.sleep(pause)
        pause *= 2


@contextmanager
def explained(config: DataConfig) -> Iterator[None]:
    """Any failure of the clients as one line: a ValueError if the user can mend it, else an OSError."""
    try:
        yield
    except Exception as error:  # theirs are of a dozen unrelated classes
        raise explain(config, causes(error)) from error


def causes(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def explain(config: DataConfig, chain: list[BaseException]) -> Exception:
    name, login = f"data.name={config.name}", "log in (hf auth login, or set HF_TOKEN)"
    hub, what = constants.ENDPOINT, type(chain[0]).__name__
    message = " ".join(str(chain[0]).split())[:400]
    kinds = {kind for error in chain for kind in type(error).__mro__}
    if GatedRepoError in kinds or "gated dataset" in message:
        return ValueError(f"{name} is gated: accept its licence at {hub}/datasets/{config.name} and {login}")
    if RepositoryNotFoundError in kinds:
        return ValueError(f"{name} does not exist at {hub}, or is private: check the name, or {login}")
    if RevisionNotFoundError in kinds:
        return ValueError(f"data.revision={config.revision} is no branch, tag or commit of {config.name} at {hub}")
    if OfflineModeIsEnabled in kinds:
        return ValueError(f"{name} was not read before and HF_HUB_OFFLINE is set: unset it, or use data=stdlib")
    if "split" in message and ("Should be one of" in message or "Available" in message):
        return ValueError(f"{name} has no such split (data.split, data.val_split): {message}")
    if "BuilderConfig" in message or "Config name is missing" in message:
        return ValueError(f"{name} needs another data.subset={config.subset}: {message}")
    if any(word in kind.__name__ for kind in kinds for word in ("ConnectError", "ConnectionError", "Timeout")):
        remedy = "check the network, set HF_HUB_OFFLINE=1 to use what was read before, or use data=stdlib"
        return OSError(f"cannot reach {hub} for {name} ({what}): {remedy}")
    return OSError(f"{name} cannot be read ({what}): {message}")
