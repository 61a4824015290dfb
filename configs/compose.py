"""From what the user typed to checked TrainConfigs. Nothing else knows Hydra."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs.schema import GROUPS, TrainConfig
from data.tokenizer import Tokenizer, TokenizerConfig
from model import ModelConfig

LIVE = ("resume", "overwrite", "dry_run", "plan_ranks", "eval_only")  # about this command, not about the run
OPEN = ("model.dropout", "model.context_length")  # what may be set of a model that comes from a file


@dataclass
class Job:
    """A run, as Hydra composed it."""

    composed: DictConfig
    overrides: tuple[str, ...]  # as they were typed


@contextmanager
def in_one_line() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error)) from error


@in_one_line()
def jobs() -> list[Job]:
    """What the command line asks for: a run, those of a sweep, or none (--help)."""
    found: list[Job] = []

    def take(composed: DictConfig) -> None:
        command = HydraConfig.get()
        if command.mode == RunMode.MULTIRUN and composed.run_dir:
            composed.run_dir = f"{composed.run_dir}/{command.job.num}"
        found.append(Job(composed, tuple(command.overrides.task)))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise here, rather than print a traceback and a hint
    warnings.filterwarnings("ignore", module="hydra")
    with TemporaryDirectory() as scratch:  # the sweeper writes a multirun.yaml, whatever it is told
        OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
        hydra.main(version_base=None, config_path=str(Path(__file__).parent), config_name="train")(take)()
    return found


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf says, in one line, without what does not hold here or means nothing to a user."""
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        return f"{error.override} cannot be read: put the value into quotes of its own, '{key}=\"{value}\"'"
    text = ": ".join(" ".join(str(part).rstrip(".").split()) for part in (error, error.__cause__) if part)
    noise = r"\. To append to your config use [^:]*| (reference|object)_type=\w+| full_key: \S+|Config search path:.*"
    text = re.sub(noise, "", text)
    return text.strip() + (" (python train.py --help lists the keys)" if "Could not override" in text else "")


