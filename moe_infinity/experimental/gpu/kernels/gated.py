"""What an MLP computes between its products, in one kernel. reference.py has the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.activated import mlp_hidden
from moe_infinity.kernels.activation import Activation

COLUMNS = 512  # of a program


def gated(gate_up_TC: Tensor, activation: Activation) -> Tensor:
    """[T, 2 F] -> [T, F]: all columns of gate are before those of up. Rounded once."""
    num_tokens, num_columns = gate_up_TC.shape
    assert activation.is_gated, activation
    assert gate_up_TC.is_contiguous(), gate_up_TC.stride()
    width = num_columns // 2
    dtype = gate_up_TC.dtype
    hidden_TF = torch.empty(num_tokens, width, dtype=dtype, device=gate_up_TC.device)
    _gated[(num_tokens, triton.cdiv(width, COLUMNS))](
        gate_up_TC,
        hidden_TF,
        WIDTH=width,
        ACTIVATION=activation,
        COLUMNS=COLUMNS,
        enable_fp_fusion=True,
    )
    return hidden_TF


@triton.jit
def _gated(
    gate_up_TC,
    hidden_TF,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_F = column_F < WIDTH
    gate = gate_up_TC + token * (2 * WIDTH) + column_F
    gate_F = tl.load(gate, mask=is_column_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate + WIDTH, mask=is_column_F, other=0.0).to(tl.float32)
    hidden_F = mlp_hidden(gate_F, up_F, ACTIVATION).to(hidden_TF.dtype.element_ty)
    tl.store(hidden_TF + token * WIDTH + column_F, hidden_F, mask=is_column_F)
