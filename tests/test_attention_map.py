"""The picture shows the weights that the model used, under the names of the tokens."""

import warnings

import pytest
import torch
from einops import einsum, rearrange, repeat
from matplotlib.backends.backend_agg import FigureCanvasAgg

from model import Transformer
from model.positions import Position
from sampling.attention_map import LABELLED, attention_figure, attention_weights
from tests.tiny_models import HEADS, POSITIONS, random_ids, tiny


@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
def test_the_weights_are_those_that_made_the_models_output(position, layout):
    model, ids = tiny(position=position, n_kv_heads=HEADS[layout], dropout=0.5).train(), random_ids(1, 12)
    weights = attention_weights(model, ids[0].tolist())
    assert model.training and len(weights) == 2
    model.eval()
    for layer, weight in zip(model.blocks, weights, strict=True):
        assert weight.shape == (4, 12, 12)
        torch.testing.assert_close(weight.sum(-1), torch.ones(4, 12))
        assert (weight.triu(1) == 0).all()
        torch.testing.assert_close(output_by(weight, layer, model, ids), output_of(layer, model, ids), rtol=1e-4, atol=1e-5)


def output_of(layer: torch.nn.Module, model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    found = []
    hook = layer.attention.register_forward_hook(lambda module, inputs, output: found.append(output))
    model(ids)
    hook.remove()
    return found[0]


def output_by(weight: torch.Tensor, layer: torch.nn.Module, model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    """The layer's output, its attention replaced by the weights."""
    found = []
    hook = layer.attention.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    model(ids)
    hook.remove()
    _, _, v = layer.attention.project(found[0], Position(), torch.arange(ids.size(1)))
    v = repeat(v, "b kv s d -> b (kv g) s d", g=4 // v.size(1))
    context = einsum(weight, v, "h t s, b h s d -> b h t d")
    return layer.attention.out(rearrange(context, "b h t d -> b t (h d)"))


def figure_of(layers: int, heads: int, tokens: list[str], first_layer: int = 0):
    weights = [torch.rand(heads, len(tokens), len(tokens)).tril() for _ in range(layers)]
    figure = attention_figure(weights, tokens, first_layer)
    return figure, [axes for axes in figure.axes if axes.get_title()]


def draw(figure) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a character that the font lacks would warn
        FigureCanvasAgg(figure).draw()


@pytest.mark.parametrize(
    ("layers", "heads", "grid"), [(1, 8, (2, 4)), (1, 6, (2, 3)), (1, 1, (1, 1)), (3, 4, (3, 4)), (2, 1, (2, 1))]
)
def test_every_head_has_a_panel(layers, heads, grid):
    _, panels = figure_of(layers, heads, list("abcde"), first_layer=2)
    assert [panel.get_title() for panel in panels] == [f"layer {n + 2}, head {h}" for n in range(layers) for h in range(heads)]
    boxes = [panel.get_position() for panel in panels]
    assert (len({round(box.y0, 2) for box in boxes}), len({round(box.x0, 2) for box in boxes})) == grid


def test_eight_heads_and_24_tokens_are_readable():
    tokens = ["def", "␣", "quick", "sort", "(", "x", "s", ")", ":", "\\n", "␣␣␣␣", "return"] * 2
    figure, panels = figure_of(1, 8, tokens)
    draw(figure)
    assert max(figure.get_size_inches()) * figure.dpi < 2000
    for panel, axis in ((panels[0], "y"), (panels[4], "x"), (panels[7], "x")):
        ticks = panel.get_yticklabels() if axis == "y" else panel.get_xticklabels()
        assert [text.get_text() for text in ticks] == tokens
        boxes = [text.get_window_extent() for text in ticks]
        for one, next_one in zip(boxes, boxes[1:], strict=False):
            assert not one.overlaps(next_one)
    for one in panels:
        assert not [other for other in panels if other is not one and other.get_window_extent().overlaps(one.get_window_extent())]


def test_labels_are_the_tokens_whatever_they_spell():
    tokens = ["$x", "y$", "\\frac{", "_^", "␣the", "中", "é", "\\xe2"]
    figure, (panel,) = figure_of(1, 1, tokens)
    draw(figure)
    assert [text.get_text() for text in panel.get_xticklabels()] == ["$x", "y$", "\\frac{", "_^", "␣the", "\\u4e2d", "é", "\\xe2"]
    assert not any(text.get_parse_math() for text in [*panel.get_xticklabels(), *panel.get_yticklabels()])


def test_long_prompts_have_fewer_labels_and_no_larger_picture():
    figure, (panel, *_) = figure_of(1, 2, [str(i) for i in range(200)])
    labels = [int(text.get_text()) for text in panel.get_xticklabels()]
    assert len(labels) <= LABELLED and labels == list(range(0, 200, 5))
    assert max(figure.get_size_inches()) < 20


def test_the_future_is_left_out():
    figure, (panel,) = figure_of(1, 1, list("abc"))
    shown = panel.images[0].get_array()
    assert shown.mask.tolist() == [[False, True, True], [False, False, True], [False, False, False]]
