"""The machine code of prompt_attention.py: the attention of rows, block by block of the keys that
they see. Rows of a group are its queries and heads, one head beside another.

Legend: B sequences, H heads, G heads of keys and values, P heads of a group, T queries, N tokens of
the cache, d width of a head, dv of a value.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.compiler import c_function, has_avx512, reader_of
from moe_infinity.kernels.cpu.team import LINE, fetch_add, wait_for
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    all_lanes,
    dot,
    exponential,
    float_at,
    fma,
    int_at,
    larger,
    largest_of_lanes,
    load,
    number_at,
    put_float,
    repeated,
    store,
    sum_of_lanes,
    to_bfloat,
    vector_of,
)

PACKED = 64  # keys that lie beside each other, number by number
KEYS = 256  # of a block: the bits of a sum depend on where it ends
TILE = 6  # rows that registers sum up at once
ROWS = 8 * TILE  # that a thread takes at once
LOWEST = -1e30  # no score is as low
# Where things are in `PromptJob.state`.
NEXT = 0
DONE = LINE
STATE = 2 * LINE  # int64s
# And in a thread's memory, which begins with the largest score and the sum of each row.
SCORES_AT = 2 * 4 * ROWS
WEIGHTS_AT = SCORES_AT + 4 * TILE * KEYS
MEMORY = WEIGHTS_AT + 4 * TILE * KEYS


class PromptJob(NamedTuple):
    """The work of one call: integers, for numba. Without a unit, an address."""

    state: int  # next item; items done
    num_items: int
    blocks: int  # items of one group
    rows: int  # of a group: of its queries and heads, one head beside another
    heads: int  # P
    num_queries: int
    query: int  # numbers [G, rows, d]
    steps: int  # words of 4 bytes of a query
    keys: int  # words [G, N / PACKED, steps, PACKED]
    keys_bytes: int  # of a group
    values: int  # words [G, N or N / 2, dv]
    values_bytes: int  # of a group
    num_vectors: int  # of a value
    bounds: int  # int64 [T, 2]: the first key that a query sees, and one more than the last
    sinks: int  # float32 [H]; 0: there are none
    scale: int  # float32
    out: int  # float32 [G, rows, dv], zeros
    yield_: int  # of the system; see team.py


_job_at = reader_of(PromptJob)


def tile_vectors() -> tuple[int, int]:
    """Vectors whose sums fit in registers for TILE rows, and the lanes of each."""
    return (4, LANES) if has_avx512() else (2, LANES // 2)


@cache
def rows_function(is_half: bool) -> Any:
    """A C function that takes items until none is left, for pairs of bfloat16 or for float32. It is
    called with the address of a PromptJob.
    """
    half = 1 if is_half else None  # what is compiled depends on its type

    @c_function(types.void(types.int64), f"attend_prompt_{int(is_half)}")
    def function(call: int) -> None:
        job = _job_at(call)
        memory = _stack()
        item = fetch_add(job.state + 8 * NEXT, 1)
        while item < job.num_items:
            _attend(half, job, item, memory)
            fetch_add(job.state + 8 * DONE, 1)
            item = fetch_add(job.state + 8 * NEXT, 1)
        wait_for(job.state + 8 * DONE, job.num_items, job.yield_)

    return function


@njit(nogil=True)
def _attend(half, job, item, memory):  # type: ignore[no-untyped-def]
    """Compute one item. `half` is None for float32."""
    group = item // job.blocks
    first = item % job.blocks * ROWS
    low, high = _seen(job, first)
    for r in range(ROWS):
        put_float(memory, r, np.float32(LOWEST))
        put_float(memory, ROWS + r, np.float32(0))
    for base in range(low // KEYS * KEYS, high, KEYS):
        start = max(base, low // PACKED * PACKED)
        stop = min(base + KEYS, (high + PACKED - 1) // PACKED * PACKED)
        for r in range(0, ROWS, TILE):
            _add_block(half, job, group, first + r, start, stop, memory, memory + 4 * r)
    _finish(job, group, first, memory)


@njit(nogil=True)
def _seen(job, first):  # type: ignore[no-untyped-def]
    """The first key that one of ROWS rows sees, and one more than the last; both 0 if none does."""
    begin = job.bounds + 16 * (first // job.heads)
    end = job.bounds + 16 * min((first + ROWS - 1) // job.heads + 1, job.num_queries)
    low = 1 << 60
    high = 0
    for at in range(begin, end, 16):
        if int_at(at, 0) < int_at(at, 1):
            low = min(low, int_at(at, 0))
            high = max(high, int_at(at, 1))
    return min(low, high), high


@njit(nogil=True)
def _add_block(half, job, group, row, start, stop, memory, state):  # type: ignore[no-untyped-def]
    """Add what TILE rows from `row` on get from keys `start` to `stop`."""
    word_keys = 1 if half is None else 2
    scores = memory + SCORES_AT
    weights = memory + WEIGHTS_AT
    scale = float_at(job.scale, 0)
    row_bytes = 4 * LANES * job.num_vectors
    out = job.out + (group * job.rows + row) * row_bytes
    x = job.query + (group * job.rows + row) * 4 * job.steps
    keys = job.keys + group * job.keys_bytes
    for k in range(start, stop, PACKED):
        tile = keys + k // PACKED * (4 * PACKED * job.steps)
        _score(half, x, job.steps, tile, scores + 4 * (k - start))
    for r in range(TILE):
        t = (row + r) // job.heads
        low = 0
        high = 0  # of a row that is no query
        if t < job.num_queries:
            low = int_at(job.bounds, 2 * t) - start
            high = int_at(job.bounds, 2 * t + 1) - start
        _weigh_row(
            half, scores + 4 * KEYS * r, stop - start, low, high, scale, state + 4 * r,
            weights + 4 * KEYS * r, out + r * row_bytes, job.num_vectors,
        )  # fmt: skip
    values = job.values + group * job.values_bytes + start // word_keys * row_bytes
    _add_values(half, weights, (stop - start) // word_keys, values, job.num_vectors, out)


@njit(nogil=True)
def _finish(job, group, first, memory):  # type: ignore[no-untyped-def]
    """Divide what rows have summed up by the sum of their weights, with that of a sink."""
    for r in range(ROWS):
        sink = np.float32(-np.inf)
        if job.sinks:
            sink = float_at(job.sinks, group * job.heads + (first + r) % job.heads)
        peak = float_at(memory, r)
        top = max(peak, sink)
        share = math.exp(peak - top)
        total = float_at(memory, ROWS + r) * share + math.exp(sink - top)
        share = share / total if total != 0 else np.float32(0)
        at = job.out + (group * job.rows + first + r) * (4 * LANES * job.num_vectors)
        for k in range(LANES * job.num_vectors):
            put_float(at, k, float_at(at, k) * share)


@intrinsic  # type: ignore[untyped-decorator]
def _stack(_: Any) -> Any:
    """The address of a thread's memory, which begins with a cache line."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(I8, MEMORY + 64))
        return b.and_(b.add(b.ptrtoint(memory, I64), I64(63)), I64(-64))

    return types.int64(), emit


