"""Models about to be filled from a file: nothing is drawn, and no memory is touched before a weight is read into it."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model import ModelConfig, Transformer
from model.positions import make_position


class WithoutDraws(TorchFunctionMode):
    """Weights need no random values; on the meta device drawing them would load much of torch's compiler, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **kwargs)


def skeleton(config: ModelConfig) -> Transformer:
    """The model's names and shapes, on the meta device."""
    with torch.device("meta"), WithoutDraws():
        return Transformer(config)


def allocate(model: Transformer, device: torch.device | str, dtype: torch.dtype) -> None:
    """Give a skeleton its memory. (`Module.to_empty` would do, at half a second and twice the embedding if tied.)"""
    tied = model.config.tie_embeddings
    for module in model.modules():
        if not (tied and module is model.head):
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, device=device, dtype=dtype)))
    model.position = make_position(model.config).to(device=device, dtype=dtype)  # some kinds compute a table
    model.tie()
