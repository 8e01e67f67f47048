"""The kernels of a device that decides within a step, in plain PyTorch and Python: the definition
that the Triton kernels are tested against. On host memory: an address is looked into as it is.

Legend: L MoE layers, E experts of a layer, P (token, k) pairs, T tokens, K experts per token,
D model width, F expert width.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter

import torch
from torch import Tensor

from moe_infinity.checkpoint.layout import SCALES, view_of
from moe_infinity.cuda.device_table import ABSENT, FREE, NOTHING, ON_DISK, DeviceTable
from moe_infinity.kernels.cuda.slot_mlp import Matrix, SlotMlp


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
    """Which of the weight are the matrix's."""
    stop = matrix.first_row + matrix.row_step * (matrix.num_rows - 1) + 1
    return slice(matrix.first_row, stop, matrix.row_step)
