"""The inner loop of weights for experts_cpu.py, as vector instructions; of those
that lie column by column it is in words.py. LLVM finds worse ones by itself: with sums
across lanes at every group, or scales spread in memory.

    for each row    for each step of 64 bytes or so    values x x, times scale, onto 16 sums

steps.py says what a step is and how x lies.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.checkpoint.layout import WORDS
from moe_infinity.kernels.cpu.steps import BITS, Fixed, Step
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    LANES,
    all_lanes,
    fma,
    from_bfloat,
    from_half,
    load,
    nibbles_of,
    prefetch,
    repeated,
    smaller,
    spread,
    sum_of_lanes,
    vector_of,
)  # fmt: skip
from moe_infinity.kernels.cpu.words import STORED, emit_words, scales_of

# Ahead, of nibbles: 13 GB/s instead of 7 to 12, one thread. All others come faster if nothing but
# the machine itself prefetches: int8 24 GB/s instead of 15, bf16 23 instead of 15.
PREFETCH_BYTES = 1024
NUM_FIXED = len(Fixed._fields)


@cache
def row_function(step: Step) -> Any:
    """A C function for rows [first, last); its `address` takes first, last, x, out, the address of
    a Fixed in memory, and what to add to its addresses.
    """
    signature = types.void(*[types.int64] * 6)

    @intrinsic  # type: ignore[untyped-decorator]
    def rows(_: Any, first: Any, last: Any, x: Any, out: Any, fixed: Any, slot: Any) -> Any:
        return signature, partial(_emit_rows_of_slot, step)

    @cfunc(signature)  # type: ignore[untyped-decorator]
    def function(first: int, last: int, x: int, out: int, fixed: int, slot: int) -> None:
        rows(first, last, x, out, fixed, slot)

    return function


def _emit_rows_of_slot(step: Step, context: Any, b: Any, _: Any, args: Any) -> Any:
    first, last, x, out, fixed, slot = args
    a = Fixed(
        *(b.load(b.inttoptr(b.add(fixed, I64(8 * k)), I64.as_pointer())) for k in range(NUM_FIXED))
    )
    a = a._replace(
        weight=b.add(a.weight, slot), scales=b.add(a.scales, slot), zeros=b.add(a.zeros, slot)
    )
    _emit_loop(step, b, first, last, x, out, a)
    return context.get_dummy_value()


def _emit_loop(step: Step, b: Any, first: Any, last: Any, x: Any, out: Any, a: Fixed) -> None:
    """out[t, row] = the sum over steps of scale x (values x x[t]), for rows [first, last)."""
    if step.kind in WORDS:
        emit_words(step, b, first, last, x, out, a)
        return
    tokens = range(step.num_tokens)
    last_offset = b.sub(a.row_bytes, I64(step.num_bytes))
    with cgutils.for_range_slice(b, first, last, I64(1), intp=I64) as (row, _):
        sums = [cgutils.alloca_once_value(b, FLOATS(None)) for _ in tokens]
        with cgutils.for_range(b, a.num_steps, intp=I64) as loop:
            offset = smaller(b, b.mul(loop.index, I64(step.num_bytes)), last_offset)
            scale_idx = b.lshr(b.mul(loop.index, a.inverse), I64(32))
            scale_idx = smaller(b, b.mul(scale_idx, I64(step.num_scales)), a.last_scale)
            values = _values(b, step, a, row, offset, scale_idx)
            scale = None if step.scale is None else spread(b, _scales(b, step, a, row, scale_idx))
            x_at = b.add(x, b.mul(loop.index, I64(step.num_x * 4 * LANES)))
            for total in sums:
                x_of_step = [load(b, x_at, 4 * LANES * k, F32) for k in range(step.num_x)]
                part = _dot(b, values, x_of_step)
                if scale is None:
                    b.store(b.fadd(part, b.load(total)), total)
                else:
                    b.store(fma(b, part, scale, b.load(total)), total)
                x_at = b.add(x_at, a.x_bytes)
        for t, total in enumerate(sums):
            out_at = b.add(b.add(out, b.mul(a.out_bytes, I64(t))), b.mul(row, I64(4)))
            b.store(sum_of_lanes(b, b.load(total)), b.inttoptr(out_at, F32.as_pointer()))


def _values(b: Any, step: Step, a: Fixed, row: Any, offset: Any, scale_idx: Any) -> list[Any]:
    """What a step multiplies by x: the weights of a row, then its zeros if any are stored."""
    at = b.add(b.add(a.weight, b.mul(row, a.row_bytes)), offset)
    if BITS[step.kind] == 4:
        prefetch(b, b.add(at, I64(PREFETCH_BYTES)))
    return [*_weights(b, step, at), *_zeros(b, step, a, row, scale_idx)]


def _weights(b: Any, step: Step, at: Any) -> list[Any]:
    """Vectors of float32, times what x has been divided by."""
    if step.kind == "nibbles":
        return nibbles_of(b, load(b, at, 0, I32))
    if step.kind == "mxfp4":  # the sign to bit 15, the others to bits 9-11: a float16 / 2 ** 14
        halves = load(b, at, 0, I16)
        tops = [
            b.ashr(b.shl(halves, all_lanes(I16, 12 - 4 * k)), all_lanes(I16, 3)) for k in range(4)
        ]
        return [from_half(b, b.and_(v, all_lanes(I16, 0x8E00))) for v in tops]
    if BITS[step.kind] >= 16:
        return floats(b, step.kind, step.num_vectors, at)
    loaded = [load(b, at, k * LANES, I8) for k in range(step.num_vectors)]
    if step.kind == "int8":
        return [b.sitofp(b.sext(v, vector_of(I32)), FLOATS) for v in loaded]
    halves = [
        b.shl(b.sext(v, vector_of(I16)), all_lanes(I16, 7)) for v in loaded
    ]  # float16 / 2 ** 8
    return [from_half(b, b.and_(v, all_lanes(I16, 0xBF80))) for v in halves]


def floats(b: Any, kind: str, num_vectors: int, at: Any) -> list[Any]:
    """Vectors of bf16, f16 or f32, in float32."""
    if kind == "f32":
        return [load(b, at, 4 * LANES * k, F32) for k in range(num_vectors)]
    loaded = [load(b, at, 2 * LANES * k, I16) for k in range(num_vectors)]
    return [from_half(b, v) if kind == "f16" else from_bfloat(b, v) for v in loaded]


def _dot(b: Any, values: list[Any], x: list[Any]) -> Any:
    """The products of a step, in two chains; a vector of x too many has those of the zeros."""
    parts = [FLOATS(None), x[-1] if len(x) > len(values) else FLOATS(None)]
    for k, value in enumerate(values):
        parts[k % 2] = fma(b, value, x[k], parts[k % 2])
    return b.fadd(*parts)


def _scales(b: Any, step: Step, a: Fixed, row: Any, scale_idx: Any) -> Any:
    at = b.add(a.scales, b.mul(b.udiv(row, a.block_rows), a.scales_bytes))
    assert step.scale is not None, step
    at = b.add(at, b.mul(scale_idx, I64(step.scale.itemsize)))
    return scales_of(b, step.scale, load(b, at, 0, STORED[step.scale.itemsize], step.num_scales))


def _zeros(b: Any, step: Step, a: Fixed, row: Any, scale_idx: Any) -> list[Any]:
    """Those of a step in one vector, if any are stored: word [row / 8, group], nibble row % 8."""
    if not step.has_zeros:
        return []
    num_groups = b.add(a.last_scale, I64(step.num_scales))
    word = b.add(b.mul(b.lshr(row, I64(3)), num_groups), scale_idx)
    words = load(b, b.add(a.zeros, b.mul(word, I64(4))), 0, I32, step.num_scales)
    shift = b.trunc(b.mul(b.and_(row, I64(7)), I64(4)), I32)
    nibbles = b.and_(b.lshr(spread(b, words), repeated(b, shift)), all_lanes(I32, 15))
    return [b.sitofp(nibbles, FLOATS)]
