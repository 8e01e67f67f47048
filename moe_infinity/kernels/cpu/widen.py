"""Packed weights as plain numbers, decoded by machine code: to bfloat16 with columns in their
order, as the unpackers of kernels/unpack.py give them; or, for panels.py, to float32 in the order
of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.arrangement import tables_of
from moe_infinity.kernels.cpu.compiler import c_function
from moe_infinity.kernels.cpu.rows import read_arguments, step_scales, step_zeros
from moe_infinity.kernels.cpu.steps import InnerLoop, KernelArguments
from moe_infinity.kernels.cpu.vectors import (
    FLOATS,
    I64,
    joined,
    pick,
    smaller,
    store,
    to_bfloat,
)

SIZE = 2  # bytes of a bfloat16


@cache
def widening_function(loop: InnerLoop) -> Any:
    """A C function that decodes rows [first, last) to bfloat16, `out_bytes` apart from the address
    of row 0 on. It is called as `rows.row_function` is, without x.
    """
    kind = loop.kind  # constants of the compiled code
    num_vectors = loop.num_vectors
    num_scales = loop.num_scales
    scale = loop.scale or ""
    has_zeros = int(loop.has_zeros)

    name = "widen_" + "_".join(map(str, loop))
    is_kept = loop.loader.load.__module__.startswith("moe_infinity.")

    @c_function(types.void(*[types.int64] * 7), name, is_kept=is_kept)
    def function(
        first: int, last: int, x: int, num_tokens: int, out: int, arguments: int, slot: int
    ) -> None:
        _widen(kind, num_vectors, num_scales, scale, has_zeros,
               first, last, out, arguments, slot)  # fmt: skip

    return function


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _widen(
    _: Any, kind: Any, num_vectors: Any, num_scales: Any, scale: Any, has_zeros: Any,
    first: Any, last: Any, out: Any, arguments: Any, slot: Any,
) -> Any:  # fmt: skip
    literals = kind, num_vectors, num_scales, scale, has_zeros
    loop = InnerLoop.of_literals(*(each.literal_value for each in literals))

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        first, last, out, arguments, slot = args[len(literals) :]
        a = read_arguments(b, loop, arguments, slot)
        last_offset = b.sub(a.row_bytes, I64(loop.num_bytes))
        with cgutils.for_range_slice(b, first, last, I64(1), intp=I64) as (row, _):
            row_at = b.add(out, b.mul(row, a.out_bytes))
            with cgutils.for_range(b, a.num_steps, intp=I64) as each:
                offset = smaller(b, b.mul(each.index, I64(loop.num_bytes)), last_offset)
                column = b.udiv(b.mul(offset, I64(loop.num_columns)), I64(loop.num_bytes))
                at = b.add(row_at, b.mul(column, I64(SIZE)))
                _store_in_order(b, loop, decoded(b, loop, a, row, each.index), at)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 5), emit


def decoded(b: Any, loop: InnerLoop, a: KernelArguments, row: Any, step: Any) -> Iterator[Any]:
    """The values of a step of a row as they are, vector by vector, in the order of decoding."""
    last_offset = b.sub(a.row_bytes, I64(loop.num_bytes))
    offset = smaller(b, b.mul(step, I64(loop.num_bytes)), last_offset)
    place = b.add(b.add(a.weight, b.mul(row, a.row_bytes)), offset)
    scale_idx = b.lshr(b.mul(step, a.inverse), I64(32))
    scale_idx = smaller(b, b.mul(scale_idx, I64(loop.num_scales)), a.last_scale)
    tables = tables_of(loop)
    factors = tables.factors
    blocks = loop.loader.blocks
    if blocks is None:
        scale = zero = None
        if loop.scale is not None:
            scale = step_scales(b, loop, a, row, scale_idx)
        if loop.loader.subtracts_zero:
            zero = _constant(factors[-1])
            if loop.has_zeros:
                zero = b.fmul(zero, step_zeros(b, loop, a, row, scale_idx))
        for value, factor in zip(
            loop.loader.load(b, loop.num_vectors, place), factors[:-1], strict=True
        ):
            value = _times(b, value, factor)
            value = value if zero is None else b.fadd(value, zero)
            yield value if scale is None else b.fmul(value, scale)
        return
    step = blocks.load(b, loop.num_vectors, place)
    minima = None if step.minima is None else b.fmul(step.minima, _constant(factors[-1]))
    rows = zip(tables.order, factors, strict=True)
    for segment in step.segments:
        for value in segment.values:
            columns, factor = next(rows)
            value = b.fmul(value, _times(b, segment.scale, factor))
            if minima is not None:
                lanes = [blocks.sum_lanes[column // blocks.sum_width] for column in columns]
                value = b.fadd(value, pick(b, minima, lanes))
            yield value


def _times(b: Any, value: Any, factors: Any) -> Any:
    """A vector times constants, of which many are 1."""
    return value if (factors == 1).all() else b.fmul(value, _constant(factors))


def _constant(numbers: Any) -> Any:
    return ir.Constant(FLOATS, [float(number) for number in numbers])


def _store_in_order(b: Any, loop: InnerLoop, vectors: Iterator[Any], at: Any) -> None:
    """Store a step, rounded, at the address of its first column: the lanes of a few vectors, which
    are neighbouring columns, in runs.
    """
    order = tables_of(loop).order
    blocks = loop.loader.blocks
    together = loop.loader.columns_per_lane
    if blocks is not None and blocks.order[0]:
        together = 4  # bytes of a word
    for first in range(0, loop.num_vectors, together):
        joint = joined(b, [to_bfloat(b, next(vectors)) for _ in range(together)])
        columns = order[first : first + together].ravel()
        lanes = np.argsort(columns)
        for run in np.split(lanes, np.flatnonzero(np.diff(columns[lanes]) != 1) + 1):
            store(b, pick(b, joint, run.tolist()), b.add(at, I64(SIZE * int(columns[run[0]]))))
