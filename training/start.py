"""What a run starts from: weights drawn anew, a model from a file, or a checkpoint of its own."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from model import ModelConfig, Transformer
from training.run import Progress, restore_optimizer_state
from training.update import Precision
from weights import checkpoint, load, locate


class Start:
    """`folder`: where weights and tokenizer come from, or None. `trainer`: what a checkpoint of this run has besides."""

    def __init__(self, resume: str | None, init_from: str | None):
        self.progress, self.trainer = Progress(), dict[str, Any]()
        self.folder: Path | None = None
        if resume and not ended_before_saving(Path(resume)):
            self.folder = checkpoint.find(Path(resume))
            self.trainer = checkpoint.read_trainer(self.folder)
            self.progress = Progress(**self.trainer["progress"])
        elif init_from:
            self.folder = locate(init_from)

    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.folder) if self.folder else None

    def model(self, config: ModelConfig, seed: int) -> Transformer:
        if self.folder is None:
            torch.manual_seed(seed)
            return Transformer(config)
        return adapted(load(self.folder, dtype=torch.float32)[0], config, self.folder)

    def restore(self, optimizer: torch.optim.Optimizer, model: Transformer, precision: Precision) -> None:
        if self.trainer:
            restore_optimizer_state(optimizer, model, self.trainer["optimizer"])
            if self.trainer["scaler"]:
                precision.scaler.load_state_dict(self.trainer["scaler"])
        self.trainer = {}  # twice the size of the model


def ended_before_saving(run: Path) -> bool:
    return (run / "config.yaml").exists() and not checkpoint.steps(run / "checkpoints")


def with_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    needed = tokenizer.n_vocab
    if config.vocab_size is not None and config.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={config.vocab_size} is too small for tokenizer {tokenizer.name}, whose largest id is "
            f"{needed - 1}: use at least {needed}, or null to take it from the tokenizer"
        )
    return replace(config, vocab_size=config.vocab_size or needed)


def adapted(model: Transformer, wanted: ModelConfig, source: Path) -> Transformer:
    """The same weights under another dropout or a shorter context, which a checkpoint leaves open; all else is refused."""
    if model.config == wanted:
        return model
    has, wants = asdict(model.config), asdict(wanted)
    changed = [f"model.{key}: {has[key]} -> {wants[key]}" for key in has if has[key] != wants[key] and key not in OPEN]
    if wanted.context_length > model.config.context_length:
        changed.append(f"model.context_length: {model.config.context_length} -> {wanted.context_length}, which is longer")
    if changed:
        raise ValueError(f"{source} holds another model ({'; '.join(changed)}): drop these keys")
    weights = model.state_dict()
    if wanted.position == "learned":
        weights["position.table.weight"] = weights["position.table.weight"][: wanted.context_length]
    new = Transformer(wanted)
    new.load_state_dict(weights)
    return new


OPEN = ("dropout", "context_length")
