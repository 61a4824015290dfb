"""What a run tells while it goes on: a line and a progress bar for people, metrics.jsonl and wandb for later."""

import importlib.util
import os
import secrets
import sys
import time
import warnings
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from training.curves import draw_losses
from training.device import peak_memory
from training.evaluate import Evaluation
from training.run import Progress, RunFolder

DRAW_EVERY = 20.0  # seconds: drawing takes half of one
WANDB_MODES = ("online", "offline", "disabled")


@dataclass(kw_only=True)
class WandbConfig:
    """`mode` null: WANDB_MODE of the environment, else online if this machine is logged in and has a network, else offline."""

    mode: str | None = None
    project: str = "sprout"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in WANDB_MODES:
            raise ValueError(f"wandb.mode={self.mode} is not one of {', '.join(WANDB_MODES)}")
        if found := sorted({*self.project} & {*"/\\#?%:"}):
            raise ValueError(f"wandb.project={self.project} has {' '.join(found)}, which wandb does not allow: take it out")

    @property
    def asked(self) -> str | None:
        """The mode that somebody asked for."""
        told = os.environ.get("WANDB_MODE")
        return self.mode or {"dryrun": "offline", "run": "online"}.get(told or "", told) or None  # the older names, too


@dataclass
class Report:
    """Prints and writes on rank 0. Time that passes between two calls is put down to what the second one tells of."""

    folder: RunFolder | None  # None (another rank) keeps it silent
    wandb_run: Any
    progress: Progress
    steps: int  # of the whole run
    tokens: int  # of one step
    peak: float  # tokens a second, if the device did nothing but matrix products
    device: torch.device
    began: float

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.mark = self.drawn = self.began
        self.first = self.since = self.progress.step  # of this process; of the current log line
        self.busy = 0.0  # training seconds since the last log line
        self.samples: list[list[Any]] = []
        self.bar = tqdm(
            total=self.steps,
            initial=self.progress.step,
            disable=True if self.folder is None else None,  # None: on a terminal only
            dynamic_ncols=True,
            leave=False,
            bar_format="{n_fmt}/{total_fmt} |{bar}|{postfix} | {elapsed}<{remaining}",
        )
        if self.folder is not None and self.wandb_run is not None:
            for row in self.folder.read_metrics():  # of earlier processes: wandb skips what it has, and gets what died with them
                self.wandb_run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])
        self.lap("set-up")
        self.started = self.mark

    def lap(self, what: str) -> float:
        now = time.perf_counter()
        passed, self.mark = now - self.mark, now
        self.seconds[what] += passed
        return passed

    def at(self) -> str:
        return f"step {self.progress.step:>{len(str(self.steps))}}/{self.steps}"

    def say(self, text: str) -> None:
        if self.folder is not None:
            try:
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()
            except OSError:  # nobody reads any more; the run goes on, and metrics.jsonl tells of it
                sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")

    def step(self, loss: float, norm: float, lr: float, log: bool) -> None:
        """`loss`: global mean over the step's targets; `norm`: the gradient's before clipping; `log`: a line and a row, too."""
        self.busy += self.lap("training")
        done = self.progress.step
        speed = (done - self.since) * self.tokens / self.busy
        share = speed / self.peak
        gib = peak_memory(self.device) / 2**30
        figures = f"loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f} | {speed:,.0f} tokens/s | {share:.0%} of peak | {gib:.2f} GiB"
        with suppress(OSError):  # its terminal may be gone
            self.bar.set_postfix_str(figures, refresh=False)
            self.bar.update()
        if log:
            left = (self.steps - done) * (self.mark - self.started) / (done - self.first)
            self.say(f"{self.at()} | {figures} | {clock(left)} left")
            values = {"train/loss": loss, "train/lr": lr, "train/grad_norm": norm}
            self.row(values | {"time/tokens_per_second": speed, "time/peak_share": share, "time/memory_gib": gib})
            self.since, self.busy = done, 0.0
        self.lap("reporting")

    def evaluation(self, found: Evaluation, best: bool) -> None:
        self.lap("evaluation")
        self.say(f"{self.at()} | {found}{' | best' if best else ''}")
        self.row({"val/loss": found.loss, "val/ppl": found.perplexity, "val/bpb": found.bits_per_byte})
        self.lap("reporting")

    def sample(self, text: str) -> None:
        self.lap("samples")
        self.say("\n".join([f"--- sample at step {self.progress.step}", text, "---"]))
        self.samples.append([self.progress.step, text])
        if self.wandb_run is not None:
            import wandb  # heavy, and optional

            self.wandb_run.log({"samples": wandb.Table(["step", "text"], self.samples)}, step=self.progress.step)
        self.lap("reporting")

    def row(self, values: dict[str, float]) -> None:
        if self.folder is not None:
            self.folder.append_metrics({"step": self.progress.step, **values})
        if self.wandb_run is not None:
            self.wandb_run.log(values, step=self.progress.step)

    def saved(self) -> None:
        """A checkpoint was written: draw what led to it, unless that was done a moment ago, or comes at the end anyway."""
        self.lap("checkpoints")
        if self.folder is not None and self.mark - self.drawn > DRAW_EVERY and self.progress.step < self.steps:
            draw_losses(self.folder)
            self.drawn = self.mark
        self.lap("reporting")

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        progress = self.progress
        with suppress(OSError):
            self.bar.close()
        if self.folder is not None and kind is None:
            draw_losses(self.folder)
        if self.wandb_run is not None:
            if progress.best_step >= 0:
                self.wandb_run.summary.update({"best/val_loss": progress.best_loss, "best/step": progress.best_step})
            self.wandb_run.finish(exit_code=0 if kind is None else 1)
        self.lap("reporting")
        total = sum(self.seconds.values())
        shares = sorted(self.seconds.items(), key=lambda item: -item[1])
        self.say(f"{clock(total)} in all: " + ", ".join(f"{what} {spent / total:.1%}" for what, spent in shares))
        if kind is not None and self.folder is not None and (self.folder.checkpoints / "latest").exists():
            step = (self.folder.checkpoints / "latest").resolve().name
            self.say(f"{step} is saved: python train.py resume={self.folder.path} goes on from it")


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def check_wandb(config: WandbConfig) -> None:
    """Raise ValueError for a mode that cannot work here, before anything is read or written."""
    if config.asked not in (None, *WANDB_MODES):
        raise ValueError(f"WANDB_MODE={config.asked} is not one of {', '.join(WANDB_MODES)}")
    if config.mode in ("online", "offline") and not installed():
        raise ValueError(f"wandb.mode={config.mode}, but wandb is not installed: pip install wandb, or wandb.mode=disabled")
    if config.asked == "online" and not logged_in():
        raise ValueError("wandb.mode=online, but there is no wandb key here: run `wandb login`, or use wandb.mode=offline")


