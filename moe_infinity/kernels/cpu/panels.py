"""Products of many rows of x with a packed weight, as machine code. rows.py decodes a weight once
for each tile of tokens, which pays while reading it takes longer. Here it is decoded once for all
tokens:

    for each panel of a weight, which fits into the first cache
        decode it, in the order of decoding                 widen.py
        for each tile of rows and tokens                    panel x x, onto 24 vectors of sums

Panels are float32 or, with `is_half`, bfloat16, as x is then; sums are float32 in any case.

The bits of an output depend on nothing but its row of the weight and its token. They differ from
those of rows.py: a value is scaled before it is multiplied, not after.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.compiler import c_function, has_avx512, multiplies_bfloat16
from moe_infinity.kernels.cpu.rows import read_arguments
from moe_infinity.kernels.cpu.steps import InnerLoop, KernelArguments, Tile
from moe_infinity.kernels.cpu.vectors import (
    F32,
    I32,
    I64,
    LANES,
    add_sums,
    dot,
    fma,
    load,
    prefetch,
    smaller,
    store,
    to_bfloats,
    vector_of,
)
from moe_infinity.kernels.cpu.widen import decoded
from moe_infinity.layout import WORDS

PANEL_ROWS = 16
PANEL_ROW_BYTES = 4096  # the longer, the fewer sums over lanes
SPARE_BYTES = 64  # behind a row, so that rows start in different lines
LINE_BYTES = 64  # of a vector of numbers, or of two of halves
MOST_TOKENS = 96  # whose x stays in the second cache while a row of panels is multiplied


def reads_panels(loop: InnerLoop, *, is_half: bool) -> bool:
    """True if rows can be cut into panels."""
    if is_half and (loop.num_vectors % 2 or not multiplies_bfloat16()):
        return False
    return loop.kind not in WORDS


def panel_tile() -> Tile:
    """The tile whose sums fit in registers, beside a value of a row and one of each token: 24 of 32
    registers with AVX-512, 12 of 16 without.
    """
    return Tile(4, 6) if has_avx512() else Tile(4, 3)


def panel_lanes() -> int:
    """The lanes of a register."""
    return LANES if has_avx512() else LANES // 2


@cache
def panel_function(loop: InnerLoop, *, is_half: bool) -> Any:
    """A C function as `rows.row_function` is one, for x arranged by `panel_arrangement`."""
    kind = loop.kind  # constants of the compiled code
    num_vectors = loop.num_vectors
    num_scales = loop.num_scales
    scale = loop.scale or ""
    has_zeros = int(loop.has_zeros)
    half = int(is_half)

    name = ("half_panels_" if is_half else "panels_") + "_".join(map(str, loop))
    is_kept = loop.loader.load.__module__.startswith("moe_infinity.")

    @c_function(types.void(*[types.int64] * 7), name, is_kept=is_kept)
    def function(
        first: int, last: int, x: int, num_tokens: int, out: int, arguments: int, slot: int
    ) -> None:
        _panels(kind, num_vectors, num_scales, scale, has_zeros, half,
                first, last, x, num_tokens, out, arguments, slot)  # fmt: skip

    return function


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _panels(
    _: Any, kind: Any, num_vectors: Any, num_scales: Any, scale: Any, has_zeros: Any, half: Any,
    first: Any, last: Any, x: Any, num_tokens: Any, out: Any, arguments: Any, slot: Any,
) -> Any:  # fmt: skip
    literals = kind, num_vectors, num_scales, scale, has_zeros, half
    loop = InnerLoop.of_literals(*(each.literal_value for each in literals[:-1]))

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _emit_panels(loop, b, args[len(literals) :], 2 if half.literal_value else 4)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 7), emit


def _emit_panels(loop: InnerLoop, b: Any, args: Any, size: int) -> None:
    """Emit out[t, row] for all tokens, panel by panel of numbers of `size` bytes."""
    first, last, x, num_tokens, out, arguments, slot = args
    a = read_arguments(b, loop, arguments, slot)
    with b.goto_entry_block():  # `alloca_once` would fill it with zeros
        memory = b.alloca(
            ir.ArrayType(ir.IntType(8), PANEL_ROWS * (PANEL_ROW_BYTES + SPARE_BYTES) + 64)
        )
    panel = b.and_(b.add(b.ptrtoint(memory, I64), I64(63)), I64(-64))
    steps = I64(PANEL_ROW_BYTES // (size * loop.num_columns))
    with cgutils.for_range_slice(b, I64(0), num_tokens, I64(MOST_TOKENS), intp=I64) as (token, _):
        tokens = smaller(b, I64(MOST_TOKENS), b.sub(num_tokens, token))
        x_at = b.add(x, b.mul(token, a.x_bytes))
        out_at = b.add(out, b.mul(token, a.out_bytes))
        with cgutils.for_range_slice(b, first, last, I64(PANEL_ROWS), intp=I64) as (row, _):
            rows = smaller(b, I64(PANEL_ROWS), b.sub(last, row))
            to = b.add(out_at, b.mul(row, I64(4)))
            with cgutils.for_range_slice(b, I64(0), a.num_steps, steps, intp=I64) as (step, _):
                count = smaller(b, steps, b.sub(a.num_steps, step))
                _emit_decoding(loop, b, a, row, rows, step, count, panel, size)
                columns = b.mul(step, I64(size * loop.num_columns))
                lines = b.mul(count, I64(size * loop.num_columns // LINE_BYTES))
                is_first = b.icmp_signed("==", step, I64(0))
                _emit_products(
                    b, a, panel, rows, b.add(x_at, columns), tokens, lines, to, is_first, size
                )


def _emit_decoding(
    loop: InnerLoop, b: Any, a: KernelArguments, row: Any, rows: Any, step: Any, count: Any,
    panel: Any, size: int,
) -> None:  # fmt: skip
    """Emit the decoding of `count` steps of `rows` rows into a panel. The same steps of the panel
    below are prefetched meanwhile: a weight that lies in no cache is multiplied by 8 tokens in 0.7
    of the time.
    """
    below = b.add(a.weight, b.mul(a.row_bytes, I64(PANEL_ROWS)))
    with cgutils.for_range(b, rows, intp=I64) as each_row:
        to = b.add(panel, b.mul(each_row.index, I64(PANEL_ROW_BYTES + SPARE_BYTES)))
        with cgutils.for_range(b, count, intp=I64) as each:
            at = b.add(to, b.mul(each.index, I64(size * loop.num_columns)))
            of_row = b.add(row, each_row.index)
            of_step = b.add(step, each.index)
            offset = b.add(b.mul(of_row, a.row_bytes), b.mul(of_step, I64(loop.num_bytes)))
            for line in range(0, loop.num_bytes, 64):
                prefetch(b, b.add(below, b.add(offset, I64(line))))
            values = iter(decoded(b, loop, a, of_row, of_step))
            if size == 2:
                pairs = zip(values, values, strict=True)  # one iterator: of neighbours
                values = (to_bfloats(b, low, high) for low, high in pairs)
            for k, value in enumerate(values):
                store(b, value, b.add(at, I64(LINE_BYTES * k)))


def _emit_products(
    b: Any, a: KernelArguments, panel: Any, rows: Any, x: Any, num_tokens: Any, lines: Any,
    out: Any, is_first: Any, size: int,
) -> None:  # fmt: skip
    """Emit the products of a panel with the same columns of x, in tiles."""
    most = panel_tile().num_tokens
    rest = b.urem(num_tokens, I64(most))
    whole = b.sub(num_tokens, rest)

    def emit(tokens: int, start: Any) -> None:
        x_at = b.add(x, b.mul(start, a.x_bytes))
        x_of = [b.add(x_at, b.mul(a.x_bytes, I64(t))) for t in range(tokens)]
        out_at = b.add(out, b.mul(start, a.out_bytes))
        out_of = [b.add(out_at, b.mul(a.out_bytes, I64(t))) for t in range(tokens)]
        _emit_tiles(b, panel, rows, x_of, lines, out_of, is_first, size)

    with cgutils.for_range_slice(b, I64(0), whole, I64(most), intp=I64) as (start, _):
        emit(most, start)
    for tokens in range(1, most):
        with b.if_then(b.icmp_signed("==", rest, I64(tokens))):
            emit(tokens, whole)


def _emit_tiles(
    b: Any, panel: Any, rows: Any, x_of: list[Any], lines: Any, out_of: list[Any], is_first: Any,
    size: int,
) -> None:  # fmt: skip
    """Emit the products of all rows of a panel with the tokens of a tile."""
    height = panel_tile().num_rows
    lanes = panel_lanes()
    sums_of = vector_of(F32, lanes)
    with cgutils.for_range_slice(b, I64(0), rows, I64(height), intp=I64) as (row, _):
        left = b.sub(rows, row)
        last = b.sub(rows, I64(1))
        starts = [
            b.add(
                panel,
                b.mul(smaller(b, b.add(row, I64(r)), last), I64(PANEL_ROW_BYTES + SPARE_BYTES)),
            )
            for r in range(height)
        ]
        sums = [[cgutils.alloca_once(b, sums_of) for _ in starts] for _ in x_of]
        for of_token in sums:
            for total in of_token:
                b.store(sums_of(None), total)
        kind, add = (I32, dot) if size == 2 else (F32, fma)
        with cgutils.for_range(b, lines, intp=I64) as each:
            offset = b.mul(each.index, I64(LINE_BYTES))
            for lane in range(0, LANES, lanes):
                numbers = [load(b, b.add(x, offset), 4 * lane, kind, lanes) for x in x_of]
                for start, of_row in zip(starts, zip(*sums, strict=True), strict=True):
                    value = load(b, b.add(start, offset), 4 * lane, kind, lanes)
                    for number, total in zip(numbers, of_row, strict=True):
                        b.store(add(b, value, number, b.load(total)), total)
        for out, of_token in zip(out_of, sums, strict=True):
            totals = [b.load(total) for total in of_token]
            add_sums(b, totals, b.add(out, b.mul(row, I64(4))), left, is_first)
