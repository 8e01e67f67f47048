"""Depthwise convolutions in half precision: sums in float32, rounded once, whatever lies beside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moe_infinity.kernels.cpu.convolution import (
    DepthwiseConvolutions,
    depthwise_conv1d,
    has_convolution,
)

pytestmark = pytest.mark.arithmetic


class Calls(TorchFunctionMode):
    """Counts what reaches torch's conv1d."""

    num = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.conv1d
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("size", [3, 4])
def test_a_convolution_is_that_of_float64_rounded(dtype, has_bias, padding, size):
    x = torch.randn(2, 24, 9).to(dtype)
    weight = torch.randn(24, 1, size).to(dtype)
    bias = torch.randn(24).to(dtype) if has_bias else None
    wide = None if bias is None else bias.double()
    exact = functional.conv1d(x.double(), weight.double(), wide, padding=padding, groups=24)
    with torch.no_grad(), DepthwiseConvolutions():
        found = functional.conv1d(x, weight, bias, padding=padding, groups=24)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_a_position_has_the_same_bits_whatever_lies_beside_it():
    x = torch.randn(3, 40, 600).bfloat16()
    weight = torch.randn(40, 1, 4).bfloat16()
    whole = depthwise_conv1d(x, weight, padding=3)[..., :600]
    for first in (0, 1, 17, 596):
        padded = functional.pad(x, (3, 0))[1:2, :, first : first + 7]
        alone = depthwise_conv1d(padded, weight)
        assert torch.equal(alone, whole[1:2, :, first : first + alone.shape[2]])


def test_modules_are_served_and_other_convolutions_are_torchs():
    x = torch.randn(1, 8, 6).bfloat16()
    with torch.no_grad(), Calls() as calls, DepthwiseConvolutions():
        nn.Conv1d(8, 8, 3, groups=8, padding=2, bias=False).bfloat16()(x)
        assert calls.num == 0
        for other in (
            nn.Conv1d(8, 8, 3, groups=8, stride=2),
            nn.Conv1d(8, 8, 3, groups=8, dilation=2),
            nn.Conv1d(8, 8, 3, groups=8, padding="same"),
            nn.Conv1d(8, 16, 3, groups=8),
            nn.Conv1d(8, 8, 3),
        ):
            other = other.bfloat16()
            before = calls.num
            other(x)
            assert calls.num == before + 1
        functional.conv1d(x.float(), torch.randn(8, 1, 3), groups=8)
        functional.conv1d(x[0], torch.randn(8, 1, 3).bfloat16(), groups=8)
        assert calls.num == before + 3
    with Calls() as calls, DepthwiseConvolutions():
        nn.Conv1d(8, 8, 3, groups=8).bfloat16()(x)  # its gradients may be wanted
    assert calls.num == 1


def test_an_owner_is_known_by_its_child():
    def owner(child: nn.Module) -> nn.Module:
        return nn.ModuleDict({"conv": child})

    assert has_convolution(owner(nn.Conv1d(8, 8, 3, groups=8).bfloat16()))
    assert not has_convolution(owner(nn.Conv1d(8, 8, 3, groups=8)))
    assert not has_convolution(owner(nn.Conv1d(8, 8, 3).bfloat16()))
    assert not has_convolution(owner(nn.Linear(8, 8).bfloat16()))
