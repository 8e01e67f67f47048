"""The inner loop over a weight that is stored row by row, as vector instructions; words.py has that
of the other kinds. Left to vectorize a plain loop, LLVM makes slower ones: with sums across lanes
at every group, or scales spread in memory.

    for each row    for each step of 64 bytes or so    values x x, times scale, onto 16 sums

steps.py says what a step is and how x is arranged, loaders.py how values are read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.checkpoint.layout import WORDS
from moe_infinity.kernels.cpu.compiler import c_function
from moe_infinity.kernels.cpu.steps import InnerLoop, KernelArguments
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    all_lanes,
    fma,
    load,
    prefetch,
    repeated,
    smaller,
    spread,
    sum_of_lanes,
)  # fmt: skip
from moe_infinity.kernels.cpu.words import STORED, emit_words, scales_of

# How far ahead nibbles are prefetched: 13 GB/s instead of 7 to 12, one thread. Other kinds are read
# faster with the hardware prefetcher alone: int8 24 GB/s instead of 15, bf16 23 instead of 15.
PREFETCH_BYTES = 1024
NUM_ARGUMENTS = len(KernelArguments._fields)


@cache
def row_function(loop: InnerLoop) -> Any:
    """A C function for rows [first, last). It takes first, last, the addresses of x, of out and of
    KernelArguments, and that of the slot, from which the weight's parts are counted.
    """
    kind = loop.kind  # constants of the compiled code
    num_vectors = loop.num_vectors
    num_scales = loop.num_scales
    scale = loop.scale or ""
    has_zeros = int(loop.has_zeros)
    num_tokens = loop.num_tokens

    name = "rows_" + "_".join(map(str, loop))
    is_kept = loop.loader.load.__module__.startswith("moe_infinity.")

    @c_function(types.void(*[types.int64] * 6), name, is_kept=is_kept)
    def function(first: int, last: int, x: int, out: int, arguments: int, slot: int) -> None:
        _rows(kind, num_vectors, num_scales, scale, has_zeros, num_tokens,
              first, last, x, out, arguments, slot)  # fmt: skip

    return function


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _rows(
    _: Any, kind: Any, num_vectors: Any, num_scales: Any, scale: Any, has_zeros: Any,
    num_tokens: Any, first: Any, last: Any, x: Any, out: Any, arguments: Any, slot: Any,
) -> Any:  # fmt: skip
    literals = kind, num_vectors, num_scales, scale, has_zeros, num_tokens
    loop = InnerLoop(*(each.literal_value for each in literals))
    loop = loop._replace(scale=loop.scale or None, has_zeros=bool(loop.has_zeros))

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return _emit_rows_of_slot(loop, context, b, args[len(literals) :])

    return types.void(*literals, *[types.int64] * 6), emit


def _emit_rows_of_slot(loop: InnerLoop, context: Any, b: Any, args: Any) -> Any:
    first, last, x, out, arguments, slot = args
    at = [b.add(arguments, I64(8 * k)) for k in range(NUM_ARGUMENTS)]
    a = KernelArguments(*(b.load(b.inttoptr(address, I64.as_pointer())) for address in at))
    a = a._replace(
        weight=b.add(a.weight, slot), scales=b.add(a.scales, slot), zeros=b.add(a.zeros, slot)
    )
    _emit_loop(loop, b, first, last, x, out, a)
    return context.get_dummy_value()


def _emit_loop(
    loop: InnerLoop, b: Any, first: Any, last: Any, x: Any, out: Any, a: KernelArguments
) -> None:
    """out[t, row] = the sum over steps of scale x (values x x[t]), for rows [first, last)."""
    if loop.kind in WORDS:
        emit_words(loop, b, first, last, x, out, a)
        return
    tokens = range(loop.num_tokens)
    last_offset = b.sub(a.row_bytes, I64(loop.num_bytes))
    with cgutils.for_range_slice(b, first, last, I64(1), intp=I64) as (row, _):
        sums = [cgutils.alloca_once_value(b, FLOATS(None)) for _ in tokens]
        with cgutils.for_range(b, a.num_steps, intp=I64) as each:
            offset = smaller(b, b.mul(each.index, I64(loop.num_bytes)), last_offset)
            scale_idx = b.lshr(b.mul(each.index, a.inverse), I64(32))
            scale_idx = smaller(b, b.mul(scale_idx, I64(loop.num_scales)), a.last_scale)
            values = _values(b, loop, a, row, offset, scale_idx)
            scale = None if loop.scale is None else spread(b, _scales(b, loop, a, row, scale_idx))
            x_at = b.add(x, b.mul(each.index, I64(loop.num_x * 4 * LANES)))
            for total in sums:
                x_of_step = [load(b, x_at, 4 * LANES * k, F32) for k in range(loop.num_x)]
                part = _dot(b, values, x_of_step)
                if scale is None:
                    b.store(b.fadd(part, b.load(total)), total)
                else:
                    b.store(fma(b, part, scale, b.load(total)), total)
                x_at = b.add(x_at, a.x_bytes)
        for t, total in enumerate(sums):
            out_at = b.add(b.add(out, b.mul(a.out_bytes, I64(t))), b.mul(row, I64(4)))
            b.store(sum_of_lanes(b, b.load(total)), b.inttoptr(out_at, F32.as_pointer()))


def _values(
    b: Any, loop: InnerLoop, a: KernelArguments, row: Any, offset: Any, scale_idx: Any
) -> list[Any]:
    """What a step multiplies by x: the weights of a row, then its zeros if any are stored."""
    at = b.add(b.add(a.weight, b.mul(row, a.row_bytes)), offset)
    if loop.loader.bits == 4:
        prefetch(b, b.add(at, I64(PREFETCH_BYTES)))
    return [*loop.loader.load(b, loop.num_vectors, at), *_zeros(b, loop, a, row, scale_idx)]


def _dot(b: Any, values: list[Any], x: list[Any]) -> Any:
    """The sum of the products of a step, in two chains. If x has one vector more than there are
    values, it is what the zeros add to that sum.
    """
    parts = [FLOATS(None), x[-1] if len(x) > len(values) else FLOATS(None)]
    for k, value in enumerate(values):
        parts[k % 2] = fma(b, value, x[k], parts[k % 2])
    return b.fadd(*parts)


def _scales(b: Any, loop: InnerLoop, a: KernelArguments, row: Any, scale_idx: Any) -> Any:
    at = b.add(a.scales, b.mul(b.udiv(row, a.block_rows), a.scales_bytes))
    assert loop.scale is not None, loop
    at = b.add(at, b.mul(scale_idx, I64(loop.scale_bytes)))
    return scales_of(b, loop.scale, load(b, at, 0, STORED[loop.scale_bytes], loop.num_scales))


def _zeros(b: Any, loop: InnerLoop, a: KernelArguments, row: Any, scale_idx: Any) -> list[Any]:
    """The zeros of a step in one vector, if any are stored: in word [row / 8, group], nibble
    row % 8.
    """
    if not loop.has_zeros:
        return []
    num_groups = b.add(a.last_scale, I64(loop.num_scales))
    word = b.add(b.mul(b.lshr(row, I64(3)), num_groups), scale_idx)
    words = load(b, b.add(a.zeros, b.mul(word, I64(4))), 0, I32, loop.num_scales)
    shift = b.trunc(b.mul(b.and_(row, I64(7)), I64(4)), I32)
    nibbles = b.and_(b.lshr(spread(b, words), repeated(b, shift)), all_lanes(I32, 15))
    return [b.sitofp(nibbles, FLOATS)]
