"""From what Hydra composed, and what the user typed, to one checked TrainConfig. Nothing else knows Hydra."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from configs.schema import GROUPS, TrainConfig

LIVE = ("resume", "overwrite", "dry_run", "eval_only")  # about this command, not about the run


def to_config(composed: DictConfig) -> TrainConfig:
    """Raises ValueError for impossible values. `resume=R` takes R/config.yaml, then this command's overrides."""
    hydra = HydraConfig.get()
    typed = [override.split("=")[0].lstrip("+~") for override in hydra.overrides.task]
    if added := [override for override in hydra.overrides.task if override.startswith(("+", "~"))]:
        raise ValueError(f"{added[0]}: keys are neither added nor removed, they are set: drop the {added[0][0]}")
    if hydra.mode == RunMode.MULTIRUN and composed.run_dir:
        composed.run_dir = f"{composed.run_dir}/{hydra.job.num}"
    if composed.resume == "auto":
        if not composed.run_dir:
            raise ValueError("resume=auto needs run_dir: it resumes the run in that folder, or starts it")
        composed.resume = composed.run_dir if (Path(composed.run_dir) / "config.yaml").exists() else None
    if composed.resume:
        composed = resumed(composed, typed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    return config


def run_of(path: str) -> Path:
    """The run that a run, its `checkpoints` folder or one of its checkpoints belongs to."""
    for folder in (Path(path), *list(Path(path).absolute().parents)[:2]):
        if (folder / "config.yaml").exists():
            return folder
    raise ValueError(
        f"resume={path} is no run (it has no config.yaml): give a folder that an earlier `python train.py` made"
    )


def resumed(composed: DictConfig, typed: list[str]) -> DictConfig:
    run = run_of(composed.resume)
    if "experiment" in typed:
        raise ValueError(
            f"experiment= cannot be given with resume={composed.resume}: the run keeps its own; override single keys"
        )
    saved = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(run / "config.yaml"))
    assert isinstance(saved, DictConfig)
    for key in typed:
        if key in GROUPS:
            saved[key] = composed[key]
        elif not key.startswith("hydra"):
            OmegaConf.update(saved, key, OmegaConf.select(composed, key))
    saved.resume = composed.resume
    saved.run_dir = str(run)
    return saved


def to_yaml(config: TrainConfig) -> str:
    """What config.yaml holds: every key, resolved, without those that say what to do with an earlier run."""
    values = OmegaConf.structured(config)
    for key in LIVE:
        values[key] = OmegaConf.structured(TrainConfig)[key]
    return OmegaConf.to_yaml(values)
