"""The experts of one layer in a step that machine code goes through without Python: what comes
before and after experts in work.py. All experts of the layer are in memory.

    begin   the chosen pairs sorted by expert, and the rows that experts get
    end     the weighted sum of each sequence's rows, and the residual

Legend: B sequences of one token each, K experts of a token, P = B * K pairs, D model width, E
experts.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import njit, types

from moe_infinity.kernels.cpu.compiler import c_function, reader_of
from moe_infinity.kernels.cpu.steps import Arrangement, arrange
from moe_infinity.kernels.cpu.team import LINE
from moe_infinity.kernels.cpu.vectors import float_at, int_at, put_float, put_int
from moe_infinity.kernels.cpu.work import (
    OF_EXPERTS,
    KernelJob,
    add_weighted,
    put_number,
    value_at,
)

JOB_AT = 2  # int64s in front of a KernelJob, which work.experts reads
NUM_EXPERTS, X, X_IS_SHARED, ROWS = (
    JOB_AT + KernelJob._fields.index(name) for name in ("num_experts", "x", "x_is_shared", "out")
)


class RoutedCall(NamedTuple):
    """One call: integers, for numba. Without a unit, an address."""

    # of the layer
    job: int  # what work.experts is called with
    addresses: int  # int64 [E]: where the slot of each expert begins
    num_experts: int  # E
    top_k: int  # K
    width: int  # D
    dtype: int  # of normed, residual and result: the place of its name in BIASES
    share_dtype: int
    places: int  # Arrangement of what experts get
    # memory for what is between
    counts: int  # int64 [E]
    row_of: int  # int64 [P]: the row of each pair
    starts: int  # int64 [P], as in KernelJob
    stops: int
    slots: int
    state: int  # of this layer alone
    shares: int  # float32 [P]
    inputs: int  # float32 [B, D]
    arranged: int  # [B, ...], arranged
    gathered: int  # [P, ...], arranged: sorted by expert
    # of the call
    num_seqs: int  # B
    normed: int  # [B, D]
    residual: int  # [B, D]
    chosen: int  # int64 [B, K]
    chosen_shares: int  # [B, K]
    result: int  # [B, D]


_call_at = reader_of(RoutedCall)
_places_at = reader_of(Arrangement)


@njit(nogil=True)
def _sort(call):  # type: ignore[no-untyped-def]
    """Give each pair its row, by expert and then by pair. Returns how many experts were chosen."""
    num_pairs = call.num_seqs * call.top_k
    for expert in range(call.num_experts):
        put_int(call.counts, expert, 0)
    for pair in range(num_pairs):
        expert = int_at(call.chosen, pair)
        put_int(call.counts, expert, int_at(call.counts, expert) + 1)
    found = 0
    start = 0
    for expert in range(call.num_experts):
        count = int_at(call.counts, expert)
        put_int(call.counts, expert, start)  # the next row of this expert
        if count:
            put_int(call.starts, found, start)
            put_int(call.stops, found, start + count)
            put_int(call.slots, found, int_at(call.addresses, expert))
            found += 1
            start += count
    for pair in range(num_pairs):
        expert = int_at(call.chosen, pair)
        row = int_at(call.counts, expert)
        put_int(call.row_of, pair, row)
        put_int(call.counts, expert, row + 1)
    return found


@c_function(types.void(types.int64), "begin_routed")
def begin_routed(address: int) -> None:
    """Make ready what work.experts does next."""
    call = _call_at(address)
    num_pairs = call.num_seqs * call.top_k
    num_chosen = _sort(call)
    for i in range(OF_EXPERTS + LINE * num_chosen):
        put_int(call.state, i, 0)
    for i in range(call.num_seqs * call.width):
        put_float(call.inputs, i, value_at(call.normed, i, call.dtype))
    places = _places_at(call.places)
    arrange(call.inputs, 4 * call.width, call.arranged, call.num_seqs, places)
    put_int(call.job, NUM_EXPERTS, num_chosen)
    is_shared = call.num_seqs == 1 and num_chosen == num_pairs
    put_int(call.job, X_IS_SHARED, is_shared)
    if is_shared:
        put_int(call.job, X, call.arranged)
        return
    put_int(call.job, X, call.gathered)
    words = places.row_bytes // 8
    for pair in range(num_pairs):
        source = call.arranged + 8 * words * (pair // call.top_k)
        to = call.gathered + 8 * words * int_at(call.row_of, pair)
        for i in range(words):
            put_int(to, i, int_at(source, i))


@c_function(types.void(types.int64), "end_routed")
def end_routed(address: int) -> None:
    """What the layer gives: experts' outputs rounded, then added to the residual."""
    call = _call_at(address)
    for pair in range(call.num_seqs * call.top_k):
        put_float(call.shares, pair, value_at(call.chosen_shares, pair, call.share_dtype))
    count = call.num_seqs * call.width
    for i in range(count):
        put_float(call.inputs, i, types.float32(0))
    add_weighted(
        int_at(call.job, ROWS),
        call.width,
        call.row_of,
        call.shares,
        call.top_k,
        call.inputs,
        call.num_seqs,
    )
    for i in range(count):
        put_number(call.result, i, float_at(call.inputs, i), call.dtype)
        total = value_at(call.result, i, call.dtype) + value_at(call.residual, i, call.dtype)
        put_number(call.result, i, total, call.dtype)
