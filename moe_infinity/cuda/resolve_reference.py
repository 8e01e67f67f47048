"""What cuda/resolve.py does, in plain PyTorch and Python: the definition that its Triton kernels
are tested against. On host memory: an address is read as it is.

Legend: L MoE layers, E experts of a layer, P (token, k) pairs, T tokens, K experts per token.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from moe_infinity.cuda.device_table import ABSENT, FREE, NOTHING, ON_DISK, DeviceTable
from moe_infinity.kernels.cuda.reference import memory_at


def resolve(table: DeviceTable, moe_layer_idx: int, top_k_index_TK: Tensor) -> Tensor:
    """See cuda/resolve.py."""
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
    """The address of an expert; if it misses, after it took a slot and was reported."""
    slot = int(table.slot_LE[moe_layer_idx, expert])
    host = int(table.host_LE[moe_layer_idx, expert])
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
    """See cuda/resolve.py."""
    slot_bytes = table.slots_SB.shape[1]
    sources = table.sources_P[: pointers_TK.numel()].tolist()
    for pointer, source in zip(pointers_TK.flatten().tolist(), sources, strict=True):
        if source:
            memory_at(pointer, slot_bytes).copy_(memory_at(source, slot_bytes))
