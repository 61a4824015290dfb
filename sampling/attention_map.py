"""A picture of attention: which tokens each head reads, drawn from the reference attention."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from einops import repeat
from torch import Tensor

from model import MultiHeadAttention, Transformer, scaled_dot_product_attention
from model.generation import evaluating

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED = 40  # tokens a panel; beyond, every second, third ... token has a label
HIDDEN = "0.88"  # a light grey


def attention_weights(model: Transformer, ids: Sequence[int]) -> list[Tensor]:
    """Each layer's weights (heads, t, t) over the tokens, row q: where query q reads."""
    found: list[Tensor] = []

    def look(attention: MultiHeadAttention, inputs: tuple) -> None:
        x, position, at, mask, _ = inputs
        q, k, v = attention.project(x, position, at)
        k, v = (repeat(z, "b kv s d -> b (kv g) s d", g=q.size(1) // z.size(1)) for z in (k, v))
        found.append(scaled_dot_product_attention(q, k, v, True if mask is None else mask)[1][0].float().cpu())

    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        with evaluating(list(model.modules())):
            model.features(torch.tensor([list(ids)], device=model.embed.weight.device))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def attention_figure(weights: Sequence[Tensor], tokens: Sequence[str], first_layer: int = 0) -> "Figure":
    """One panel a head: a row of panels for each layer, or the heads of a single layer in rows of four.

    A panel's rows are the tokens that read, its columns those that are read; each row sums to 1. The future, which
    the mask hides, is grey.
    """
    from matplotlib.colors import PowerNorm  # matplotlib is slow to import, and only pictures need it
    from matplotlib.figure import Figure

    heads = [(f"layer {n}, head {h}", head) for n, layer in enumerate(weights, first_layer) for h, head in enumerate(layer)]
    rows = len(weights) if len(weights) > 1 else math.ceil(len(heads) / 4)
    columns = math.ceil(len(heads) / rows)
    side = min(max(1.6, 0.14 * len(tokens)), 0.14 * LABELLED)  # inches
    figure = Figure(figsize=(columns * (side + 0.2) + 2, rows * (side + 0.3) + 1), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel in panels[len(heads) :]:
        panel.remove()
    future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    norm = PowerNorm(0.5, 0, 1)  # the square root: weights of a few per cent are seen, too
    for n, (panel, (title, head)) in enumerate(zip(panels, heads, strict=False)):
        image = panel.imshow(head.masked_fill(future, math.nan).numpy(), cmap="magma_r", norm=norm)
        panel.set_facecolor(HIDDEN)
        panel.set_title(title, fontsize=8)
        label(panel, tokens, left=n % columns == 0, bottom=n + columns >= len(heads))
    figure.supxlabel("the token that is read (key)", fontsize=9)
    figure.supylabel("the token that reads (query)", fontsize=9)
    figure.colorbar(image, ax=panels[: len(heads)], shrink=min(1, 3 / (rows * side)), label="attention weight")
    return figure


def label(panel: "Axes", tokens: Sequence[str], left: bool, bottom: bool) -> None:
    """Write the tokens at the panel's left and bottom sides: as they are, whatever signs mathtext knows."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("monospace")).get_charmap()
    every = range(0, len(tokens), math.ceil(len(tokens) / LABELLED))
    shown = ["".join(c if ord(c) in known else ascii(c)[1:-1] for c in tokens[i]) for i in every]
    panel.set_xticks(every if bottom else [], shown if bottom else [], rotation=90)
    panel.set_yticks(every if left else [], shown if left else [])
    panel.tick_params(labelsize=7, length=2, labelfontfamily="monospace")
    for text in [*panel.get_xticklabels(), *panel.get_yticklabels()]:
        text.set_parse_math(False)
