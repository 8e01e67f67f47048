"""Products in half precision: sums in float32, rounded once, whatever torch's kernels do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moe_infinity.kernels.cpu import half_products
from moe_infinity.kernels.cpu.half_products import HalfProducts

pytestmark = pytest.mark.arithmetic

HALVES = [torch.bfloat16, torch.float16]
SHAPES = [
    ((40, 24), (24, 30)),
    ((3, 40, 24), (24, 30)),
    ((2, 1, 40, 24), (5, 24, 30)),
    ((2, 5, 40, 24), (1, 1, 24, 30)),
]


class Calls(TorchFunctionMode):
    """Notes the dtypes of products that reach torch."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in half_products.OURS:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def bound_of(exact, sizes, dtype):
    """Half a unit of the result, and the errors of sums of 24 numbers in float32."""
    return torch.finfo(dtype).eps / 2 * exact.abs() + 24 * torch.finfo(torch.float32).eps * sizes


@pytest.mark.parametrize("piece", [1, 1 << 24])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_product_is_that_of_float64_rounded_once(shapes, dtype, piece, monkeypatch):
    monkeypatch.setattr(half_products, "PIECE", piece)
    torch.manual_seed(0)
    a, b = (torch.randn(shape).to(dtype) for shape in shapes)
    exact = a.double() @ b.double()
    bound = bound_of(exact, a.double().abs() @ b.double().abs(), dtype)
    with torch.no_grad(), Calls() as calls, HalfProducts():
        found = [torch.matmul(a, b), a @ b, a.matmul(b)]
        found += [torch.bmm(a, b)] if a.dim() == b.dim() == 3 else []
    assert dtype not in calls.dtypes
    for each in found:
        assert each.dtype == dtype
        assert each.shape == exact.shape
        assert ((each.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("piece", [1, 1 << 24])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_linear_layer_is_that_of_float64_rounded_once(dtype, has_bias, piece, monkeypatch):
    monkeypatch.setattr(half_products, "PIECE", piece)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 40, 24).to(dtype), torch.randn(30, 24).to(dtype)
    bias = torch.randn(30).to(dtype) if has_bias else None
    wide = None if bias is None else bias.double()
    exact = functional.linear(x.double(), weight.double(), wide)
    sizes = functional.linear(x.double().abs(), weight.double().abs()) + (0 if wide is None else 9)
    with torch.no_grad(), Calls() as calls, HalfProducts():
        found = functional.linear(x, weight, bias)
    assert dtype not in calls.dtypes
    assert ((found.double() - exact).abs() <= bound_of(exact, sizes, dtype)).all()


def test_what_is_not_slow_or_would_lose_something_is_left_to_torch():
    x, weight = torch.randn(40, 24), torch.randn(30, 24)
    half = torch.bfloat16
    with Calls() as calls, HalfProducts():
        with torch.no_grad():
            functional.linear(x, weight)
            functional.linear(x[:3].to(half), weight.to(half))  # few rows
            x.to(half) @ weight[0].to(half)  # a vector
        assert calls.dtypes == [torch.float32, half, half]
        graph = x.to(half).requires_grad_() @ weight.to(half).t()
    assert graph.grad_fn is not None


def test_transposed_factors_are_taken_as_they_are():
    torch.manual_seed(0)
    a, b = torch.randn(3, 20, 24).bfloat16(), torch.randn(3, 30, 24).bfloat16()
    with torch.no_grad(), HalfProducts():
        assert torch.equal(a @ b.transpose(1, 2), a @ b.transpose(1, 2).contiguous())
