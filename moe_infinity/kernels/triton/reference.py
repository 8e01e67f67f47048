"""The definition of the kernels of experts.py, in plain PyTorch and Python, from the addresses of
slots that are in host memory.

Legend: T tokens, K experts per token, P = T * K pairs, E experts, D model width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_infinity.kernels.triton.slot_mlp import Matrix, SlotMlp
from moe_infinity.layout import SCALES, view_of


def memory_at(address: int, num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes], sharing memory that the caller keeps alive."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def compute_pairs(
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
    out_PD: Tensor,
) -> None:
    """Fill the rows of `out_PD` whose experts have a pointer; see experts.py."""
    top_k = index_TK.shape[1]
    index_P = index_TK.flatten()
    for expert, pointer in enumerate(pointers_E.tolist()):
        pairs = (index_P == expert).nonzero().flatten().tolist()
        if not pointer or not pairs:
            continue
        slot = memory_at(pointer, mlp.num_bytes)
        up = [(weight_of(m, slot), _bias(m, slot)) for m in (mlp.gate, mlp.up) if m is not None]
        down = weight_of(mlp.down, slot)
        down_bias = _bias(mlp.down, slot)
        for pair in pairs:  # a row alone, so that its bits do not depend on others
            x = x_TD[pair // top_k].float()
            if mlp.weighs_input:
                x = weights_TK.flatten()[pair].float() * x
            hidden = mlp.activation(*(weight @ x + up_bias for weight, up_bias in up))
            out_PD[pair] = down @ hidden + down_bias


def sum_pairs(
    mlp: SlotMlp, out_PD: Tensor, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [T, D]: the weighted sums over each token's experts; see experts.py."""
    shape = len(index_TK), out_PD.shape[1]
    sum_TD = torch.zeros(shape, dtype=torch.float32, device="cpu")
    for t, index_K in enumerate(index_TK.tolist()):
        for k, expert in enumerate(index_K):
            if expert >= 0:
                weight = 1.0 if mlp.weighs_input else weights_TK[t, k].float()
                sum_TD[t] += weight * out_PD[t * len(index_K) + k]
    return sum_TD.to(dtype)


def _bias(matrix: Matrix, slot: Tensor) -> Tensor:
    """[R] in float32."""
    if matrix.bias is None:
        return torch.zeros(matrix.num_rows, dtype=torch.float32, device="cpu")
    return view_of(matrix.bias, slot)[_rows(matrix)].float()


def weight_of(matrix: Matrix, slot: Tensor) -> Tensor:
    """Return [R, C] in float32: values times scales as they are stored, not rounded."""
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