@in_one_line()
def to_config(job: Job, model_of: Callable[[str], ModelConfig], tokenizer_of: Callable[[str], Tokenizer]) -> TrainConfig:
    """Raises ValueError for impossible values. `model_of` and `tokenizer_of` tell what is in the place that init_from names."""
    composed, typed = job.composed, [override.split("=")[0] for override in job.overrides]
    for override in job.overrides:
        if override.startswith(("+", "~")):
            raise ValueError(f"{override}: keys are neither added nor removed, they are set: drop the {override[0]}")
    for key in typed:
        if key != "prompt" and OmegaConf.select(composed, key) == "":
            raise ValueError(f"{key}= is empty: give it a value, or leave it out")
    if composed.resume not in (None, "auto"):
        refuse_other(composed, typed)
    if composed.init_from:
        refuse_model(job.overrides, composed.init_from)
        composed = with_model_of(composed, typed, model_of, tokenizer_of)
    if composed.resume:
        composed = resumed(composed, typed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    return config


def refuse_other(composed: DictConfig, typed: list[str]) -> None:
    """A run that goes on stays where it is, and began where it began."""
    run = run_of(composed.resume)
    same = {
        "run_dir": composed.run_dir and Path(composed.run_dir).resolve() == run.resolve(),
        "init_from": composed.init_from == read(run / "config.yaml").init_from,
        "overwrite": not composed.overwrite,
        "experiment": False,
    }
    for key in typed:
        if not same.get(key, True):
            raise ValueError(f"{key} cannot be set with resume={composed.resume}: the run goes on as it is, where it is")


def refuse_model(overrides: tuple[str, ...], init_from: str) -> None:
    """An experiment that is made for a model of its own would lose half of what it says."""
    chosen = [value.strip("'\"") for key, _, value in (override.partition("=") for override in overrides) if key == "experiment"]
    experiment = chosen[-1] if chosen else ""
    preset = Path(__file__).parent / "experiment" / f"{experiment}.yaml"
    if experiment and (own := re.search(r"^(  - override /)?(model|tokenizer):", preset.read_text(), flags=re.M)):
        raise ValueError(f"experiment={experiment} cannot be set: init_from={init_from} brings its own {own[2]}")


def with_model_of(
    composed: DictConfig, typed: list[str], model_of: Callable[[str], ModelConfig], tokenizer_of: Callable[[str], Tokenizer]
) -> DictConfig:
    """init_from brings its model and its tokenizer; keys that say the same of them do no harm."""
    origin = composed.init_from
    run = Path(composed.run_dir or "") if composed.resume == "auto" else composed.resume and run_of(composed.resume)
    if run and (run / "checkpoints" / "latest").exists() and read(run / "config.yaml").init_from == origin:
        origin = str(run)  # a run that goes on has it all, whatever became of what it began from
    model = OmegaConf.structured(model_of(origin))
    for key in typed:
        group, _, name = key.partition(".")
        if group == "tokenizer":
            its, wanted = tokenizer_of(origin), composed.tokenizer
            same = its.name == wanted.name and (its.name != "bpe" or its.n_vocab == wanted.vocab_size)
        else:
            same = group != "model" or key in OPEN or (name and composed.model[name] == model[name])
        if not same:
            raise ValueError(f"{key} cannot be set: init_from={composed.init_from} brings its own {group}")
        if key in OPEN:
            model[name] = composed.model[name]
    composed.model = model
    composed.tokenizer = OmegaConf.structured(TokenizerConfig)  # stands for nothing here
    return composed


def resumed(composed: DictConfig, typed: list[str]) -> DictConfig:
    """`resume=R` takes R/config.yaml, then what was typed. `resume=auto` starts the run that the command describes, or goes on
    with it. Either way a run keeps its model, tokenizer and optimizer."""
    auto = composed.resume == "auto"
    if auto and not composed.run_dir:
        raise ValueError("resume=auto needs run_dir: it resumes the run in that folder, or starts it")
    if auto and not Path(composed.run_dir, "config.yaml").exists():
        composed.resume = None
        return composed
    run = run_of(composed.run_dir if auto else composed.resume)
    saved = read(run / "config.yaml")
    wanted = composed.copy() if auto else saved.copy()
    for key in () if auto else typed:
        OmegaConf.update(wanted, key, OmegaConf.select(composed, key), merge=False)
    if wanted.model.vocab_size is None:
        wanted.model.vocab_size = saved.model.vocab_size
    changed = differences(saved, wanted)
    fixed = [key for key in changed if key.startswith(("model.", "tokenizer.", "optimizer.name")) and key != "model.dropout"]
    if fixed:
        kept = "; ".join(changed[key] for key in fixed)
        raise ValueError(f"resume={run} keeps what it was trained with ({kept}): drop these, or start a new run")
    wanted.resume, wanted.run_dir, wanted.overwrite = str(run) if auto else composed.resume, str(run), False
    return wanted


def run_of(path: str) -> Path:
    """The run that a run, its `checkpoints` folder or one of its checkpoints belongs to."""
    if not Path(path).exists():
        raise ValueError(f"resume={path} does not exist: give a folder that an earlier `python train.py` made")
    for folder in (Path(path), *list(Path(path).absolute().parents)[:2]):
        if (folder / "config.yaml").exists():
            return folder
    raise ValueError(f"resume={path} is no run (it has no config.yaml): give a folder that `python train.py` made")


def read(path: Path) -> DictConfig:
    """A run's config.yaml. The tokenizer that init_from brought is in the checkpoints, and may have no name of ours."""
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig) or not {*GROUPS} <= loaded.keys():
            raise ValueError(f"it lacks some of {', '.join(GROUPS)}")
        saved = OmegaConf.merge(OmegaConf.structured(TrainConfig), loaded)
    except (ValueError, OSError, YAMLError, OmegaConfBaseException) as error:
        why = " ".join(str(error).split())[:120]
        raise ValueError(f"{path} is damaged ({why}): init_from={path.parent} starts a new run from its weights") from None
    assert isinstance(saved, DictConfig)
    if saved.init_from:
        saved.tokenizer = OmegaConf.structured(TokenizerConfig)
    return saved


def to_yaml(config: TrainConfig, tokenizer: Tokenizer) -> str:
    """What config.yaml holds: every key, resolved, without those that say what to do with an earlier run."""
    values = asdict(config) | {key: getattr(TrainConfig(), key) for key in LIVE}
    if config.init_from:
        values["tokenizer"] = {"name": tokenizer.name, "vocab_size": tokenizer.n_vocab}
    return OmegaConf.to_yaml(literal(values))


def literal(value: Any) -> Any:
    """With ${...} in texts and paths as it stands there, not as a reference to another key."""
    if isinstance(value, dict | list):
        return {k: literal(v) for k, v in value.items()} if isinstance(value, dict) else [literal(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def changes(path: Path, config: TrainConfig) -> list[str]:
    """What `config` changes of the run whose config.yaml is at `path`."""
    return list(differences(read(path), OmegaConf.create(literal(asdict(config)))).values())


def differences(before: DictConfig, after: DictConfig) -> dict[str, str]:
    """Key -> "key: old -> new" of all that differs and is about the run itself."""
    was, now = flat(before), flat(after)
    return {key: f"{key}: {was.get(key)} -> {value}" for key, value in now.items() if value != was.get(key)}


def flat(config: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(config)
    inside = {f"{group}.{key}": value for group in GROUPS for key, value in values[group].items()}
    return inside | {key: value for key, value in values.items() if key not in (*GROUPS, *LIVE, "run_dir")}
