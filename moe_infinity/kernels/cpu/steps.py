"""How a product runs along the columns of a weight in steps, and how x is arranged for it. rows.py
and words.py have the machine code.

A step is `num_vectors` vectors of LANES columns. x is arranged in the order in which weights come
out of decoding. For WORDS, which are stored column by column, a step is a group. The last step of a
row may overlap the one before; x is 0 where it does.

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

from moe_infinity.experts import DTYPE_BYTES
from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu.compiler import machine_code, named, reader_of
from moe_infinity.kernels.cpu.loaders import LOADERS, ValueLoader
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    load,
    put_float,
    repeated,
    store,
)
from moe_infinity.kernels.unpack import ZERO_OF_SYMMETRIC
from moe_infinity.layout import NIBBLES, WORDS, Block

NIBBLE_UNITS = np.array([*(16.0**-k for k in range(NIBBLES - 1)), 1.0], np.float32)


class InnerLoop(NamedTuple):
    """What one function is compiled for: how the columns of a row are read in steps."""

    kind: str  # of LOADERS
    num_vectors: int  # decoded at a step
    num_scales: int  # loaded at a step: more than one where groups are shorter than a step
    scale: str | None  # a float of 2 or 4 bytes, or uint8 for an exponent; None: no scales
    has_zeros: bool

    @property
    def loader(self) -> ValueLoader:
        return LOADERS[self.kind]

    @property
    def scale_bytes(self) -> int:
        """Of one; 0 without scales."""
        return 0 if self.scale is None else DTYPE_BYTES[self.scale]

    @property
    def num_columns(self) -> int:
        return self.num_vectors * LANES

    @property
    def num_bytes(self) -> int:
        return int(self.num_columns * self.loader.bits / 8)

    @property
    def num_x(self) -> int:
        """Vectors of x at a step, perhaps with their sum."""
        return self.num_vectors + self.loader.subtracts_zero


class Tile(NamedTuple):
    """Products that are summed at once, in registers."""

    num_rows: int
    num_tokens: int


class KernelArguments(NamedTuple):
    """What a kernel gets to know about a weight: integers, and in the kernel's code LLVM's values.
    Fields that name no unit are addresses.
    """

    weight: Any
    scales: Any
    zeros: Any  # words [rows / 8, groups]; not read if there are none
    row_bytes: Any  # of weight; for WORDS of a line: one word of every row, or of every eighth
    x_bytes: Any  # of a token
    out_bytes: Any  # of a token
    scales_bytes: Any  # of a row of scales; for WORDS of a group
    block_rows: Any  # that share a row of scales
    num_steps: Any
    inverse: Any  # 2 ** 32 / (steps that share a scale) + 1, to divide by multiplying
    last_scale: Any  # the scale, or first of the scales, of the last step


def loop_for(
    kind: str,
    num_columns: int,
    *,
    group: int,
    scale: str | None,
    has_zeros: bool = False,
) -> InnerLoop | None:
    """For rows whose `group` columns share a scale. None: no step fits these columns."""
    num_groups = -(-num_columns // group)
    num_vectors = _num_vectors(kind, num_columns, num_groups, min(group, num_columns))
    if num_vectors is None:
        return None
    num_scales = max(1, num_vectors * LANES // group) if num_groups > 1 else 1
    return InnerLoop(kind, num_vectors, num_scales, scale, has_zeros)


def _num_vectors(kind: str, num_columns: int, num_groups: int, group: int) -> int | None:
    """The most that fit a row, where a step is inside one group or has whole groups."""
    if kind in WORDS:
        return group // LANES if group % LANES == 0 else None
    loader = LOADERS[kind]
    for num_vectors in loader.num_vectors:
        width = num_vectors * LANES
        is_whole = group % width == 0 or group in loader.short_groups
        if width <= num_columns and (num_groups == 1 or is_whole):
            return num_vectors
    return None


def arguments_for(
    loop: InnerLoop, shape_RC: tuple[int, ...], block: Block, num_scale_rows: int
) -> KernelArguments:
    """For a weight without gaps whose blocks [rows, columns] have a scale each. Addresses and
    `out_bytes` are left to the caller.
    """
    num_rows, num_columns = shape_RC
    num_steps = -(-num_columns // loop.num_columns)
    num_groups = -(-num_columns // block[1])
    row_bytes = int(num_columns * loop.loader.bits / 8)
    num_scales = num_groups
    if loop.kind in WORDS:
        row_bytes = num_rows // 2 if loop.kind == "awq" else num_rows * 4
        num_scales = num_rows
    per_scale = loop.num_scales * block[1] // loop.num_columns if num_groups > 1 else num_steps
    return KernelArguments(
        weight=0,
        scales=0,
        zeros=0,
        row_bytes=row_bytes,
        x_bytes=num_steps * loop.num_x * LANES * 4,
        out_bytes=0,
        scales_bytes=num_scales * loop.scale_bytes,
        block_rows=block[0] if num_scale_rows > 1 else num_rows,
        num_steps=num_steps,
        inverse=(1 << 32) // per_scale + 1,
        last_scale=num_groups - loop.num_scales,
    )


class Arrangement(NamedTuple):
    """How arrange() places a row of x: integers, for numba. Tables are int64 and float32 [vectors,
    LANES], with one row more if there are sums.
    """

    num_columns: int
    num_steps: int
    num_vectors: int  # of x at a step
    has_sum: int  # 1: one more vector, with sums of columns
    is_dense: int  # columns stay in their order
    order: int  # address of a table: column of a step; in the last row the first that is summed
    factors: int  # address of a table: what a column, or each that is summed, is multiplied by
    num_summed: int  # columns
    sum_step: int  # from one column that is summed to the next
    row_bytes: int  # of a whole row, with what lies behind
    behind: int = 0  # address of another Arrangement of the same x, for weights of another kind

    @property
    def row_shape(self) -> tuple[int, int, int]:
        return self.num_steps, self.num_vectors, LANES


@cache
def arrangement_for(loop: InnerLoop, num_columns: int) -> Arrangement:
    tables = _tables(loop.kind, loop.num_vectors, loop.has_zeros)
    num_steps = -(-num_columns // loop.num_columns)
    return Arrangement(
        num_columns=num_columns,
        num_steps=num_steps,
        num_vectors=loop.num_x,
        has_sum=loop.num_x - loop.num_vectors,
        is_dense=int(tables.is_dense),
        order=tables.order.ctypes.data,
        factors=tables.factors.ctypes.data,
        num_summed=tables.num_summed,
        sum_step=tables.sum_step,
        row_bytes=num_steps * loop.num_x * LANES * 4,
    )


def one_behind_another(
    arrangements: Sequence[Arrangement],
) -> tuple[Arrangement, list[array[int]]]:
    """The first, which knows the others; and memory that has to stay while it is used."""
    row_bytes = sum(places.row_bytes for places in arrangements)
    kept: list[array[int]] = []
    behind = 0
    for places in reversed(arrangements):
        chained = places._replace(row_bytes=row_bytes, behind=behind)
        kept.append(array("q", chained))
        behind = kept[-1].buffer_info()[0]
    return chained, kept


class Tables(NamedTuple):
    """See Arrangement."""

    order: NDArray[np.int64]
    factors: NDArray[np.float32]
    is_dense: bool
    num_summed: int
    sum_step: int


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
    """[T, steps, vectors, LANES], in the order in which weights come out of decoding; 0 where the
    last step overlaps the one before.
    """
    places = arrangement_for(loop, x_TC.shape[1])
    # numpy aligns to 16 bytes: then every vector would cross a cache line
    out: NDArray[np.float32] = host_float32(len(x_TC), *places.row_shape).numpy()
    arrange(x_TC.ctypes.data, x_TC.strides[0], out.ctypes.data, len(x_TC), places)
    return out


@intrinsic  # type: ignore[untyped-decorator]
def _arrange_lanes(
    _: Any, x: Any, start: Any, order: Any, is_dense: Any, counted: Any, factors: Any, out: Any
) -> Any:
    """16 columns times 16 factors."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        *places, factors, out = args
        store(b, b.fmul(_columns(b, *places), load(b, factors, 0, F32)), out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


@intrinsic  # type: ignore[untyped-decorator]
def _add_lanes(
    _: Any, x: Any, start: Any, order: Any, is_dense: Any, counted: Any, factors: Any, total: Any
) -> Any:
    """16 columns times 16 factors, to 16 sums."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        *places, factors, total = args
        product = b.fmul(load(b, factors, 0, F32), _columns(b, *places))
        store(b, b.fadd(load(b, total, 0, F32), product), total)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


def _columns(b: Any, x: Any, start: Any, order: Any, is_dense: Any, counted: Any) -> Any:
    """Of a row, those that `order` names, from column `start`; 0 in place of those before
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


_places_at = reader_of(Arrangement)


@njit(nogil=True)
def _arrange_row(x, out, places):  # type: ignore[no-untyped-def]
    """Gives the address behind what it wrote."""
    num_vectors = places.num_vectors - places.has_sum
    width = num_vectors * LANES
    dense = places.is_dense
    for step in range(places.num_steps):
        counted = step * width
        start = min(counted, places.num_columns - width)
        for k in range(num_vectors):
            order = places.order + 8 * LANES * k
            factors = places.factors + 4 * LANES * k
            _arrange_lanes(x, start, order, dense, counted, factors, out + 4 * LANES * k)
        if places.has_sum:
            sums = out + 4 * LANES * num_vectors
            order = places.order + 8 * LANES * num_vectors
            factors = places.factors + 4 * LANES * num_vectors
            for lane in range(LANES):
                put_float(sums, lane, np.float32(0))
            for k in range(places.num_summed):
                first = start + k * places.sum_step
                _add_lanes(x, first, order, dense, counted, factors, sums)
        out += places.num_vectors * LANES * 4
    return out


@machine_code(types.void(*[types.int64] * 4, named(Arrangement)))
def arrange(x, x_bytes, out, num_rows, places):  # type: ignore[no-untyped-def]
    """Arrange `num_rows` rows of x, `x_bytes` apart, at the address `out`."""
    for _ in range(num_rows):
        at = _arrange_row(x, out, places)
        behind = places.behind
        while behind != 0:
            other = _places_at(behind)
            at = _arrange_row(x, at, other)
            behind = other.behind
        x += x_bytes
        out += places.row_bytes
