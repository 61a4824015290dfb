"""Documents from a Hugging Face hub dataset, read through `datasets`, at one commit of it.

Every failure becomes one line, within half a minute: the clients alone wait longer, or for ever.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
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

from data.source import DataConfig, Document, no_column, row_document
from data.token_file import write_atomically

ROWS = 64  # read together
PATIENCE = 20.0  # seconds given to a busy server
T = TypeVar("T")


class HubDataset:
    """One split of a dataset."""

    def __init__(self, config: DataConfig, split: str, commit: str | None = None) -> None:
        self.config, self.split, self.label = config, split, str(config.name)
        self.commit = commit or find_commit(config)
        self.identity = {"name": config.name, "subset": config.subset, "split": split, "val_split": config.val_split}
        self.identity |= {"column": config.text_column, "commit": self.commit}
        self.row, self.n_rows = 0, 0

    def share(self) -> float | None:
        return None if self.config.streaming else self.row / max(1, self.n_rows)

    def val(self) -> "HubDataset | None":
        """data.val_split or, unasked, the split that the dataset itself calls `validation`."""
        name, subset, split = self.label, self.config.subset, self.config.val_split
        if split is None:
            splits = attempt(self.config, lambda: datasets.get_dataset_split_names(name, subset, revision=self.commit))
            split = "validation" if "validation" in splits and self.split != "validation" else None
        return HubDataset(self.config, split, self.commit) if split else None

    @cached_property
    def dataset(self) -> tuple[Any, dict[str, Any]]:
        """Read row by row, and its state at the beginning."""
        config, column = self.config, self.config.text_column
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        settings = {"split": self.split, "revision": self.commit, "streaming": config.streaming}
        dataset = attempt(config, lambda: datasets.load_dataset(self.label, config.subset, **settings))
        columns = dataset.column_names or list(attempt(config, lambda: next(iter(dataset), {})))
        if column not in columns:
            raise no_column(column, columns, self.label)
        if not config.streaming:
            self.n_rows = len(dataset)
            dataset = dataset.to_iterable_dataset()
        dataset = dataset.select_columns([column])
        return dataset, dataset.state_dict()

    def documents(self, state: Any = None) -> Iterator[Document]:
        (dataset, beginning), column = self.dataset, self.config.text_column
        self.row, inner = state or (0, beginning)
        dataset.load_state_dict(inner)
        batches = dataset.iter(ROWS)
        while True:
            batch = attempt(self.config, lambda: next(batches, None), patience=0)  # a broken stream cannot go on
            if batch is None:
                return
            for value in batch[column]:
                self.row += 1
                yield row_document({column: value}, column, f"{self.label} {self.split} row {self.row}", state)
            state = self.row, dataset.state_dict()


def find_commit(config: DataConfig) -> str:
    """What data.revision (or main) names now or, with HF_HUB_OFFLINE=1, what it named when it was last read."""
    known = Path(config.cache_dir, "commits.json")
    commits = json.loads(known.read_text()) if known.is_file() else {}
    key = f"{config.name}@{config.revision or 'main'}"
    if constants.HF_HUB_OFFLINE:
        if key not in commits:
            raise explain(config, [OfflineModeIsEnabled()])
        return commits[key]
    info = attempt(config, lambda: HfApi().dataset_info(str(config.name), revision=config.revision, timeout=5))
    known.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(known, json.dumps({**commits, key: info.sha}))
    return str(info.sha)


def attempt(config: DataConfig, action: Callable[[], T], patience: float = PATIENCE) -> T:
    """The action's result; a busy server is asked again for a while.

    Any failure becomes one line: a ValueError if the user can mend it, else an OSError.
    """
    give_up, pause = time.monotonic() + patience, 0.25
    while True:
        try:
            return action()
        except Exception as error:  # theirs are of a dozen unrelated classes
            chain = causes(error)
            status = max((cause.response.status_code for cause in chain if isinstance(cause, HfHubHTTPError)), default=0)
            if not (status == 429 or status >= 500) or time.monotonic() + pause > give_up:
                raise explain(config, chain) from error
        time.sleep(pause)
        pause *= 2


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
