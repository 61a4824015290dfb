"""The typed configuration: what each key is called, what it may hold, what it is when nobody says."""

from dataclasses import dataclass, field, fields, is_dataclass

from hydra.core.config_store import ConfigStore

from data.source import DataConfig
from data.tokenizer import TokenizerConfig
from model import ModelConfig
from training.device import DEVICES, DTYPES
from training.optimizer import OptimizerConfig
from training.reporting import WandbConfig
from training.schedule import ScheduleConfig


@dataclass(kw_only=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    steps: int = 1000  # optimizer updates
    batch_size: int = 32  # sequences an update, over all ranks
    micro_batch_size: int | None = None  # sequences a device holds at once; null: all of its share
    seed: int = 0
    compile: bool = False
    dtype: str = "auto"
    device: str = "auto"

    log_every: int = 10
    eval_every: int | None = 250  # null: at the end only
    save_every: int | None = None  # null: after every evaluation; always at the end, and when stopped
    sample_every: int | None = None
    eval_windows: int | None = None  # evaluate the first so many windows of the validation split; null: all of them
    keep_checkpoints: int = 10  # the newest ones, and the best besides
    prompt: str = ""  # what samples during training continue

    run_dir: str | None = None  # null: runs/<date-time>
    overwrite: bool = False  # replace what run_dir holds
    resume: str | None = None  # a run, one of its checkpoints, or `auto`: run_dir, if it holds a run
    init_from: str | None = None  # a run, a checkpoint, a Hugging Face folder or hub name to start the weights from
    eval_only: bool = False
    dry_run: bool = False
    plan_ranks: int | None = None  # dry_run: for so many ranks, whatever this machine has
    parallel: str = "ddp"  # over several processes (torchrun): ddp copies the model, fsdp spreads it
    separate_documents: bool = False  # attention does not look past an end-of-text
    checkpoint_activations: bool = False  # keep only the blocks' inputs for the backward pass, compute the rest again

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type in (int, int | None) and f.name != "seed"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed={self.seed} must be at least 0 and below 2^32")
        known = {"dtype": ("auto", *DTYPES), "device": DEVICES, "parallel": ("ddp", "fsdp")}
        for name, values in known.items():
            if getattr(self, name).split(":")[0] not in values:  # cuda:1 is a cuda
                raise ValueError(f"{name}={getattr(self, name)} is not one of {', '.join(values)}")
        if self.eval_only and not (self.resume or self.init_from):
            raise ValueError("eval_only=true needs a model: resume=<run or checkpoint>, or init_from=<any model>")


GROUPS = tuple(f.name for f in fields(TrainConfig) if is_dataclass(f.type))


ConfigStore.instance().store(name="schema", node=TrainConfig)
