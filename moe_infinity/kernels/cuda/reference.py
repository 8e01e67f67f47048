"""The kernels of a device that decides within a step, in plain PyTorch and Python: the definition
that the Triton kernels are tested against. On host memory: an address is looked into as it is.

Legend: L MoE rows, E experts of a row, P (token, k) pairs, T tokens, K experts per token, D model
width, F expert width.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from math import prod

import torch
from torch import Tensor

from moe_infinity.checkpoint.layout import WORDS
from moe_infinity.cuda.device_table import ABSENT, FREE, NOTHING, ON_DISK, DeviceTable
from moe_infinity.kernels import unpack
from moe_infinity.kernels.cuda.slot_mlp import Matrix, Part, SlotMlp
from moe_infinity.kernels.unpack import NIBBLES


def memory_at(address: int, num_bytes: int) -> Tensor:
    """uint8 [num_bytes], sharing memory that somebody else keeps alive."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def resolve(table: DeviceTable, moe_layer_idx: int, top_k_index_TK: Tensor) -> Tensor:
    """See triton_resolve.resolve."""
    index_P = top_k_index_TK.flatten().tolist()
    table.sources_P[: len(index_P)] = 0
    if table.needs_replay():
        index_P = [-1] * len(index_P)
    table.reports_L2P[moe_layer_idx, 0, : len(index_P)] = torch.tensor(
        index_P, dtype=torch.int32, device="cpu"
    )
    table.reports_L2P[moe_layer_idx, 1, : len(index_P)] = NOTHING
    for expert, num_uses in Counter(index_P).items():
        if expert >= 0:
            table.uses_LE[moe_layer_idx, expert] += num_uses
    looked_up: dict[int, int] = {-1: 0}  # expert -> address
    for pair, expert in enumerate(index_P):
        if expert not in looked_up:
            looked_up[expert] = _look_up(table, moe_layer_idx, expert, pair)
        table.pointers_P[pair] = looked_up[expert]
    return table.pointers_P[: len(index_P)].view(top_k_index_TK.shape)


def _look_up(table: DeviceTable, moe_layer_idx: int, expert: int, pair: int) -> int:
    """The address of an expert; if it misses, after it took a slot and was told."""
    slot, host = (
        int(table.slot_LE[moe_layer_idx, expert]),
        int(table.host_LE[moe_layer_idx, expert]),
    )
    if slot >= 0:
        return int(table.address_S[slot])
    if host == 0:
        slot = ON_DISK
        table.replay_flag.fill_(1)
    else:
        slot = _take_slot(table, moe_layer_idx, expert)
        table.sources_P[pair] = host if slot >= 0 else 0
    table.reports_L2P[moe_layer_idx, 1, pair] = slot
    return int(table.address_S[slot]) if slot >= 0 else host


def _take_slot(table: DeviceTable, moe_layer_idx: int, expert: int) -> int:
    """A free one, or that of the lowest-scored resident that may leave; else ABSENT."""
    part = table.part_of(moe_layer_idx)
    candidates = []
    for slot, owner in enumerate(table.owner_S.tolist()):
        row, resident = divmod(owner, table.num_experts)
        if owner == FREE:
            candidates.append((-math.inf, slot))
        elif row == moe_layer_idx and table.uses_LE[row, resident]:
            continue
        elif not moe_layer_idx < row <= table.last_layers[part]:
            score = float(table.scores_LHE[row, part, resident])
            candidates += [(score, slot)] if score < math.inf else []
    if not candidates:
        return ABSENT
    _, slot = min(candidates)
    if table.owner_S[slot] != FREE:
        table.slot_LE.view(-1)[table.owner_S[slot]] = ABSENT
    table.slot_LE[moe_layer_idx, expert] = slot
    table.owner_S[slot] = moe_layer_idx * table.num_experts + expert
    return slot


def fill(table: DeviceTable, pointers_TK: Tensor) -> None:
    """See triton_resolve.fill."""
    slot_bytes = table.slots_SB.shape[1]
    sources = table.sources_P[: pointers_TK.numel()].tolist()
    for pointer, source in zip(pointers_TK.flatten().tolist(), sources, strict=True):
        if source:
            memory_at(pointer, slot_bytes).copy_(memory_at(source, slot_bytes))


