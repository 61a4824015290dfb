"""What a run tells: a line and a progress bar for people, metrics.jsonl, wandb and loss.png for later."""

import os
import resource
import secrets
import sys
from dataclasses import dataclass
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from tqdm import tqdm

from training.evaluate import Evaluation
from training.run import Progress, RunFolder

WANDB_MODES = ("online", "offline", "disabled")


@dataclass(kw_only=True)
class WandbConfig:
    """`mode` null: online if this machine is logged in, else offline."""

    mode: str | None = None
    project: str = "sprout"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in WANDB_MODES:
            raise ValueError(f"wandb.mode={self.mode} is not one of {', '.join(WANDB_MODES)}")


@dataclass
class StepReport:
    """One step's figures; `loss` is the global mean over the step's targets, `norm` the gradient norm before clipping."""

    loss: float
    norm: float
    lr: float


class Report:
    """Prints on rank 0; `folder` None (another rank, or a run that writes nothing) keeps it silent and writes nothing."""

    def __init__(
        self,
        folder: RunFolder | None,
        wandb_run: Any,
        progress: Progress,
        steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak: float,
        device: torch.device,
    ):
        self.folder, self.wandb_run, self.steps = folder, wandb_run, steps
        self.tokens_per_step, self.flops_per_token, self.peak, self.device = (
            tokens_per_step,
            flops_per_token,
            peak,
            device,
        )
        self.since, self.busy = progress.step, 0.0  # steps and training seconds since the last line
        shown = folder is not None and sys.stderr.isatty()
        self.bar = tqdm(
            total=steps, initial=progress.step, unit="step", disable=not shown, dynamic_ncols=True, leave=False
        )

    def say(self, text: str) -> None:
        if self.folder is not None:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def timed(self, seconds: float) -> None:
        self.busy += seconds

    def step(self, progress: Progress, figures: StepReport) -> None:
        """A log line and a row; called when a step is due."""
        steps = progress.step - self.since
        speed = steps * self.tokens_per_step / self.busy if self.busy else 0.0
        left = (self.steps - progress.step) * self.busy / max(1, steps)
        share = f" {speed * self.flops_per_token / self.peak:4.0%} of peak |" if self.peak else ""
        self.say(
            f"step {progress.step:>{len(str(self.steps))}}/{self.steps} | loss {figures.loss:.4f} | lr {figures.lr:.2e} | norm {figures.norm:.2f} |"
            f" {speed:,.0f} tokens/s |{share} {memory(self.device) / 2**30:.2f} GiB | {clock(left)} left"
        )
        self.row(
            progress,
            {
                "train/loss": figures.loss,
                "train/lr": figures.lr,
                "train/grad_norm": figures.norm,
                "time/tokens_per_second": speed,
                "time/peak_share": speed * self.flops_per_token / self.peak if self.peak else 0.0,
            },
        )
        self.since, self.busy = progress.step, 0.0

    def evaluation(self, progress: Progress, found: Evaluation, best: bool) -> None:
        self.say(
            f"step {progress.step:>{len(str(self.steps))}}/{self.steps} | validation loss {found.loss:.4f} | perplexity {found.perplexity:.2f} |"
            f" {found.bits_per_byte:.4f} bits per byte{' | best' if best else ''}"
        )
        self.row(progress, {"val/loss": found.loss, "val/ppl": found.perplexity, "val/bpb": found.bits_per_byte})

    def sample(self, progress: Progress, text: str) -> None:
        self.say("\n".join([f"--- sample at step {progress.step}", text, "---"]))
        if self.wandb_run is not None:
            import wandb  # heavy, and optional

            table = wandb.Table(columns=["step", "text"], data=[[progress.step, text]])
            self.wandb_run.log({"samples": table}, step=progress.step)

    def row(self, progress: Progress, values: dict[str, float]) -> None:
        if self.folder is not None:
            self.folder.append_metrics({"step": progress.step, **values})
        if self.wandb_run is not None:
            self.wandb_run.log(values, step=progress.step)

    def draw(self) -> None:
        if self.folder is not None:
            draw_losses(self.folder.read_metrics(), self.folder.path / "loss.png")

    def close(self, progress: Progress) -> None:
        self.bar.close()
        if self.wandb_run is not None:
            self.wandb_run.summary.update({"best/val_loss": progress.best_loss, "best/step": progress.best_step})
            self.wandb_run.finish()


def memory(device: torch.device) -> float:
    """Peak bytes: allocated on the device, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def start_wandb(config: WandbConfig, folder: RunFolder, progress: Progress, settings: dict[str, Any]) -> Any:
    """A wandb run that continues progress.wandb_id, or None. Never asks, never waits for a login."""
    if config.mode == "disabled":
        return None
    try:
        import wandb  # heavy, and optional
    except ImportError:
        if config.mode is None:
            return None
        raise ValueError(
            f"wandb.mode={config.mode}, but wandb is not installed: pip install wandb, or wandb.mode=disabled"
        ) from None
    mode = config.mode or ("online" if logged_in() else "offline")
    if mode == "online" and not logged_in():
        raise ValueError(
            "wandb.mode=online, but this machine has no wandb key: run `wandb login`, or use wandb.mode=offline"
        )
    progress.wandb_id = progress.wandb_id or secrets.token_hex(4)
    quiet = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=True,
        x_disable_meta=True,
        disable_git=True,
        disable_code=True,
        init_timeout=20,
    )
    try:
        return wandb.init(
            mode=mode,
            dir=folder.path,
            project=config.project,
            name=config.name or folder.path.name,
            id=progress.wandb_id,
            resume="allow",
            config=settings,
            settings=quiet,
        )
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(
            f"wandb.mode={mode} failed ({reason}): use wandb.mode=offline and `wandb sync` later"
        ) from None


def logged_in() -> bool:
    """Whether wandb's key is in the environment or in .netrc, where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


def draw_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Train and validation loss over steps, the learning rate below."""
    from matplotlib.figure import Figure  # heavy

    figure = Figure(figsize=(8, 5), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for key, style in (("train/loss", {"lw": 1, "alpha": 0.7}), ("val/loss", {"marker": "o", "ms": 4})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            losses.plot(*zip(*points, strict=True), label=key, **style)
    losses.set_ylabel("loss (nats a token)")
    losses.grid(alpha=0.3)
    if losses.has_data():
        losses.legend(frameon=False)
    rates.plot(
        *zip(*[(row["step"], row["train/lr"]) for row in rows if "train/lr" in row] or [(0, 0)], strict=True), lw=1
    )
    rates.set_ylabel("learning rate")
    rates.set_xlabel("step")
    rates.grid(alpha=0.3)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    temporary.replace(path)
