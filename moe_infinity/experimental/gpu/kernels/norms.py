"""RMSNorm in one kernel, where modules launch eight, and the sums before it in the same.
norms_reference.py has the definitions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, form: str) -> Tensor:
    """[..., D] -> the same. `weight_D` is contiguous, and on the device of x."""
    return _launch(x, (), weight_D, eps, form)[1]


def add_rms_norm(
    x: Tensor, added: tuple[Tensor, ...], weight_D: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """The sum of x and one or two others, [..., D] each and of one dtype, and its norm."""
    assert all(t.shape == x.shape and t.dtype == x.dtype for t in added), (x.shape, added)
    return _launch(x, added, weight_D, eps, form)


def _launch(
    x: Tensor, added: tuple[Tensor, ...], weight_D: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    width = len(weight_D)
    rows = x.flatten(0, -2) if x.stride(-1) == 1 else x.contiguous().flatten(0, -2)
    one, other = (*(t.contiguous() for t in added), None, None)[:2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if added else x
    _rms_norm[(len(rows),)](
        rows,
        one,
        other,
        weight_D,
        total,
        out,
        rows.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        FORM=form,
        enable_fp_fusion=True,
    )
    return total, out


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(
    x_RD,
    one_RD,
    other_RD,
    weight_D,
    sum_RD,
    out_RD,
    x_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
):
    DTYPE: tl.constexpr = out_RD.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK)
    is_column_D = column_D < WIDTH
    at_D = row * WIDTH + column_D
    x_D = _load(x_RD + row * x_row + column_D, is_column_D)
    if one_RD is not None:
        added_D = _load(one_RD + at_D, is_column_D)
        if other_RD is not None:
            added_D += _load(other_RD + at_D, is_column_D)
            added_D = added_D.to(DTYPE).to(tl.float32)
        x_D = (x_D + added_D).to(DTYPE)
        tl.store(sum_RD + at_D, x_D, mask=is_column_D)
        x_D = x_D.to(tl.float32)
    weight = _load(weight_D + column_D, is_column_D)
    normed_D = x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / WIDTH + eps)
    if FORM == "rounded twice":
        normed_D = normed_D.to(DTYPE).to(tl.float32)
    if FORM == "plus one":
        weight += 1.0
    normed_D *= weight
    tl.store(out_RD + at_D, normed_D.to(DTYPE), mask=is_column_D)


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)