def load_libraries(config: WandbConfig) -> None:
    """What a run needs on its way, so that a broken installation does not end it hours later, and a plan measures its memory."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401  # heavy

    if config.asked != "disabled" and installed():
        import wandb  # heavy, and optional

        wandb.Table(["step", "text"], [[0, ""]])  # imports more


def start_wandb(config: WandbConfig, folder: RunFolder, progress: Progress, settings: dict[str, Any]) -> Any:
    """A wandb run that continues progress.wandb_id, or None. Never asks, never waits for a login."""
    if config.asked == "disabled":
        return None
    if not installed():
        warnings.warn("wandb is not installed: this run is told in metrics.jsonl alone", stacklevel=2)
        return None
    import wandb  # heavy, and optional

    progress.wandb_id = progress.wandb_id or secrets.token_hex(4)
    quiet: dict[str, Any] = dict.fromkeys(("silent", "x_disable_stats", "x_disable_meta", "disable_git", "disable_code"), True)
    options: dict[str, Any] = {"dir": folder.path, "project": config.project, "name": config.name or folder.path.name}
    options |= {"mode": config.asked or ("online" if logged_in() else "offline"), "id": progress.wandb_id, "resume": "allow"}
    options |= {"allow_val_change": True, "config": settings}
    options["settings"] = wandb.Settings(**quiet, console="off", init_timeout=20)
    try:
        return wandb.init(**options)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        reason = " ".join(str(error).split())[:100]
        if config.asked is not None:
            remedy = "use wandb.mode=offline, and `wandb sync` later"
            raise ValueError(f"wandb.mode={config.asked} failed ({reason}): {remedy}") from None
        warnings.warn(f"wandb cannot be reached ({reason}): logging offline, `wandb sync` sends it later", stacklevel=2)
        wandb.teardown()  # its service holds the run's id
        return wandb.init(**options | {"mode": "offline"})


def installed() -> bool:
    return importlib.util.find_spec("wandb") is not None


def logged_in() -> bool:
    """Whether wandb's key is in the environment or in .netrc, where `wandb login` puts it."""
    from requests.utils import get_netrc_auth  # slow to import

    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(host))
