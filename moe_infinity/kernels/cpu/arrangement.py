"""How a row of x is arranged in the order in which a weight's values come out of decoding; x is 0
where the last step of a row overlaps the one before. steps.py says what a step is, digits.py how x
is multiplied with bytes.

Legend: T tokens, C columns (inputs) of a weight.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu.compiler import machine_code, named, reader_of
from moe_infinity.kernels.cpu.digits import (
    LEAST_EXPONENT,
    NUM_DIGITS,
    largest_exponent,
    memory_of_step,
    put_digits,
    sum_of_numbers,
    unit_of,
)
from moe_infinity.kernels.cpu.steps import LOADERS, NIBBLE_UNITS, InnerLoop
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    float_at,
    int_at,
    load,
    put_float,
    repeated,
    store,
    to_bfloat,
)
from moe_infinity.kernels.unpack import ZERO_OF_SYMMETRIC
from moe_infinity.layout import NIBBLES


class Arrangement(NamedTuple):
    """How arrange() arranges a row of x: integers, for numba. Tables are int64 and float32
    [vectors, LANES], with one row more if there are sums.
    """

    num_columns: int
    num_steps: int
    num_vectors: int  # of numbers at a step
    has_sum: int  # 1: one more vector, with sums of columns
    is_dense: int  # columns stay in their order
    order: int  # address of a table: column of a step; in the last row the first that is summed
    factors: int  # address of a table: what a column, or each that is summed, is multiplied by
    num_summed: int  # columns
    sum_step: int  # from one column that is summed to the next
    row_bytes: int  # of a whole row, with what lies behind
    is_half: int = 0  # 1: bfloat16, else float32
    digit_bits: int = 0  # of a digit of x; 0: numbers
    places: int = 0  # address: where in a step the digits of each four columns are
    behind: int = 0  # address of another Arrangement of the same x, for weights of another kind


@cache
def arrangement_for(loop: InnerLoop, num_columns: int) -> Arrangement:
    tables = tables_of(loop)
    num_steps = -(-num_columns // loop.num_columns)
    return Arrangement(
        num_columns=num_columns,
        num_steps=num_steps,
        num_vectors=loop.num_vectors + loop.loader.subtracts_zero,
        has_sum=int(loop.loader.subtracts_zero),
        is_dense=int(tables.is_dense),
        order=tables.order.ctypes.data,
        factors=tables.factors.ctypes.data,
        num_summed=tables.num_summed,
        sum_step=tables.sum_step,
        row_bytes=num_steps * loop.num_x * LANES * 4,
        digit_bits=loop.digit_bits,
        places=_places(loop).ctypes.data if loop.digit_bits else 0,
    )


@cache
def _places(loop: InnerLoop) -> NDArray[np.int64]:
    """[columns / 4]: where the first digits of four neighbouring columns are, in bytes from the
    start of a step. They are the lanes of four vectors, one behind the other.
    """
    firsts = tables_of(loop).order[: loop.num_vectors : 4]
    vectors, lanes = np.divmod(np.argsort(firsts.ravel()), LANES)
    return np.ascontiguousarray(4 * (NUM_DIGITS * LANES * vectors + lanes))


@cache
def panel_arrangement(loop: InnerLoop, num_columns: int, *, is_half: bool) -> Arrangement:
    """How x is arranged for values that are decoded to what they are: only their order counts."""
    tables = tables_of(loop)
    num_steps = -(-num_columns // loop.num_columns)
    ones = _ones(loop.num_vectors)
    return Arrangement(
        num_columns=num_columns,
        num_steps=num_steps,
        num_vectors=loop.num_vectors,
        has_sum=0,
        is_dense=int(tables.is_dense),
        order=tables.order.ctypes.data,
        factors=ones.ctypes.data,
        num_summed=0,
        sum_step=0,
        row_bytes=(2 if is_half else 4) * num_steps * loop.num_columns,
        is_half=int(is_half),
    )


@cache
def _ones(num_vectors: int) -> NDArray[np.float32]:
    """Memory that stays."""
    return np.ones((num_vectors, LANES), np.float32)


def one_behind_another(
    arrangements: Sequence[Arrangement],
) -> tuple[Arrangement, list[array[int]]]:
    """Chain arrangements of the same x. Returns the first, which knows the others, and memory that
    has to stay while it is used.
    """
    row_bytes = sum(arrangement.row_bytes for arrangement in arrangements)
    kept: list[array[int]] = []
    behind = 0
    for arrangement in reversed(arrangements):
        chained = arrangement._replace(row_bytes=row_bytes, behind=behind)
        kept.append(array("q", chained))
        behind = kept[-1].buffer_info()[0]
    return chained, kept


class Tables(NamedTuple):
    """The tables of an Arrangement."""

    order: NDArray[np.int64]
    factors: NDArray[np.float32]
    is_dense: bool
    num_summed: int
    sum_step: int


def tables_of(loop: InnerLoop) -> Tables:
    """The tables of the arrangement of x for a loop."""
    return _tables(loop.kind, loop.num_vectors, loop.has_zeros)


@cache
def _tables(kind: str, num_vectors: int, has_zeros: bool) -> Tables:
    blocks = LOADERS[kind].blocks
    if blocks is not None:
        order = blocks.columns(num_vectors)
        factors = np.repeat(blocks.units(num_vectors), LANES).reshape(order.shape)
        first, times = blocks.sums()
        num_summed = blocks.sum_width
        sum_step = 1
    else:
        per_lane = LOADERS[kind].columns_per_lane
        count = np.arange(num_vectors * LANES).reshape(-1, LANES, per_lane)
        order = count.transpose(0, 2, 1).reshape(num_vectors, LANES)
        factors = _factors(kind, num_vectors).reshape(order.shape)
        first = order[0]
        times = np.full(LANES, -1 if has_zeros else -ZERO_OF_SYMMETRIC, np.float32)
        num_summed = num_vectors
        sum_step = LANES if per_lane == 1 else 1
    is_dense = bool((order.ravel() == np.arange(order.size)).all())
    order = np.ascontiguousarray(np.vstack([order, first]))
    factors = np.ascontiguousarray(np.vstack([factors, times]))
    return Tables(order, factors, is_dense, num_summed, sum_step)


def _factors(kind: str, num_vectors: int) -> NDArray[np.float32]:
    if kind == "int4":
        return np.repeat(NIBBLE_UNITS, LANES)
    if kind.startswith("gptq"):
        return np.tile(NIBBLE_UNITS, num_vectors * LANES // NIBBLES)
    return np.full(num_vectors * LANES, LOADERS[kind].left_out, np.float32)


def arranged(x_TC: NDArray[np.float32], loop: InnerLoop) -> NDArray[np.float32]:
    """x as [T, steps, vectors, LANES], in the order in which weights come out of decoding; 0 where
    the last step overlaps the one before. Vectors may be digits (digits.py), of 64 bytes each.
    """
    arrangement = arrangement_for(loop, x_TC.shape[1])
    # numpy aligns to 16 bytes: then every vector would cross a cache line
    shape = len(x_TC), arrangement.num_steps, loop.num_x, LANES
    out: NDArray[np.float32] = host_float32(*shape).numpy()
    arrange(x_TC.ctypes.data, x_TC.strides[0], out.ctypes.data, len(x_TC), arrangement)
    return out


@intrinsic  # type: ignore[untyped-decorator]
def _arrange_lanes(
    _: Any, x: Any, start: Any, order: Any, is_dense: Any, counted: Any, factors: Any, out: Any,
    is_half: Any,
) -> Any:  # fmt: skip
    """Store 16 columns times 16 factors."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        *columns, factors, out, is_half = args
        values = b.fmul(_columns(b, *columns), load(b, factors, 0, F32))
        with b.if_else(b.icmp_signed("!=", is_half, I64(0))) as (half, whole):
            with half:
                store(b, to_bfloat(b, values), out)
            with whole:
                store(b, values, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


@intrinsic  # type: ignore[untyped-decorator]
def _add_lanes(
    _: Any, x: Any, start: Any, order: Any, is_dense: Any, counted: Any, factors: Any, total: Any
) -> Any:
    """Add 16 columns times 16 factors to 16 sums."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        *columns, factors, total = args
        product = b.fmul(load(b, factors, 0, F32), _columns(b, *columns))
        store(b, b.fadd(load(b, total, 0, F32), product), total)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


def _columns(b: Any, x: Any, start: Any, order: Any, is_dense: Any, counted: Any) -> Any:
    """Load the columns of a row that `order` names, from column `start`; 0 in place of those before
    `counted`.
    """
    found = cgutils.alloca_once(b, FLOATS)
    at = b.add(x, b.mul(start, I64(4)))
    with b.if_else(b.icmp_signed("!=", is_dense, I64(0))) as (dense, sparse):
        with dense:
            first = b.load(b.inttoptr(order, I64.as_pointer()))
            b.store(load(b, b.add(at, b.mul(first, I64(4))), 0, F32), found)
        with sparse:
            lanes = FLOATS(None)
            for lane in range(LANES):
                column = b.load(b.inttoptr(b.add(order, I64(8 * lane)), I64.as_pointer()))
                number = b.load(b.inttoptr(b.add(at, b.mul(column, I64(4))), F32.as_pointer()))
                lanes = b.insert_element(lanes, number, I32(lane))
            b.store(lanes, found)
    columns = b.add(load(b, order, 0, I64), repeated(b, start))
    is_new = b.icmp_signed(">=", columns, repeated(b, counted))
    return b.select(is_new, b.load(found), FLOATS(None))


_arrangement_at = reader_of(Arrangement)


@njit(nogil=True)
def _arrange_row(x, out, arrangement):  # type: ignore[no-untyped-def]
    """Arrange one row, and return the address behind what was written."""
    num_vectors = arrangement.num_vectors - arrangement.has_sum
    width = num_vectors * LANES
    dense = arrangement.is_dense
    half = arrangement.is_half
    vector_bytes = LANES * (2 if half else 4)
    for step in range(arrangement.num_steps):
        counted = step * width
        start = min(counted, arrangement.num_columns - width)
        if arrangement.digit_bits != 0:
            out = _arrange_digits(x + 4 * start, counted - start, out, arrangement)
            continue
        for k in range(num_vectors):
            order = arrangement.order + 8 * LANES * k
            factors = arrangement.factors + 4 * LANES * k
            to = out + vector_bytes * k
            _arrange_lanes(x, start, order, dense, counted, factors, to, half)
        if arrangement.has_sum:
            sums = out + 4 * LANES * num_vectors
            order = arrangement.order + 8 * LANES * num_vectors
            factors = arrangement.factors + 4 * LANES * num_vectors
            for lane in range(LANES):
                put_float(sums, lane, np.float32(0))
            for k in range(arrangement.num_summed):
                first = start + k * arrangement.sum_step
                _add_lanes(x, first, order, dense, counted, factors, sums)
        out += vector_bytes * arrangement.num_vectors
    return out


@njit(nogil=True)
def _arrange_digits(x, counted, out, arrangement):  # type: ignore[no-untyped-def]
    """Store the digits of a step, their unit and perhaps sums; return the address behind."""
    num_vectors = arrangement.num_vectors - arrangement.has_sum
    bits = arrangement.digit_bits
    numbers = memory_of_step()
    exponent = max(largest_exponent(x, num_vectors), LEAST_EXPONENT)
    for k in range(num_vectors):
        offset = 4 * LANES * k
        places = arrangement.places + 32 * k
        put_digits(x + offset, counted - LANES * k, exponent, bits, places, out, numbers + offset)
    out += LANES * NUM_DIGITS * num_vectors
    unit = unit_of(exponent, bits)
    for lane in range(LANES):
        put_float(out, lane, unit * float_at(arrangement.factors, 0))
    out += 4 * LANES
    if arrangement.has_sum:
        firsts = arrangement.order + 8 * LANES * num_vectors
        factors = arrangement.factors + 4 * LANES * num_vectors
        for lane in range(LANES):
            total = sum_of_numbers(numbers + 4 * int_at(firsts, lane), arrangement.num_summed)
            put_float(out, lane, total * (unit * float_at(factors, lane)))
        out += 4 * LANES
    return out


@machine_code(types.void(*[types.int64] * 4, named(Arrangement)))
def arrange(x, x_bytes, out, num_rows, arrangement):  # type: ignore[no-untyped-def]
    """Arrange `num_rows` rows of x, `x_bytes` apart, at the address `out`."""
    for _ in range(num_rows):
        at = _arrange_row(x, out, arrangement)
        behind = arrangement.behind
        while behind != 0:
            other = _arrangement_at(behind)
            at = _arrange_row(x, at, other)
            behind = other.behind
        x += x_bytes
        out += arrangement.row_bytes


@machine_code(types.void(*[types.int64] * 5))
def arrange_by(x, x_bytes, out, num_rows, arranged_by):  # type: ignore[no-untyped-def]
    """Arrange rows as `arrange` does, by the Arrangement at an address: to hand over its numbers as
    a tuple takes Python longer than few rows take.
    """
    arrange(x, x_bytes, out, num_rows, _arrangement_at(arranged_by))
