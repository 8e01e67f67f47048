"""The inner loop over a weight that is stored row by row, as vector instructions; words.py has that
of the other kinds. Left to vectorize a plain loop, LLVM makes slower ones: with sums across lanes
at every group, or scales spread in memory.

    for each tile of rows and tokens
        for each step of 64 bytes or so of a row    values x x, times scale, onto 16 sums

A weight is decoded once for all tokens of a tile. The bits of an output depend on nothing but its
row of the weight and its token: the additions are the same in tiles of every size.

steps.py says what a step is and how values are read, blocks.py how those are that have scales among
them, arrangement.py how x is arranged.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.block_kind import BlockStep
from moe_infinity.kernels.cpu.compiler import c_function, has_avx512
from moe_infinity.kernels.cpu.digits import NUM_DIGITS, product_of_words
from moe_infinity.kernels.cpu.steps import NUM_ARGUMENTS, InnerLoop, KernelArguments, Tile
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    all_lanes,
    fma,
    larger,
    load,
    number_at,
    prefetch,
    repeated,
    smaller,
    spread,
    store_sums,
)  # fmt: skip
from moe_infinity.kernels.cpu.words import STORED, emit_words, scales_of
from moe_infinity.layout import WORDS

PREFETCH_BYTES = 2048  # ahead, at least; bf16, one token, two threads: 47 GB/s, without it 43


# Tokens for which memory is the limit. Rows one after the other come fastest: bf16, 3 tokens, two
# threads, 41 GB/s where four rows at a time give 36.
FEW = 4
# But bytes are multiplied so fast that loading x takes its time, too, for a single token: q4_k, two
# threads, 31 GB/s with two rows at a time, 29 with one.
ROWS_OF_BYTES = 2


def largest_tile(loop: InnerLoop) -> Tile:
    """The largest tile whose sums fit in registers: 24 with AVX-512, otherwise 4, of two registers
    each. Formats that are scaled every few vectors need a second sum per output: 12 fit, or 8 where
    minima are added. Without AVX-512 these sums are 3, of one row: 2 x 2 would fill all
    registers, and takes up to 1.9 times as long.
    """
    is_wide = has_avx512()
    is_scaled = loop.scale is not None or loop.loader.blocks is not None
    if loop.kind in WORDS:  # a row stands for a block, which has 8 vectors of sums or 4
        return Tile(1, {"awq": 3}.get(loop.kind, 6) if is_wide else 2)
    if not is_wide:
        return Tile(1, 3) if is_scaled else Tile(2, 2)
    if loop.loader.blocks is not None:
        return Tile(2, 4)
    return Tile(4, 3) if loop.loader.short_groups else Tile(4, 6)


@cache
def row_function(loop: InnerLoop) -> Any:
    """A C function for rows [first, last). It takes first, last, the address of x, its number of
    tokens, the addresses of out and of KernelArguments, and that of the slot, from which the
    weight's parts are counted.
    """
    kind = loop.kind  # constants of the compiled code
    num_vectors = loop.num_vectors
    num_scales = loop.num_scales
    scale = loop.scale or ""
    has_zeros = int(loop.has_zeros)

    name = "rows_" + "_".join(map(str, loop))
    is_kept = loop.loader.load.__module__.startswith("moe_infinity.")

    @c_function(types.void(*[types.int64] * 7), name, is_kept=is_kept)
    def function(
        first: int, last: int, x: int, num_tokens: int, out: int, arguments: int, slot: int
    ) -> None:
        _rows(kind, num_vectors, num_scales, scale, has_zeros,
              first, last, x, num_tokens, out, arguments, slot)  # fmt: skip

    return function


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _rows(
    _: Any, kind: Any, num_vectors: Any, num_scales: Any, scale: Any, has_zeros: Any,
    first: Any, last: Any, x: Any, num_tokens: Any, out: Any, arguments: Any, slot: Any,
) -> Any:  # fmt: skip
    literals = kind, num_vectors, num_scales, scale, has_zeros
    loop = InnerLoop.of_literals(*(each.literal_value for each in literals))

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _emit_rows(loop, b, args[len(literals) :])
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 7), emit


def _emit_rows(loop: InnerLoop, b: Any, args: Any) -> None:
    """Emit out[t, row] for all tokens, as many at once as registers hold."""
    first, last, x, num_tokens, out, arguments, slot = args
    a = read_arguments(b, loop, arguments, slot)

    def emit(tile: Tile, start: Any) -> None:
        x_at = b.add(x, b.mul(start, a.x_bytes))
        out_at = b.add(out, b.mul(start, a.out_bytes))
        emit_tiles = emit_words if loop.kind in WORDS else _emit_tiles
        emit_tiles(loop, tile, b, first, last, x_at, out_at, a)

    height, most = largest_tile(loop)
    few = 0 if loop.kind in WORDS else FEW
    blocks = loop.loader.blocks
    for tokens in range(1, few + 1):
        rows = 1
        if blocks is not None and tokens == 1:
            rows = ROWS_OF_BYTES if loop.digit_bits else blocks.rows
        with b.if_then(b.icmp_signed("==", num_tokens, I64(tokens))):
            emit(Tile(rows, tokens), I64(0))
    with b.if_then(b.icmp_signed(">", num_tokens, I64(few))):
        rest = b.urem(num_tokens, I64(most))
        whole = b.sub(num_tokens, rest)
        with cgutils.for_range_slice(b, I64(0), whole, I64(most), intp=I64) as (start, _):
            emit(Tile(height, most), start)
        for tokens in range(1, most):
            with b.if_then(b.icmp_signed("==", rest, I64(tokens))):
                emit(Tile(height, tokens), whole)


def read_arguments(b: Any, loop: InnerLoop, arguments: Any, slot: Any) -> KernelArguments:
    """The arguments at an address, for a weight whose slot begins at another."""
    at = [b.add(arguments, I64(8 * k)) for k in range(NUM_ARGUMENTS)]
    a = KernelArguments(*(b.load(b.inttoptr(address, I64.as_pointer())) for address in at))
    return a._replace(
        weight=b.add(a.weight, slot), scales=b.add(a.scales, slot), zeros=b.add(a.zeros, slot),
        global_scale=_global_scale(b, loop, b.add(a.global_scale, slot)),
    )  # fmt: skip


def _global_scale(b: Any, loop: InnerLoop, at: Any) -> Any:
    """Emit the number that all scales are multiplied by. None: there is none."""
    use = loop.loader.global_scale
    if use is None:
        return None
    number = number_at(b, at, 0, F32)
    return number if use == "multiplies" else b.fdiv(F32(1.0), number)


def _emit_tiles(
    loop: InnerLoop, tile: Tile, b: Any, first: Any, last: Any, x: Any, out: Any,
    a: KernelArguments,
) -> None:  # fmt: skip
    """Emit out[t, row] = the sum over steps of scale x (values x x[t]), for rows [first, last).
    Some of the last rows may be computed more than once.
    """
    height, num_tokens = tile
    last_offset = b.sub(a.row_bytes, I64(loop.num_bytes))
    ahead = larger(b, b.mul(a.row_bytes, I64(height)), I64(PREFETCH_BYTES))
    with cgutils.for_range_slice(b, first, last, I64(height), intp=I64) as (row, _):
        rows = [smaller(b, b.add(row, I64(r)), b.sub(last, I64(1))) for r in range(height)]
        starts = [b.add(a.weight, b.mul(each, a.row_bytes)) for each in rows]
        sums = [
            [cgutils.alloca_once_value(b, FLOATS(None)) for _ in range(num_tokens)] for _ in rows
        ]
        for of_row in sums:
            for total in of_row:
                b.store(FLOATS(None), total)
        with cgutils.for_range(b, a.num_steps, intp=I64) as each:
            offset = smaller(b, b.mul(each.index, I64(loop.num_bytes)), last_offset)
            x_at = b.add(x, b.mul(each.index, I64(loop.num_x * 4 * LANES)))
            x_of = [b.add(x_at, b.mul(a.x_bytes, I64(t))) for t in range(num_tokens)]
            scale_idx = b.lshr(b.mul(each.index, a.inverse), I64(32))
            scale_idx = smaller(b, b.mul(scale_idx, I64(loop.num_scales)), a.last_scale)
            size = height * loop.num_bytes
            at = b.add(b.add(starts[0], ahead), b.mul(each.index, I64(size)))
            for line in range(0, size, 64):
                prefetch(b, b.add(at, I64(line)))
            places = [b.add(at, offset) for at in starts]
            blocks = loop.loader.blocks
            if blocks is not None:
                steps = [blocks.load(b, loop.num_vectors, place) for place in places]
                add = _add_bytes if loop.digit_bits else _add_blocks
                add(b, loop, steps, x_of, sums)
            else:
                values = [loop.loader.load(b, loop.num_vectors, place) for place in places]
                _add_step(b, loop, a, values, x_of, sums, rows, scale_idx)
        for t in range(num_tokens):
            of_rows = [b.load(of_row[t]) for of_row in sums]
            out_at = b.add(b.add(out, b.mul(a.out_bytes, I64(t))), b.mul(row, I64(4)))
            store_sums(b, of_rows, out_at, b.sub(last, row))


def _add_step(
    b: Any, loop: InnerLoop, a: KernelArguments, values: Any, x_of: Any, sums: Any, rows: Any,
    scale_idx: Any,
) -> None:  # fmt: skip
    """Add the products of a step to the sums: one chain of additions for each row and token."""
    is_scaled = loop.scale is not None
    parts = sums
    if is_scaled:
        parts = [[cgutils.alloca_once(b, FLOATS) for _ in x_of] for _ in rows]
        for r, row in enumerate(rows):
            zero = step_zeros(b, loop, a, row, scale_idx)
            for t, x in enumerate(x_of):
                value = FLOATS(None)
                if loop.loader.subtracts_zero:
                    value = load(b, x, 4 * LANES * loop.num_vectors, F32)
                    if zero is not None:
                        value = b.fmul(value, zero)
                b.store(value, parts[r][t])
    for k, of_rows in enumerate(zip(*values, strict=True)):
        for t, x in enumerate(x_of):
            number = load(b, x, 4 * LANES * k, F32)
            for r, value in enumerate(of_rows):
                b.store(fma(b, value, number, b.load(parts[r][t])), parts[r][t])
    if is_scaled:
        for r, row in enumerate(rows):
            scale = step_scales(b, loop, a, row, scale_idx)
            for part, total in zip(parts[r], sums[r], strict=True):
                b.store(fma(b, b.load(part), scale, b.load(total)), total)


def _add_blocks(b: Any, loop: InnerLoop, steps: list[BlockStep], x_of: Any, sums: Any) -> None:
    """Add the products of a step to the sums. They have a chain of their own, so that few additions
    wait for others.
    """
    totals: list[list[Any]] = [[None] * len(x_of) for _ in steps]
    for t, x in enumerate(x_of):
        for r, step in enumerate(steps):
            if step.minima is not None:
                sums_of_x = load(b, x, 4 * LANES * loop.num_vectors, F32)
                totals[r][t] = b.fmul(step.minima, sums_of_x)
    vectors = count()
    for segments in zip(*(step.segments for step in steps), strict=True):
        parts: list[list[Any]] = [[None] * len(x_of) for _ in steps]
        for values in zip(*(segment.values for segment in segments), strict=True):
            offset = 4 * LANES * next(vectors)
            for t, x in enumerate(x_of):
                number = load(b, x, offset, F32)
                for r, value in enumerate(values):
                    parts[r][t] = _product(b, value, number, parts[r][t])
        for r, segment in enumerate(segments):
            for t, part in enumerate(parts[r]):
                totals[r][t] = _product(b, part, segment.scale, totals[r][t])
    for of_row, added in zip(sums, totals, strict=True):
        for total, number in zip(of_row, added, strict=True):
            b.store(b.fadd(b.load(total), number), total)


def _add_bytes(b: Any, loop: InnerLoop, steps: list[BlockStep], x_of: Any, sums: Any) -> None:
    """Add the products of a step with digits of x to the sums; see digits.py."""
    totals: list[list[Any]] = [[None] * len(x_of) for _ in steps]
    vectors = 0
    for segments in zip(*(step.segments for step in steps), strict=True):
        for t, x in enumerate(x_of):
            for r, segment in enumerate(segments):
                assert segment.words, loop
                part = product_of_words(b, segment.words, x, vectors, loop.digit_bits)
                totals[r][t] = _product(b, part, segment.scale, totals[r][t])
        vectors += NUM_DIGITS * len(segments[0].words)
    for t, x in enumerate(x_of):
        unit = load(b, x, 4 * LANES * vectors, F32)
        for r, step in enumerate(steps):
            total = fma(b, totals[r][t], unit, b.load(sums[r][t]))
            if step.minima is not None:
                sums_of_x = load(b, x, 4 * LANES * (vectors + 1), F32)
                total = fma(b, step.minima, sums_of_x, total)
            b.store(total, sums[r][t])


def _product(b: Any, one: Any, other: Any, addend: Any) -> Any:
    return b.fmul(one, other) if addend is None else fma(b, one, other, addend)


def step_scales(b: Any, loop: InnerLoop, a: KernelArguments, row: Any, scale_idx: Any) -> Any:
    """The scales of a step, each repeated over the lanes that it is for."""
    at = b.add(a.scales, b.mul(b.udiv(row, a.block_rows), a.scales_bytes))
    assert loop.scale is not None, loop
    at = b.add(at, b.mul(scale_idx, I64(loop.scale_bytes)))
    stored = load(b, at, 0, STORED[loop.scale_bytes], loop.num_scales)
    scales = scales_of(b, loop.scale, stored)
    if a.global_scale is not None:
        scales = b.fmul(scales, repeated(b, a.global_scale, loop.num_scales))
    return spread(b, scales)


def step_zeros(b: Any, loop: InnerLoop, a: KernelArguments, row: Any, scale_idx: Any) -> Any:
    """The zeros of a step in one vector: in word [row / 8, group], nibble row % 8. None: they are
    not stored.
    """
    if not loop.has_zeros:
        return None
    num_groups = b.add(a.last_scale, I64(loop.num_scales))
    word = b.add(b.mul(b.lshr(row, I64(3)), num_groups), scale_idx)
    words = load(b, b.add(a.zeros, b.mul(word, I64(4))), 0, I32, loop.num_scales)
    shift = b.trunc(b.mul(b.and_(row, I64(7)), I64(4)), I32)
    nibbles = b.and_(b.lshr(spread(b, words), repeated(b, shift)), all_lanes(I32, 15))
    return b.sitofp(nibbles, FLOATS)
