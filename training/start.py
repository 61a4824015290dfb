"""What a run starts from: weights drawn anew, a model from a file, or a checkpoint of its own; and what the last one holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from model import ModelConfig, Transformer
from training.ranks import part_like
from training.run import Progress
from training.update import Precision
from weights import checkpoint, locate
from weights.huggingface import read_model


def trained_state(model: Transformer, optimizer: torch.optim.Optimizer, precision: Precision) -> dict[str, Any]:
    """What training has changed, the optimizer's by weight name: neither ranks nor the order of its groups matter."""
    moments = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}
    return {"model": model.state_dict(), "optimizer": moments, "scaler": precision.scaler.state_dict()}


class Start:
    """`folder`: where weights and tokenizer come from, or None. `trainer`: what a checkpoint of this run has besides."""

    def __init__(self, resume: str | None, init_from: str | None, needs_model: bool = False):
        self.progress, self.trainer = Progress(), dict[str, Any]()
        self.folder: Path | None = None
        if resume and (needs_model or not ended_before_saving(Path(resume))):
            self.folder = checkpoint.find(Path(resume))
            self.trainer = checkpoint.read_trainer(self.folder)
            try:
                self.progress = Progress(**self.trainer["progress"])
            except TypeError as error:
                raise ValueError(f"{self.folder} was saved by another version ({error}): resume it with that one") from None
        elif init_from:
            self.folder = locate(init_from)

    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.folder) if self.folder else None

    def model(self, config: ModelConfig, seed: int) -> Transformer:
        """Another dropout or a shorter context is fine, which the weights leave open."""
        if self.folder is None:
            torch.manual_seed(seed)
            return Transformer(config)
        loaded = read_model(self.folder, dtype=torch.float32)
        if loaded.config == config:
            return loaded
        had, length = loaded.config, config.context_length
        if length > had.context_length:
            raise ValueError(f"model.context_length: {had.context_length} -> {length}, which is longer: drop this key")
        if replace(config, dropout=had.dropout, context_length=had.context_length) != had:
            raise ValueError(f"{self.folder} holds {had}, which cannot become {config}")
        model, weights = Transformer(config), loaded.state_dict()
        if config.position == "learned":
            weights["position.table.weight"] = weights["position.table.weight"][: config.context_length]
        model.load_state_dict(weights)
        return model

    def restore(self, model: Transformer, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        """The rest of `trained_state`."""
        saved, self.trainer = self.trainer, {}  # twice the size of the model
        for name, p in model.named_parameters() if saved else ():
            for key, value in saved["optimizer"].get(name, {}).items():
                optimizer.state[p][key] = value.to(p.device) if key == "step" else part_like(value, p)
        if saved.get("scaler"):
            precision.scaler.load_state_dict(saved["scaler"])


def ended_before_saving(run: Path) -> bool:
    """A checkpoint from which something was removed is one all the same."""
    return (run / "config.yaml").exists() and not any((run / "checkpoints").glob("*[!p]/model.safetensors"))  # not *.tmp


def with_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """vocab_size filled in, or checked."""
    needed = tokenizer.n_vocab
    if config.vocab_size is not None and config.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={config.vocab_size} is too small for tokenizer {tokenizer.name}, whose largest id is "
            f"{needed - 1}: use at least {needed}, or null to take it from the tokenizer"
        )
    return replace(config, vocab_size=config.vocab_size or needed)