def _is_half(half: Any) -> bool:
    """True if an argument of this type stands for pairs of bfloat16."""
    return not isinstance(half, types.NoneType)


@intrinsic  # type: ignore[untyped-decorator]
def _score(_: Any, half: Any, x: Any, steps: Any, keys: Any, scores: Any) -> Any:
    """Store the products of TILE rows with PACKED keys."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _, x, steps, keys, scores = args
        row_bytes = b.mul(steps, I64(4))
        count, lanes = tile_vectors()
        with cgutils.for_range_slice(
            b, I64(0), I64(4 * PACKED), I64(4 * count * lanes), intp=I64
        ) as (offset, _):
            sums = _emit_tile(
                b, _is_half(half), x, row_bytes, steps, b.add(keys, offset), I64(4 * PACKED),
                _zeros(b, count, lanes),
            )  # fmt: skip
            for r, of_row in enumerate(sums):
                for v, total in enumerate(of_row):
                    at = b.add(b.add(scores, offset), I64(4 * (KEYS * r + lanes * v)))
                    store(b, b.load(total), at)
        return context.get_dummy_value()

    return types.void(half, *[types.int64] * 4), emit


@intrinsic  # type: ignore[untyped-decorator]
def _add_values(
    _: Any, half: Any, weights: Any, steps: Any, values: Any, num_vectors: Any, out: Any
) -> Any:
    """Add the values of a block, weighted, to TILE rows of `out`."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _, weights, steps, values, num_vectors, out = args
        row_bytes = b.mul(num_vectors, I64(4 * LANES))
        most, lanes = tile_vectors()
        count = b.mul(num_vectors, I64(LANES // lanes))
        rest = b.urem(count, I64(most))
        whole = b.sub(count, rest)

        def emit_tile(vectors: int, first: Any) -> None:
            offset = b.mul(first, I64(4 * lanes))
            places = [
                [b.add(b.add(b.add(out, b.mul(row_bytes, I64(r))), offset), I64(4 * lanes * v))
                 for v in range(vectors)]
                for r in range(TILE)
            ]  # fmt: skip
            sums = _emit_tile(
                b, _is_half(half), weights, I64(4 * KEYS), steps, b.add(values, offset),
                row_bytes, _zeros(b, vectors, lanes),
            )  # fmt: skip
            for of_row, totals in zip(places, sums, strict=True):
                for at, total in zip(of_row, totals, strict=True):
                    store(b, b.fadd(b.load(total), load(b, at, 0, F32, lanes)), at)

        with cgutils.for_range_slice(b, I64(0), whole, I64(most), intp=I64) as (first, _):
            emit_tile(most, first)
        for vectors in range(1, most):
            with b.if_then(b.icmp_signed("==", rest, I64(vectors))):
                emit_tile(vectors, whole)
        return context.get_dummy_value()

    return types.void(half, *[types.int64] * 5), emit


def _zeros(b: Any, count: int, lanes: int) -> list[list[Any]]:
    kind = vector_of(F32, lanes)
    sums = [[cgutils.alloca_once(b, kind) for _ in range(count)] for _ in range(TILE)]
    for of_row in sums:
        for total in of_row:
            b.store(kind(None), total)
    return sums


def _emit_tile(
    b: Any, is_half: bool, x: Any, row_bytes: Any, steps: Any, y: Any, step_bytes: Any,
    sums: list[list[Any]],
) -> list[list[Any]]:  # fmt: skip
    """Emit, for each word of a step, sums[r][v] += x[r, step] times y[step, v], and return the
    sums.
    """
    lanes = sums[0][0].type.pointee.count
    kind, add = (I32, dot) if is_half else (F32, fma)
    rows = [b.add(x, b.mul(row_bytes, I64(r))) for r in range(TILE)]
    with cgutils.for_range(b, steps, intp=I64) as each:
        at = b.add(y, b.mul(each.index, step_bytes))
        vectors = [load(b, at, 4 * lanes * v, kind, lanes) for v in range(len(sums[0]))]
        offset = b.mul(each.index, I64(4))
        for row, totals in zip(rows, sums, strict=True):
            word = repeated(b, number_at(b, b.add(row, offset), 0, kind), lanes)
            for vector, total in zip(vectors, totals, strict=True):
                b.store(add(b, word, vector, b.load(total)), total)
    return sums


@intrinsic  # type: ignore[untyped-decorator]
def _weigh_row(
    _: Any, half: Any, scores: Any, count: Any, low: Any, high: Any, scale: Any, state: Any,
    weights: Any, out: Any, num_vectors: Any,
) -> Any:  # fmt: skip
    """Make weights of the scores of a row, of which it sees those from `low` to `high`, relative to
    the largest score so far. What the row has summed up is scaled by how much that has grown.
    """

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _, scores, count, low, high, scale, state, weights, out, num_vectors = args
        own = repeated(b, number_at(b, state, 0, F32))
        scales = repeated(b, scale)
        lanes = ir.Constant(vector_of(I64), [*range(LANES)])
        largest = cgutils.alloca_once_value(b, own)
        steps = b.udiv(count, I64(LANES))
        with cgutils.for_range(b, steps, intp=I64) as each:
            at = b.add(scores, b.mul(each.index, I64(4 * LANES)))
            places = b.add(lanes, repeated(b, b.mul(each.index, I64(LANES))))
            is_seen = b.and_(
                b.icmp_signed(">=", places, repeated(b, low)),
                b.icmp_signed("<", places, repeated(b, high)),
            )
            score = b.fmul(load(b, at, 0, F32), scales)
            score = b.select(is_seen, score, all_lanes(F32, -math.inf))
            store(b, score, at)
            b.store(larger(b, score, b.load(largest)), largest)
        peak = repeated(b, largest_of_lanes(b, b.load(largest)))
        share = exponential(b, b.fsub(own, peak))
        total = cgutils.alloca_once_value(b, FLOATS(None))
        with cgutils.for_range(b, steps, intp=I64) as each:
            offset = b.mul(each.index, I64(4 * LANES))
            below = b.fsub(load(b, b.add(scores, offset), 0, F32), peak)
            weight = exponential(b, below)
            weight = b.select(b.fcmp_unordered("uno", below, below), below, weight)  # NaN stays
            b.store(b.fadd(weight, b.load(total)), total)
            if _is_half(half):
                weight = to_bfloat(b, weight)
                offset = b.udiv(offset, I64(2))
            store(b, weight, b.add(weights, offset))
        pointer = b.inttoptr(state, F32.as_pointer())
        first = b.extract_element(share, I32(0))
        before = number_at(b, state, 4 * ROWS, F32)
        now = b.fadd(b.fmul(before, first), sum_of_lanes(b, b.load(total)))
        b.store(now, b.inttoptr(b.add(state, I64(4 * ROWS)), F32.as_pointer()))
        b.store(b.extract_element(peak, I32(0)), pointer)
        is_scaled = b.fcmp_ordered("!=", first, F32(1))
        with b.if_then(is_scaled), cgutils.for_range(b, num_vectors, intp=I64) as each:
            at = b.add(out, b.mul(each.index, I64(4 * LANES)))
            store(b, b.fmul(load(b, at, 0, F32), share), at)
        return context.get_dummy_value()

    ints = [types.int64] * 4
    return types.void(half, *ints, types.float32, *ints), emit
