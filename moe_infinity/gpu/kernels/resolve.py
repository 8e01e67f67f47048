"""The two kernels that find the experts of an MoE layer and copy those that are not on the device.

    resolve   one program, as two experts must not take the same slot. Each missed expert looks
              through all slots once, for the one with the lowest score
    fill      many programs for each missed expert; those that are not needed end at once

Both run in every MoE layer of a captured step. device_table.py has the rules they share with the
host, reference.py the plain code that defines what they do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.gpu.device_table import (
    ABSENT,
    ADDRESS_BYTES,
    FREE,
    NOTHING,
    DeviceTable,
)

_ABSENT = tl.constexpr(ABSENT)
_FREE = tl.constexpr(FREE)
_NOTHING = tl.constexpr(NOTHING)
_ADDRESS_BYTES = tl.constexpr(ADDRESS_BYTES)

# Slots whose scores are in registers at once, eight in each thread. With fewer slots than threads,
# several threads would load one score, and might see different values while the host uploads it.
SLOT_BLOCK = 1024
PAIR_BLOCK = 128  # pairs that are counted together
# Programs, and bytes of a block, for one expert. So many keep the link busy with a single miss (64
# blocks of 8 KiB are 512 KiB under way; 50 GB/s for 2 us need 100 KiB), and end at once for hits.
FILL_PROGRAMS = 64
FILL_BYTES = 8 << 10
WORD_BYTES = 8
_SLOT_BLOCK = tl.constexpr(SLOT_BLOCK)
_WORD_BYTES = tl.constexpr(WORD_BYTES)


def resolve(table: DeviceTable, moe_layer_idx: int, top_k_index_TK: Tensor) -> Tensor:
    """Return int64 [E]: the addresses of the experts that pairs use, 0 for the others.

    A missed expert takes one slot, whose bytes are there after fill(). `top_k_index_TK`, int64, has
    at most `table.max_pairs` pairs, -1 for one without an expert. The result is overwritten by the
    next call.
    """
    num_pairs = top_k_index_TK.numel()
    assert num_pairs <= table.max_pairs, (num_pairs, table.max_pairs)
    assert top_k_index_TK.is_contiguous(), top_k_index_TK.stride()
    part = table.part_of(moe_layer_idx)
    _resolve[(1,)](
        top_k_index_TK,
        table.slot_LE,
        table.host_LE,
        table.address_S,
        table.owner_S,
        table.scores_LHE,
        table.uses_E,
        table.reports_LW,
        table.pointers_E,
        table.copies_2E,
        moe_layer_idx,
        part,
        table.last_layers[part],
        num_pairs,
        NUM_SLOTS=len(table.slots_SB),
        NUM_EXPERTS=table.num_experts,
        REPORT_WORDS=table.reports_LW.shape[1],
        NUM_PARTS=len(table.last_layers),
        BINS=triton.next_power_of_2(table.num_experts + 1),
        BLOCK=PAIR_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,  # there is nothing to fuse; Triton 3.9 warns without it
    )
    return table.pointers_E


@triton.jit(do_not_specialize=["moe_layer_idx", "part", "last_layer", "num_pairs"])
def _resolve(
    index_P,
    slot_LE,
    host_LE,
    address_S,
    owner_S,
    scores_LHE,
    uses_E,
    reports_LW,
    pointers_E,
    copies_2E,
    moe_layer_idx,
    part,
    last_layer,
    num_pairs,
    NUM_SLOTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    REPORT_WORDS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    report = reports_LW + moe_layer_idx * REPORT_WORDS
    used = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(index_P + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        used += tl.histogram(tl.where(chosen >= 0, chosen, NUM_EXPERTS), BINS)
        # Written through the caches: the host reads while the step goes on.
        there = pair < num_pairs
        tl.store(report + NUM_EXPERTS + pair, chosen, mask=there, cache_modifier=".wt")

    expert = tl.arange(0, BINS)
    exists = expert < NUM_EXPERTS
    used = tl.where(exists, used, 0)
    cell = moe_layer_idx * NUM_EXPERTS + expert
    slot = tl.load(slot_LE + cell, mask=exists, other=0)
    host = tl.load(host_LE + cell, mask=exists, other=0)
    is_miss = (used > 0) & (slot < 0)
    order = tl.where(is_miss, tl.cumsum(is_miss.to(tl.int32), 0) - 1, -1)
    tl.store(uses_E + expert, used, mask=exists)
    tl.store(copies_2E + expert, 0, mask=exists)
    tl.store(copies_2E + NUM_EXPERTS + expert, 0, mask=exists)

    taken = taken_slots(
        order, cell, moe_layer_idx, part, last_layer, slot_LE, owner_S, scores_LHE, uses_E,
        NUM_SLOTS, NUM_EXPERTS, NUM_PARTS,
    )  # fmt: skip
    slot_now = tl.where(slot >= 0, slot, taken)
    address = tl.load(address_S + slot_now, mask=exists & (slot_now >= 0), other=0)
    pointer = tl.where(slot_now >= 0, address, host)
    tl.store(pointers_E + expert, tl.where(used > 0, pointer, 0), mask=exists)
    tl.store(copies_2E + order, host, mask=taken >= 0)
    tl.store(copies_2E + NUM_EXPERTS + order, address, mask=taken >= 0)
    took = tl.where(is_miss, taken, _NOTHING)
    tl.store(report + expert, took, mask=exists, cache_modifier=".wt")


@triton.jit
def taken_slots(
    order,
    cell,
    moe_layer_idx,
    part,
    last_layer,
    slot_LE,
    owner_S,
    scores_LHE,
    uses_E,
    NUM_SLOTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """The slot that each expert takes: a free one, or that of the resident with the lowest score
    among those that may be evicted; else -1. Experts choose in `order`; one of -1 wants no slot.
    """
    taken = tl.full(order.shape, _ABSENT, tl.int32)
    for n in range(tl.max(order, 0) + 1):
        tl.debug_barrier()  # owners and uses are as they were stored, and slots are loaded
        lowest = tl.full((), float("inf"), tl.float64)
        found = -1
        for first in range(0, NUM_SLOTS, _SLOT_BLOCK):
            slot = first + tl.arange(0, _SLOT_BLOCK)
            owner = tl.load(owner_S + slot, mask=slot < NUM_SLOTS, other=_FREE)
            is_owned = owner != _FREE
            layer = owner // NUM_EXPERTS
            is_own = is_owned & (layer == moe_layer_idx)
            uses = tl.load(uses_E + owner % NUM_EXPERTS, mask=is_own, other=0)
            stays = is_owned & (layer > moe_layer_idx) & (layer <= last_layer)
            stays = stays | (uses > 0) | (slot >= NUM_SLOTS)
            at = owner + (layer * (NUM_PARTS - 1) + part) * NUM_EXPERTS
            score = tl.load(scores_LHE + at, mask=is_owned, other=float("-inf"))
            score = tl.where(stays, float("inf"), score)
            low = tl.min(score, 0)
            place = tl.min(tl.where(score == low, slot, NUM_SLOTS), 0)
            found = tl.where(low < lowest, place, found)
            lowest = tl.minimum(low, lowest)
        owner = tl.load(owner_S + found, mask=found >= 0, other=_FREE)
        newcomer = tl.max(tl.where(order == n, cell, -1), 0)
        tl.debug_barrier()
        tl.store(slot_LE + owner, _ABSENT, mask=owner != _FREE)
        tl.store(owner_S + found, newcomer, mask=found >= 0)
        tl.store(slot_LE + newcomer, found, mask=found >= 0)
        taken = tl.where(order == n, found, taken)
    return taken


def fill(table: DeviceTable, num_pairs: int) -> None:
    """Copy the experts that took a slot in the last resolve(), of so many pairs, from host memory
    into it.
    """
    num_loads = table.slots_SB.shape[1] // ADDRESS_BYTES
    _fill[(FILL_PROGRAMS, min(num_pairs, table.num_experts))](
        table.copies_2E,
        num_loads,
        NUM_EXPERTS=table.num_experts,
        BLOCK=FILL_BYTES // WORD_BYTES,
        NUM_PROGRAMS=FILL_PROGRAMS,
        enable_fp_fusion=True,
    )


@triton.jit
def _fill(
    copies_2E,
    num_loads,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    source = tl.load(copies_2E + tl.program_id(1))
    if source == 0:
        return
    pointer = tl.load(copies_2E + NUM_EXPERTS + tl.program_id(1))
    # The compiler loads 16 bytes at once only if it knows that addresses are multiples of 16.
    num_words = num_loads * (_ADDRESS_BYTES // _WORD_BYTES)
    source_W = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), _ADDRESS_BYTES)
    slot_W = tl.multiple_of(pointer.to(tl.pointer_type(tl.int64)), _ADDRESS_BYTES)
    for first in range(tl.program_id(0) * BLOCK, num_words, NUM_PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        words = tl.load(source_W + at, mask=at < num_words, eviction_policy="evict_first")
        tl.store(slot_W + at, words, mask=at < num_words)
