"""Depthwise convolutions in half precision, as the short ones of linear attention and Mamba are.

torch's kernel takes 50 to 90 ms for 8,192 channels and one token in bfloat16 on a CPU without
AVX-512; the sum of shifted products takes 0.6 (two threads). Each number of the result is computed
in one way, so it depends on neither the length of the input nor the sequences beside it.

Legend: B sequences, C channels, T positions, N positions of the result, K of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

HALVES = (torch.bfloat16, torch.float16)


def depthwise_conv1d(
    x_BCT: Tensor, weight_C1K: Tensor, bias_C: Tensor | None = None, *, padding: int = 0
) -> Tensor:
    """[B, C, T] -> [B, C, N], N = T + 2 * padding - K + 1. Summed in float32 and rounded once."""
    padded_BCT = functional.pad(x_BCT.float(), (padding, padding))
    taps_KC1 = weight_C1K.float().permute(2, 0, 1)
    length = padded_BCT.shape[-1] - len(taps_KC1) + 1
    out_BCN = padded_BCT[..., :length] * taps_KC1[0]
    for k, tap_C1 in enumerate(taps_KC1[1:], start=1):
        out_BCN.addcmul_(padded_BCT[..., k : k + length], tap_C1)
    if bias_C is not None:
        out_BCN += bias_C[:, None]
    return out_BCN.to(x_BCT.dtype)


def has_convolution(module: nn.Module) -> bool:
    """Return True for the owner of a depthwise convolution that torch computes slowly."""
    return any(
        isinstance(child, nn.Conv1d)
        and child.groups == child.in_channels == child.out_channels
        and child.weight.dtype in HALVES
        for child in module.children()
    )


class DepthwiseConvolutions(TorchFunctionMode):
    """A context in which torch's conv1d is `depthwise_conv1d` where that computes the same. A
    module may call it as a function or as nn.Conv1d.
    """

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which runs in this context."""

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or ours in its place."""
        kwargs = kwargs or {}
        if func is torch.conv1d:
            return _conv1d(*args, **kwargs)
        return func(*args, **kwargs)


def _conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """torch.conv1d, whose arguments have these names."""
    channels, per_group = weight.shape[:2]
    is_depthwise = per_group == 1 and groups == channels and _one(stride) == _one(dilation) == 1
    is_half = input.dtype == weight.dtype and input.dtype in HALVES and input.device.type == "cpu"
    is_plain = input.dim() == 3 and not isinstance(padding, str) and not torch.is_grad_enabled()
    if not (is_depthwise and is_half and is_plain):
        return torch.conv1d(input, weight, bias, stride, padding, dilation, groups)
    return depthwise_conv1d(input, weight, bias, padding=_one(padding))


def _one(size: int | tuple[int] | list[int]) -> int:
    return size if isinstance(size, int) else size[0]
