"""A few rows are multiplied in another order than nn.Linear's, and to the same numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from model.linear import FEW, Linear


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Linear(48, 80, bias=bias, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, FEW[0], 8, FEW[1], FEW[1] + 1])
def test_it_is_a_linear_layer(rows, bias):
    linear = layer(bias)
    x = torch.randn(rows, 1, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = linear(x)
    assert y.shape == (rows, 1, 80) and y.is_contiguous()
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)


def products(linear: Linear, x: torch.Tensor) -> list[str]:
    with FlopCounterMode(display=False) as counter:
        linear(x)
    return [str(operator) for operator in counter.get_flop_counts()["Global"]]


def test_only_while_decoding_in_float32():
    """Of 8 rows: elsewhere it is the library's to the bit, with its gradients."""
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    linear, double = layer(), layer(dtype=torch.float64)
    assert products(linear, x) == products(double, x.double()) == ["aten.addmm"]
    with torch.no_grad():
        assert products(linear, x) == ["aten.mm"]
        assert products(double, x.double()) == ["aten.addmm"]
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
