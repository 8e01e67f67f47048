"""The kernels of a device that decides within a step, in plain PyTorch and Python: the definition
that the Triton kernels are tested against. On host memory: an address is looked into as it is.

Legend: L MoE rows, E experts of a row, P (token, k) pairs, T tokens, K experts per token, D model
width, F expert width.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import torch
from torch import Tensor

from moe_infinity.kernels.device_table import ABSENT, LOST, NUM_LOGGED, ON_DISK, DeviceTable


def memory_at(address: int, num_bytes: int) -> Tensor:
    """uint8 [num_bytes], sharing memory that somebody else keeps alive."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def resolve(table: DeviceTable, moe_row: int, top_k_index_TK: Tensor) -> Tensor:
    """See triton_resolve.resolve."""
    index_P = top_k_index_TK.flatten().tolist()
    table.sources_P.zero_()
    if int(table.head[LOST]):
        index_P = [-1] * len(index_P)
    table.routing_LP[moe_row] = -1
    table.routing_LP[moe_row, : len(index_P)] = torch.tensor(index_P)
    for expert, num_uses in Counter(index_P).items():
        if expert >= 0:
            table.uses_LE[moe_row, expert] += num_uses
    looked_up: dict[int, int] = {-1: 0}  # expert -> address
    for pair, expert in enumerate(index_P):
        if expert not in looked_up:
            looked_up[expert] = _look_up(table, moe_row, expert, pair)
        table.pointers_P[pair] = looked_up[expert]
    return table.pointers_P[: len(index_P)].view(top_k_index_TK.shape)


def _look_up(table: DeviceTable, moe_row: int, expert: int, pair: int) -> int:
    """The address of an expert; if it misses, after it took a slot and was logged."""
    slot, host = int(table.slot_LE[moe_row, expert]), int(table.host_LE[moe_row, expert])
    if slot >= 0:
        return int(table.address_S[slot])
    entry, free = int(table.head[NUM_LOGGED]), int(table.num_free)
    table.head[NUM_LOGGED] += 1
    if host == 0:
        slot = ON_DISK
        table.head[LOST] = moe_row + 1
    elif slot == ABSENT and free and entry < table.max_misses:
        slot = int(table.free_S[free - 1])
        table.num_free -= 1
        table.slot_LE[moe_row, expert] = slot
        table.sources_P[pair] = host
    if entry < table.max_misses:
        table.log_N3[entry] = torch.tensor([moe_row, expert, slot])
    return int(table.address_S[slot]) if slot >= 0 else host


def fill(table: DeviceTable) -> None:
    """See triton_resolve.fill."""
    slot_bytes = table.slots_SB.shape[1]
    for pointer, source in zip(table.pointers_P.tolist(), table.sources_P.tolist(), strict=True):
        if source:
            memory_at(pointer, slot_bytes).copy_(memory_at(source, slot_bytes))
