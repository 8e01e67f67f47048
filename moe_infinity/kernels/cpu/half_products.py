"""Products of matrices in half precision on processors that have no instructions for them, where
torch takes 5 to 20 times as long as in float32 (Zen 3, 64 heads of 512 x 64 by 64 x 512 in
bfloat16: 490 to 1,790 ms and 91). Attention that transformers computes step by step needs them, and
so do routers.

Each result is summed in float32 and rounded once, in pieces of bounded memory.

Legend: R rows, K summed columns, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

HALVES = (torch.bfloat16, torch.float16)
MIN_ROWS = 16  # fewer read a weight, which takes as long in any precision
PIECE = 4 << 20  # float32 numbers at once, of one sequence: of a factor or of the result


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[..., R, K] times [..., K, N] -> [..., R, N], in their dtype."""
    if b.dim() == 2:
        return linear(a, b.t())
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
    out = a.new_empty(*batch, a.shape[-2], b.shape[-1])
    step = max(1, PIECE // max(x.shape[-2:].numel() for x in (a, b, out)))
    for start in range(0, batch[-1], step):
        some = ..., slice(start, start + step), slice(None), slice(None)
        out[some] = a[some].float() @ b[some].float()
    return out


def linear(x: Tensor, weight_NK: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K] -> [..., N], in the dtype of x."""
    wide = x.float()
    out = x.new_empty(*x.shape[:-1], len(weight_NK))
    step = max(1, PIECE // max(1, weight_NK.shape[1]))
    for rows in (slice(i, i + step) for i in range(0, len(weight_NK), step)):
        own = None if bias is None else bias[rows].float()
        out[..., rows] = functional.linear(wide, weight_NK[rows].float(), own)
    return out


class HalfProducts(TorchFunctionMode):
    """A context in which torch's products in half precision are those of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or ours in its place."""
        ours = OURS.get(func)
        if ours is None or kwargs or not _are_slow(args):
            return func(*args, **(kwargs or {}))
        return ours(*args)


def _are_slow(args: tuple[Any, ...]) -> bool:
    """True for two matrices, or batches of them, in half precision."""
    a, b = args[:2] if len(args) > 1 else (None, None)
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.dtype == b.dtype
        and a.dtype in HALVES
        and a.device.type == b.device.type == "cpu"
        and min(a.dim(), b.dim()) > 1
        and a.numel() >= MIN_ROWS * a.shape[-1]
        and not torch.is_grad_enabled()
    )


OURS: dict[Any, Callable[..., Tensor]] = {
    torch.matmul: matmul, torch.bmm: matmul, Tensor.matmul: matmul, Tensor.bmm: matmul,
    Tensor.__matmul__: matmul, functional.linear: linear,
}  # fmt: skip
