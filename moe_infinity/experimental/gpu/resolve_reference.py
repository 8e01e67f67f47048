"""What resolve.py does, in plain PyTorch and Python: the definition that its Triton kernels
are tested against. On host memory: an address is read as it is.

Legend: L MoE layers, E experts of a layer, T tokens, K experts per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_infinity.experimental.gpu.device_table import ABSENT, FREE, NOTHING, DeviceTable
from moe_infinity.experimental.gpu.kernels.reference import memory_at


def resolve(table: DeviceTable, moe_layer_idx: int, top_k_index_TK: Tensor) -> Tensor:
    """See experimental/gpu/resolve.py."""
    index_P = top_k_index_TK.flatten().cpu()
    used = sorted(set(index_P[index_P >= 0].tolist()))
    report_W = table.reports_LW[moe_layer_idx]
    report_W[: table.num_experts] = NOTHING
    report_W[table.num_experts :][: len(index_P)] = index_P
    table.uses_E[:] = torch.bincount(index_P[index_P >= 0], minlength=table.num_experts)
    table.pointers_E.zero_()
    table.copies_2E.zero_()
    num_missed = 0
    for expert in used:
        slot = int(table.slot_LE[moe_layer_idx, expert])
        host = int(table.host_LE[moe_layer_idx, expert])
        if slot < 0:
            slot = _take_slot(table, moe_layer_idx, expert)
            report_W[expert] = slot
            if slot >= 0:
                copy = torch.tensor(
                    [host, int(table.address_S[slot])], dtype=torch.int64, device="cpu"
                )
                table.copies_2E[:, num_missed] = copy
            num_missed += 1
        table.pointers_E[expert] = table.address_S[slot] if slot >= 0 else host
    return table.pointers_E


def _take_slot(table: DeviceTable, moe_layer_idx: int, expert: int) -> int:
    """A free one, or that of the lowest-scored resident that may leave; else ABSENT."""
    part = table.part_of(moe_layer_idx)
    candidates = []
    for slot, owner in enumerate(table.owner_S.tolist()):
        row, resident = divmod(owner, table.num_experts)
        if owner == FREE:
            candidates.append((-math.inf, slot))
        elif row == moe_layer_idx and table.uses_E[resident]:
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


def fill(table: DeviceTable, num_pairs: int) -> None:
    """See experimental/gpu/resolve.py."""
    slot_bytes = table.slots_SB.shape[1]
    for source, destination in table.copies_2E.T[:num_pairs].tolist():
        if source:
            memory_at(destination, slot_bytes).copy_(memory_at(source, slot_bytes))
