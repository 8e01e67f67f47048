"""A step that machine code goes through without Python, beside the layers (decoder_call.py) and the
products of experts (work.py). All experts of the layers are in memory.

    choose         how a router chooses: the experts with the largest logits. The weight of each is
                   the exponential of its logit over the sum for all experts, or for the chosen ones
    begin_routed   the chosen pairs sorted by expert, and the rows that experts get
    end_routed     the weighted sum of each sequence's rows, a shared expert's row, and the residual
    in_turn        such calls one after another. All threads of a team enter a call that shares its
                   work out, as team.py has it; one thread enters any other, and the rest wait

Legend: B sequences of one token each, K experts of a token, P = B * K pairs, D model width, E
experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import njit, types

from moe_infinity.kernels.cpu.arrangement import Arrangement, arrange
from moe_infinity.kernels.cpu.compiler import c_function, reader_of
from moe_infinity.kernels.cpu.team import LINE, call_at, fetch_add, wait_for
from moe_infinity.kernels.cpu.vectors import float_at, int_at, put_float, put_int
from moe_infinity.kernels.cpu.work import (
    JOB_AT,
    OF_EXPERTS,
    KernelJob,
    add_weighted,
    put_number,
    value_at,
)

OF_ALL, OF_CHOSEN = range(2)  # the experts whose exponentials a weight is divided by
COUNTERS = 2 * LINE  # int64s of one call: how many threads have come, and whether it is done
NUM_EXPERTS, X, X_IS_SHARED, ROWS = (
    JOB_AT + KernelJob._fields.index(name) for name in ("num_experts", "x", "x_is_shared", "out")
)


class RoutedCall(NamedTuple):
    """One call for the experts of a layer: integers, for numba. Without a unit, an address."""

    # of the layer
    job: int  # what work.experts is called with
    tables_of_all: int  # int64 [E]: the table of each expert, as in KernelJob
    num_experts: int  # E
    has_shared: int  # expert
    top_k: int  # K
    width: int  # D
    dtype: int  # of normed, residual and result: the index of its name in BIASES
    weights_dtype: int
    arrangement: int  # Arrangement of what experts get
    # memory for what is between
    counts: int  # int64 [E]
    row_of: int  # int64 [P]: the row of each pair
    starts: int  # int64 [P], as in KernelJob
    stops: int
    tables: int
    state: int  # of this layer alone
    weights: int  # float32 [P]
    inputs: int  # float32 [B, D]
    arranged: int  # [B, ...], arranged
    gathered: int  # [P, ...], arranged: sorted by expert
    # of the call
    num_seqs: int  # B
    normed: int  # [B, D]
    residual: int  # [B, D]
    shared: int  # float32 [B, D], of a shared expert
    top_k_index: int  # int64 [B, K]
    top_k_weights: int  # [B, K]
    result: int  # [B, D]


_call_at = reader_of(RoutedCall)
_arrangement_at = reader_of(Arrangement)


@njit(nogil=True)
def _sort(call):  # type: ignore[no-untyped-def]
    """Give each pair its row, by expert and then by pair. Returns the number of experts chosen."""
    num_pairs = call.num_seqs * call.top_k
    for expert in range(call.num_experts):
        put_int(call.counts, expert, 0)
    for pair in range(num_pairs):
        expert = int_at(call.top_k_index, pair)
        put_int(call.counts, expert, int_at(call.counts, expert) + 1)
    found = 0
    start = 0
    for expert in range(call.num_experts):
        count = int_at(call.counts, expert)
        put_int(call.counts, expert, start)  # the next row of this expert
        if count:
            put_int(call.starts, found, start)
            put_int(call.stops, found, start + count)
            put_int(call.tables, found, int_at(call.tables_of_all, expert))
            found += 1
            start += count
    for pair in range(num_pairs):
        expert = int_at(call.top_k_index, pair)
        row = int_at(call.counts, expert)
        put_int(call.row_of, pair, row)
        put_int(call.counts, expert, row + 1)
    return found


@c_function(types.void(types.int64), "begin_routed")
def begin_routed(address: int) -> None:
    """Prepare the job that work.experts does next."""
    call = _call_at(address)
    num_pairs = call.num_seqs * call.top_k
    num_chosen = _sort(call)
    for i in range(OF_EXPERTS + LINE * num_chosen):
        put_int(call.state, i, 0)
    for i in range(call.num_seqs * call.width):
        put_float(call.inputs, i, value_at(call.normed, i, call.dtype))
    arrangement = _arrangement_at(call.arrangement)
    arrange(call.inputs, 4 * call.width, call.arranged, call.num_seqs, arrangement)
    put_int(call.job, NUM_EXPERTS, num_chosen)
    is_shared = call.num_seqs == 1 and num_chosen == num_pairs
    put_int(call.job, X_IS_SHARED, is_shared)
    if is_shared:
        put_int(call.job, X, call.arranged)
        return
    put_int(call.job, X, call.gathered)
    words = arrangement.row_bytes // 8
    for pair in range(num_pairs):
        source = call.arranged + 8 * words * (pair // call.top_k)
        to = call.gathered + 8 * words * int_at(call.row_of, pair)
        for i in range(words):
            put_int(to, i, int_at(source, i))


@njit(nogil=True)
def _rounded(call, i, value):  # type: ignore[no-untyped-def]
    put_number(call.result, i, value, call.dtype)
    return value_at(call.result, i, call.dtype)


@c_function(types.void(types.int64), "end_routed")
def end_routed(address: int) -> None:
    """Compute the output of the layer: the sums of experts' outputs, what a shared expert adds, and
    the residual. Each sum is rounded.
    """
    call = _call_at(address)
    for pair in range(call.num_seqs * call.top_k):
        put_float(call.weights, pair, value_at(call.top_k_weights, pair, call.weights_dtype))
    count = call.num_seqs * call.width
    for i in range(count):
        put_float(call.inputs, i, types.float32(0))
    add_weighted(
        int_at(call.job, ROWS),
        call.width,
        call.row_of,
        call.weights,
        call.top_k,
        call.inputs,
        call.num_seqs,
    )
    for i in range(count):
        total = _rounded(call, i, float_at(call.inputs, i))
        if call.has_shared:
            total = _rounded(call, i, total + _rounded(call, i, float_at(call.shared, i)))
        put_number(call.result, i, total + value_at(call.residual, i, call.dtype), call.dtype)


@njit(nogil=True)
def _next_largest(logits, num_experts, last, is_first):  # type: ignore[no-untyped-def]
    """The expert with the largest logit after expert `last`; of equal ones the first. Negative if
    there is none, as with logits that are no numbers.
    """
    largest = -1
    for expert in range(num_experts):
        logit = float_at(logits, expert)
        is_left = is_first
        if not is_first:
            limit = float_at(logits, last)
            is_left = logit < limit or (logit == limit and expert > last)
        if is_left and (largest < 0 or logit > float_at(logits, largest)):
            largest = expert
    return largest


@njit(nogil=True)
def choose(logits, num_experts, top_k, softmax_over, top_k_index, top_k_weights, first, dtype):  # type: ignore[no-untyped-def]
    """Choose the experts of one token from its float32 logits [E]. Writes the ids, int64 [K], to
    `top_k_index`, and from number `first` on the weights to `top_k_weights`, which has this dtype.
    """
    last = 0
    for k in range(top_k):
        expert = _next_largest(logits, num_experts, last, k == 0)
        last = k if expert < 0 else expert
        put_int(top_k_index, k, last)
    largest = float_at(logits, int_at(top_k_index, 0))
    total = types.float32(0)
    if softmax_over == OF_ALL:
        for expert in range(num_experts):
            total += math.exp(float_at(logits, expert) - largest)
    else:
        for k in range(top_k):
            total += math.exp(float_at(logits, int_at(top_k_index, k)) - largest)
    for k in range(top_k):
        weight = math.exp(float_at(logits, int_at(top_k_index, k)) - largest) / total
        put_number(top_k_weights, first + k, weight, dtype)


class Turn(NamedTuple):
    """One call in a row of calls: integers, for numba."""

    function: int  # address
    argument: int  # address
    is_shared: int  # by all threads
    counters: int  # address; 0 when the calls begin


class Turns(NamedTuple):
    """All calls: integers, for numba."""

    first: int  # address of the first Turn
    num_turns: int
    yield_: int


TURN_BYTES = 8 * len(Turn._fields)
_turn_at = reader_of(Turn)
_turns_at = reader_of(Turns)


@c_function(types.void(types.int64), "in_turn")
def in_turn(address: int) -> None:
    """Make the calls of the Turns at `address`."""
    turns = _turns_at(address)
    for i in range(turns.num_turns):
        turn = _turn_at(turns.first + i * TURN_BYTES)
        if turn.is_shared:
            call_at(turn.function, turn.argument)
        else:
            if fetch_add(turn.counters, 1) == 0:
                call_at(turn.function, turn.argument)
                fetch_add(turn.counters + 8 * LINE, 1)
            wait_for(turn.counters + 8 * LINE, 1, turns.yield_)
