"""Refuses a backward pass through experts, whose weights have no gradients.

Dense weights keep `requires_grad`, as in stock transformers. With it torch takes other kernels for
some matrix products, which changes the last bit of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_infinity.errors import UnsupportedModelError


def without_gradient(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """The result of `compute`, which depends on `x`. A backward pass through it raises
    UnsupportedModelError.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return compute()
    out: Tensor = _Refusal.apply(x, compute)  # type: ignore[no-untyped-call]
    return out


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedModelError(
            "a model whose experts are not in memory cannot be trained: they have no gradient"
        )
