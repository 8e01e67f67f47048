"""RMSNorm in one kernel, where modules launch eight. norms_reference.py has its definition."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, form: str) -> Tensor:
    """[..., D] -> the same. `weight_D` is contiguous, and on the device of x."""
    width = len(weight_D)
    x = x.contiguous()
    out = x.new_empty(x.shape)
    _rms_norm[(x.numel() // width,)](
        x,
        weight_D,
        out,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        FORM=form,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(
    x_RD,
    weight_D,
    out_RD,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
):
    column_D = tl.arange(0, BLOCK)
    is_column_D = column_D < WIDTH
    at_D = tl.program_id(0).to(tl.int64) * WIDTH + column_D
    x_D = tl.load(x_RD + at_D, mask=is_column_D, other=0.0).to(tl.float32)
    weight = tl.load(weight_D + column_D, mask=is_column_D, other=0.0).to(tl.float32)
    normed_D = x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / WIDTH + eps)
    if FORM == "rounded twice":
        normed_D = normed_D.to(out_RD.dtype.element_ty).to(tl.float32)
    if FORM == "plus one":
        weight += 1.0
    normed_D *= weight
    tl.store(out_RD + at_D, normed_D.to(out_RD.dtype.element_ty), mask=is_column_D)
