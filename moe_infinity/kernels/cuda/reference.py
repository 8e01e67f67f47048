"""The reference of the Triton kernels, in plain PyTorch and Python: the experts of one MoE layer,
from the addresses of their slots, which are in host memory.

Legend: T tokens, K experts per token, D model width, F expert width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_infinity.checkpoint.layout import SCALES, view_of
from moe_infinity.kernels.cuda.slot_mlp import Matrix, SlotMlp


def memory_at(address: int, num_bytes: int) -> Tensor:
    """uint8 [num_bytes], sharing memory that the caller keeps alive."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def slot_moe(mlp: SlotMlp, x_TD: Tensor, pointers_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
    """See kernels/cuda/experts.py."""
    dtype = x_TD.dtype
    x_TD = x_TD.float()
    out_TD = torch.zeros_like(x_TD)
    for t, pointers_K in enumerate(pointers_TK.tolist()):
        for k, pointer in enumerate(pointers_K):
            if pointer:
                slot = memory_at(pointer, mlp.num_bytes)
                weight = top_k_weights_TK[t, k].float()
                x, after = (weight * x_TD[t], 1.0) if mlp.weighs_input else (x_TD[t], weight)
                halves = [m for m in (mlp.gate, mlp.up) if m is not None]
                hidden = mlp.activation(*(_linear(m, slot, x) for m in halves))
                out_TD[t] += after * _linear(mlp.down, slot, hidden)
    return out_TD.to(dtype)


def _linear(matrix: Matrix, slot: Tensor, x: Tensor) -> Tensor:
    out = weight_of(matrix, slot) @ x
    if matrix.bias is not None:
        out += view_of(matrix.bias, slot)[_rows(matrix)].float()
    return out


def weight_of(matrix: Matrix, slot: Tensor) -> Tensor:
    """[R, C] in float32: values times scales as they are stored, not rounded."""
    weight = matrix.weight
    parts = {role: view_of(part, slot) for role, part in weight.parts.items()}
    if weight.unpack is None:
        whole = parts["values"].t() if weight.is_transposed else parts["values"]
    else:
        if weight.scale is not None and weight.scale.dtype in SCALES:
            parts["scale"] = parts["scale"].float()
        whole = weight.unpack(parts, weight.block, torch.float32)
    return whole.float()[_rows(matrix)]


def _rows(matrix: Matrix) -> slice:
    """Which rows of the weight the matrix has."""
    stop = matrix.first_row + matrix.row_step * (matrix.num_rows - 1) + 1
    return slice(matrix.first_row, stop, matrix.row_step)
