"""The two kernels that find the experts of an MoE layer and copy those that are not on the device.

    resolve   one program: P pairs are few, and two pairs must not take the same slot. Each missed
              expert looks through all slots once, for the one with the lowest score
    fill      many programs for each pair; those of hits have nothing to copy and end at once

Both run in every MoE layer of a captured step. device_table.py has the rules they share with the
host, kernels/cuda/reference.py the plain code that defines what they do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.cuda.device_table import (
    ABSENT,
    ADDRESS_BYTES,
    FREE,
    NOTHING,
    ON_DISK,
    DeviceTable,
)

_ABSENT = tl.constexpr(ABSENT)
_ON_DISK = tl.constexpr(ON_DISK)
_FREE = tl.constexpr(FREE)
_NOTHING = tl.constexpr(NOTHING)
_ADDRESS_BYTES = tl.constexpr(ADDRESS_BYTES)

# Slots whose scores are in registers at once, eight in each thread. With fewer slots than threads,
# several threads would load one score, and might see different values while the host uploads it.
SLOT_BLOCK = 1024
MAX_PAIRS = 128  # resolve compares every pair with every other in the registers of one program
# Programs, and bytes of a block, for one expert. So many keep the link busy with a single miss (64
# blocks of 8 KiB are 512 KiB under way; 50 GB/s for 2 us need 100 KiB), and end at once for hits.
FILL_PROGRAMS = 64
FILL_BYTES = 8 << 10
WORD_BYTES = 8
_SLOT_BLOCK = tl.constexpr(SLOT_BLOCK)
_WORD_BYTES = tl.constexpr(WORD_BYTES)


def resolve(table: DeviceTable, moe_layer_idx: int, top_k_index_TK: Tensor) -> Tensor:
    """int64 [T, K]: the address of each pair's expert.

    It is 0 for a pair without an expert (id -1), and for all pairs if the step needs replay. A
    missed expert takes one slot, whose bytes are there after fill(). `top_k_index_TK` has at most
    `table.max_pairs` pairs. The result is a view that the next call overwrites.
    """
    num_pairs = top_k_index_TK.numel()
    assert num_pairs <= table.max_pairs <= MAX_PAIRS, (num_pairs, table.max_pairs)
    assert top_k_index_TK.is_contiguous(), top_k_index_TK.stride()
    block = max(16, triton.next_power_of_2(num_pairs))
    num_slots = len(table.slots_SB)
    part = table.part_of(moe_layer_idx)
    _resolve[(1,)](
        top_k_index_TK,
        table.slot_LE,
        table.host_LE,
        table.address_S,
        table.owner_S,
        table.scores_LHE,
        table.replay_flag,
        table.uses_LE,
        table.reports_L2P,
        table.pointers_P,
        table.sources_P,
        moe_layer_idx,
        part,
        table.last_layers[part],
        num_pairs,
        NUM_SLOTS=num_slots,
        NUM_EXPERTS=table.num_experts,
        MAX_PAIRS=table.max_pairs,
        NUM_PARTS=len(table.last_layers),
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=True,  # there is nothing to fuse; Triton 3.9 warns without it
    )
    return table.pointers_P[:num_pairs].view(top_k_index_TK.shape)


@triton.jit(do_not_specialize=["moe_layer_idx", "part", "last_layer", "num_pairs"])
def _resolve(
    index_P,
    slot_LE,
    host_LE,
    address_S,
    owner_S,
    scores_LHE,
    replay_flag,
    uses_LE,
    reports_L2P,
    pointers_P,
    sources_P,
    moe_layer_idx,
    part,
    last_layer,
    num_pairs,
    NUM_SLOTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.arange(0, BLOCK)
    needs_replay = tl.load(replay_flag) != 0
    expert = tl.load(index_P + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    expert = tl.where(needs_replay, -1, expert)
    is_pair = expert >= 0
    cell = moe_layer_idx * NUM_EXPERTS + expert
    slot = tl.load(slot_LE + cell, mask=is_pair, other=0)
    host = tl.load(host_LE + cell, mask=is_pair, other=0)

    is_earlier = pair[None, :] < pair[:, None]
    is_same = (expert[None, :] == expert[:, None]) & is_pair[:, None]
    is_first = is_pair & (tl.sum((is_same & is_earlier).to(tl.int32), 1) == 0)
    is_miss = is_first & (slot < 0)
    wants = is_miss & (host != 0)
    num_earlier = tl.sum((is_earlier & wants[None, :]).to(tl.int32), 1)
    order = tl.where(wants, num_earlier, -1)
    uses = tl.load(uses_LE + cell, mask=is_first, other=0)
    tl.debug_barrier()  # no warp may store what another warp has yet to load
    tl.store(uses_LE + cell, uses + tl.sum(is_same.to(tl.int32), 1), mask=is_first)

    taken = taken_slots(
        order, cell, moe_layer_idx, part, last_layer, slot_LE, owner_S, scores_LHE, uses_LE,
        NUM_SLOTS, NUM_EXPERTS, NUM_PARTS,
    )  # fmt: skip
    taken_by_any = tl.max(tl.where(is_same, taken[None, :], _ABSENT), 1)
    slot_now = tl.where(slot >= 0, slot, taken_by_any)
    address = tl.load(address_S + slot_now, mask=is_pair & (slot_now >= 0), other=0)
    pointer = tl.where(slot_now >= 0, address, host)
    tl.store(pointers_P + pair, tl.where(is_pair, pointer, 0), mask=pair < num_pairs)
    tl.store(sources_P + pair, tl.where(taken >= 0, host, 0), mask=pair < num_pairs)
    is_missing = is_miss & (host == 0)
    tl.store(replay_flag, 1, mask=tl.sum(is_missing.to(tl.int32)) > 0)
    # Written through the caches: the host reads while the step goes on.
    report = reports_L2P + moe_layer_idx * 2 * MAX_PAIRS + pair
    took = tl.where(is_miss, tl.where(host == 0, _ON_DISK, taken), _NOTHING)
    tl.store(report, expert, mask=pair < num_pairs, cache_modifier=".wt")
    tl.store(report + MAX_PAIRS, took, mask=pair < num_pairs, cache_modifier=".wt")


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
    uses_LE,
    NUM_SLOTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """The slot that each pair takes: a free one, or that of the resident with the lowest score
    among those that may be evicted; else -1. Pairs choose in `order`; one of -1 wants no slot.
    """
    taken = tl.full(order.shape, _ABSENT, tl.int32)
    for n in range(tl.max(order, 0) + 1):
        tl.debug_barrier()  # owners and uses are as they were stored
        lowest = tl.full((), float("inf"), tl.float64)
        found = -1
        for first in range(0, NUM_SLOTS, _SLOT_BLOCK):
            slot = first + tl.arange(0, _SLOT_BLOCK)
            owner = tl.load(owner_S + slot, mask=slot < NUM_SLOTS, other=_FREE)
            is_owned = owner != _FREE
            layer = owner // NUM_EXPERTS
            uses = tl.load(uses_LE + owner, mask=is_owned & (layer == moe_layer_idx), other=0)
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


def fill(table: DeviceTable, pointers_TK: Tensor) -> None:
    """Copy the experts that took a slot in the last resolve() from host memory into it.

    `pointers_TK` is what that resolve() returned.
    """
    num_loads = table.slots_SB.shape[1] // ADDRESS_BYTES
    _fill[(FILL_PROGRAMS, pointers_TK.numel())](
        table.pointers_P,
        table.sources_P,
        num_loads,
        BLOCK=FILL_BYTES // WORD_BYTES,
        NUM_PROGRAMS=FILL_PROGRAMS,
        enable_fp_fusion=True,
    )


@triton.jit
def _fill(pointers_P, sources_P, num_loads, BLOCK: tl.constexpr, NUM_PROGRAMS: tl.constexpr):
    pair = tl.program_id(1)
    source = tl.load(sources_P + pair)
    if source == 0:
        return
    pointer = tl.load(pointers_P + pair)
    # The compiler loads 16 bytes at once only if it knows that addresses are multiples of 16.
    num_words = num_loads * (_ADDRESS_BYTES // _WORD_BYTES)
    source_W = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), _ADDRESS_BYTES)
    slot_W = tl.multiple_of(pointer.to(tl.pointer_type(tl.int64)), _ADDRESS_BYTES)
    for first in range(tl.program_id(0) * BLOCK, num_words, NUM_PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        words = tl.load(source_W + at, mask=at < num_words, eviction_policy="evict_first")
        tl.store(slot_W + at, words, mask=at < num_words)