def slot_moe(mlp: SlotMlp, x_TD: Tensor, pointers_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
    """See triton_experts.slot_moe."""
    dtype, x_TD = x_TD.dtype, x_TD.float()
    out_TD = torch.zeros_like(x_TD)
    for t, pointers_K in enumerate(pointers_TK.tolist()):
        for k, pointer in enumerate(pointers_K):
            if pointer:
                slot, weight = memory_at(pointer, mlp.num_bytes), top_k_weights_TK[t, k].float()
                x, after = (weight * x_TD[t], 1.0) if mlp.weighs_input else (x_TD[t], weight)
                halves = [m for m in (mlp.gate, mlp.up) if m is not None]
                hidden = mlp.activation(*(_linear(m, slot, x) for m in halves))
                out_TD[t] += after * _linear(mlp.down, slot, hidden)
    return out_TD.to(dtype)


def _linear(matrix: Matrix, slot: Tensor, x: Tensor) -> Tensor:
    out = weight_of(matrix, slot) @ x
    if matrix.bias is not None:
        out += _numbers(slot, matrix.bias, matrix.num_weight_rows)[_rows(matrix)].float()
    return out


def weight_of(matrix: Matrix, slot: Tensor) -> Tensor:
    """[R, C] in float32: values times scales as they are stored, not rounded."""
    rows, columns = matrix.num_weight_rows, matrix.num_columns
    if matrix.scale is not None:
        grid = -(-rows // matrix.block_rows), matrix.num_scale_columns
        scales = _numbers(slot, matrix.scale, *grid)
    if matrix.kind == "mxfp4":
        blocks = _numbers(slot, matrix.values, rows, columns // 32, 16)
        weight = unpack.mxfp4(blocks, scales, torch.float32).t()
    elif matrix.kind == "int4":
        words, zeros = _numbers(slot, matrix.values, rows, columns // unpack.NIBBLES), None
        if matrix.zeros is not None:
            zeros = _numbers(slot, matrix.zeros, -(-rows // unpack.NIBBLES), scales.shape[1])
        weight = unpack.int4_rows(words, scales.float(), zeros, torch.float32)
    elif matrix.kind in WORDS:
        weight = _of_words(matrix, slot)
    else:
        rows = rows if matrix.column_stride == 1 else matrix.column_stride
        weight = _numbers(slot, matrix.values, rows * columns)
        weight = weight.as_strided((rows, columns), (matrix.row_stride, matrix.column_stride))
        if matrix.kind == "int8":
            weight = unpack.int8_rows(weight, scales.float(), torch.float32)
        elif matrix.kind == "fp8":
            block = matrix.block_rows, matrix.block_columns
            weight = unpack.fp8(weight, scales, block, torch.float32)
    return weight.float()[_rows(matrix)]


def _of_words(matrix: Matrix, slot: Tensor) -> Tensor:
    """[R, C] of the whole weight."""
    assert matrix.scale is not None, matrix
    assert matrix.zeros is not None, matrix
    rows, columns, groups = matrix.column_stride, matrix.num_columns, matrix.num_scale_columns
    words = (columns, rows // NIBBLES) if matrix.kind == "awq" else (columns // NIBBLES, rows)
    parts = {
        "qweight": _numbers(slot, matrix.values, *words),
        "qzeros": _numbers(slot, matrix.zeros, groups, rows // NIBBLES),
        "scales": _numbers(slot, matrix.scale, groups, rows).float(),
    }
    if matrix.kind == "awq":
        return unpack.awq(parts, torch.float32)
    if matrix.groups is not None:
        parts["g_idx"] = _numbers(slot, matrix.groups, columns)
    return unpack.gptq(parts, torch.float32, adds_one_to_zeros=matrix.kind == "gptq")


def _rows(matrix: Matrix) -> slice:
    """Which of the weight are the matrix's."""
    return slice(matrix.first_row, matrix.num_weight_rows, matrix.row_step)


def _numbers(slot: Tensor, part: Part, *shape: int) -> Tensor:
    dtype = getattr(torch, part.dtype)
    return slot[part.offset :][: prod(shape) * dtype.itemsize].view(dtype).view(shape)
