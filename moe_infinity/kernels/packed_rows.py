"""The inner loop of packed_cpu.py's row formats, as vector instructions. LLVM finds
worse ones by itself: with sums across lanes at every group, or scales spread in memory.

    for each row    for each step of 64 bytes or so    values x x, times scale, onto 16 sums

A step is `num_vectors` vectors of LANES weights, and x comes arranged as they do. The last step of
a row may overlap the one before: x is 0 where it does.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    LANES,
    all_lanes,
    fma,
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

PREFETCH_BYTES = 1024  # ahead; the machine's own prefetching stops at every page


class Step(NamedTuple):
    """What the inner loop of a row format does; a kernel is compiled for each that occurs."""

    kind: str  # int8, fp8, nibbles or mxfp4
    num_vectors: int  # decoded at a step
    num_scales: int  # loaded at a step: more than one where groups are shorter than a step
    scale: torch.dtype  # float32, bfloat16, or uint8 for an exponent
    has_zeros: bool
    num_tokens: int

    @property
    def num_columns(self) -> int:
        return self.num_vectors * LANES

    @property
    def num_bytes(self) -> int:
        return self.num_columns // (2 if self.is_nibbles else 1)

    @property
    def is_nibbles(self) -> bool:
        return self.kind in ("nibbles", "mxfp4")

    @property
    def num_x(self) -> int:
        """Vectors of x at a step; nibbles have their sum, too."""
        return self.num_vectors + (self.kind == "nibbles")


class Fixed(NamedTuple):
    """What a kernel is told beside its rows, x and out: integers; in its code, LLVM's values.
    Without a unit, an address.
    """

    weight: Any
    scales: Any
    zeros: Any  # words [rows / 8, groups]; 0 if there are none
    row_bytes: Any  # of weight
    x_bytes: Any  # of a token
    out_bytes: Any  # of a token
    scales_bytes: Any  # of a row of scales
    block_rows: Any  # that share a row of scales
    num_steps: Any
    inverse: Any  # 2 ** 32 over the steps that share a scale, and 1
    last_scale: Any  # the scale, or first of the scales, of the last step


@cache
def row_kernel(step: Step) -> Any:
    """Machine code for rows [first, last); x and out are addresses."""
    fixed = types.NamedUniTuple(types.int64, len(Fixed._fields), Fixed)
    signature = types.void(types.int64, types.int64, types.int64, types.int64, fixed)

    @intrinsic  # type: ignore[untyped-decorator]
    def rows(_: Any, first: Any, last: Any, x: Any, out: Any, fixed: Any) -> Any:
        return signature, partial(_emit_rows, step)

    @njit(signature, nogil=True)  # type: ignore[untyped-decorator]
    def kernel(first: int, last: int, x: int, out: int, fixed: Fixed) -> None:
        rows(first, last, x, out, fixed)

    return kernel


def _emit_rows(step: Step, context: Any, b: Any, _: Any, args: Any) -> Any:
    """out[t, row] = the sum over steps of scale x (values x x[t]), for rows [first, last)."""
    (first, last, x, out), tokens = args[:4], step.num_tokens
    a = Fixed(*cgutils.unpack_tuple(b, args[4]))
    last_offset = b.sub(a.row_bytes, I64(step.num_bytes))
    with cgutils.for_range_slice(b, first, last, I64(1), intp=I64) as (row, _):
        sums = [cgutils.alloca_once_value(b, FLOATS(None)) for _ in range(tokens)]
        with cgutils.for_range(b, a.num_steps, intp=I64) as loop:
            offset = smaller(b, b.mul(loop.index, I64(step.num_bytes)), last_offset)
            scale_idx = b.lshr(b.mul(loop.index, a.inverse), I64(32))
            scale_idx = smaller(b, b.mul(scale_idx, I64(step.num_scales)), a.last_scale)
            values = _values(b, step, a, row, offset, scale_idx)
            scale = spread(b, _scales(b, step, a, row, scale_idx))
            x_at = b.add(x, b.mul(loop.index, I64(step.num_x * 4 * LANES)))
            for total in sums:
                part = _dot(
                    b, values, [load(b, x_at, 4 * LANES * k, F32) for k in range(step.num_x)]
                )
                b.store(fma(b, part, scale, b.load(total)), total)
                x_at = b.add(x_at, a.x_bytes)
        for t, total in enumerate(sums):
            out_at = b.add(b.add(out, b.mul(a.out_bytes, I64(t))), b.mul(row, I64(4)))
            b.store(sum_of_lanes(b, b.load(total)), b.inttoptr(out_at, F32.as_pointer()))
    return context.get_dummy_value()


def _values(b: Any, step: Step, a: Fixed, row: Any, offset: Any, scale_idx: Any) -> list[Any]:
    """What a step multiplies by x: the weights of a row, then its zeros if any are stored."""
    at = b.add(b.add(a.weight, b.mul(row, a.row_bytes)), offset)
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
    loaded = [load(b, at, k * LANES, I8) for k in range(step.num_vectors)]
    if step.kind == "int8":
        return [b.sitofp(b.sext(v, vector_of(I32)), FLOATS) for v in loaded]
    halves = [
        b.shl(b.sext(v, vector_of(I16)), all_lanes(I16, 7)) for v in loaded
    ]  # float16 / 2 ** 8
    return [from_half(b, b.and_(v, all_lanes(I16, 0xBF80))) for v in halves]


def _dot(b: Any, values: list[Any], x: list[Any]) -> Any:
    """The products of a step, in two chains; a vector of x too many has those of the zeros."""
    parts = [FLOATS(None), x[-1] if len(x) > len(values) else FLOATS(None)]
    for k, value in enumerate(values):
        parts[k % 2] = fma(b, value, x[k], parts[k % 2])
    return b.fadd(*parts)


def _scales(b: Any, step: Step, a: Fixed, row: Any, scale_idx: Any) -> Any:
    at = b.add(a.scales, b.mul(b.udiv(row, a.block_rows), a.scales_bytes))
    stored = {torch.float32: F32, torch.bfloat16: I16, torch.uint8: I8}[step.scale]
    at = b.add(at, b.mul(scale_idx, I64(step.scale.itemsize)))
    scales = load(b, at, 0, stored, step.num_scales)
    if stored is F32:
        return scales
    shift = 16 if stored is I16 else 23  # bfloat16, or the exponent alone
    bits = b.shl(
        b.zext(scales, vector_of(I32, step.num_scales)), all_lanes(I32, shift, step.num_scales)
    )
    return b.bitcast(bits, vector_of(F32, step.num_scales))


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
