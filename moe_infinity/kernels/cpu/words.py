"""The inner loop over weights stored column by column, WORDS, as vector instructions.

    for each block of rows    for each group    for each line of words    values x x, onto sums

gptq: a word is 8 columns of a row, lanes are rows. awq: a word is 8 rows of a column, lanes are
words, and a nibble's place in the word gives its row. In both, neighbouring words belong to other
rows. So a block is a run of words in a line, and the run after it is prefetched meanwhile.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from moe_infinity.kernels.cpu.steps import NIBBLE_UNITS, InnerLoop, KernelArguments, Tile
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
    from_exponent,
    from_float8,
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
from moe_infinity.layout import FLOAT8, NIBBLES

BLOCK_ROWS = {"gptq": 4 * LANES, "gptq_v2": 4 * LANES, "awq": NIBBLES * LANES}  # at once
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles
STORED = {4: F32, 2: I16, 1: I8}  # scales, by their bytes


def emit_words(
    loop: InnerLoop, tile: Tile, b: Any, first: Any, last: Any, x: Any, out: Any,
    a: KernelArguments,
) -> None:  # fmt: skip
    """Emit out[t, rows] = the sum over groups of scale x (nibbles x x[t] - zero x sum of x[t]). The
    last block may begin before `first`; it computes the same numbers again for those rows.
    """
    block_rows = BLOCK_ROWS[loop.kind]
    per_line = 1 if loop.kind == "awq" else NIBBLES
    num_rows = b.udiv(a.scales_bytes, I64(loop.scale_bytes))
    num_lines = I64(loop.num_columns // per_line)
    count = block_rows // LANES
    totals, parts = (
        [[cgutils.alloca_once(b, FLOATS) for _ in range(count)] for _ in range(tile.num_tokens)]
        for _ in range(2)
    )
    with cgutils.for_range_slice(b, first, last, I64(block_rows), intp=I64) as (row, _):
        row = smaller(b, row, b.sub(num_rows, I64(block_rows)))
        _clear(b, totals)
        with cgutils.for_range(b, a.num_steps, intp=I64) as groups:
            _clear(b, parts)
            x_at = b.add(x, b.mul(groups.index, I64(loop.num_x * LANES * 4)))
            with cgutils.for_range(b, num_lines, intp=I64) as lines:
                line = b.add(b.mul(groups.index, num_lines), lines.index)
                numbers = b.add(x_at, b.mul(lines.index, I64(4 * per_line)))
                _add_line(b, loop.kind, a, numbers, row, line, parts)
            first_scale = b.add(b.mul(groups.index, num_rows), row)
            scales = _scales(b, loop, a, first_scale)
            zeros = _zeros(b, loop.kind, a, first_scale)
            for total_of, part_of in zip(totals, parts, strict=True):
                minus_sum = repeated(b, sum_of_lanes(b, load(b, x_at, 4 * loop.num_columns, F32)))
                for total, part, scale, zero in zip(total_of, part_of, scales, zeros, strict=True):
                    value = fma(b, zero, minus_sum, b.load(part))
                    b.store(fma(b, value, scale, b.load(total)), total)
                x_at = b.add(x_at, a.x_bytes)
        for total_of in totals:
            _store(b, loop.kind, [b.load(total) for total in total_of], row, out)
            out = b.add(out, a.out_bytes)


def _clear(b: Any, sums: list[list[Any]]) -> None:
    for total in (each for of_token in sums for each in of_token):
        b.store(FLOATS(None), total)


def _add_line(
    b: Any, kind: str, a: KernelArguments, x: Any, row: Any, line: Any, parts: list[list[Any]]
) -> None:
    """Add the products of one run of words: 8 columns of gptq, one column of awq."""
    offset = b.lshr(row, I64(1)) if kind == "awq" else b.mul(row, I64(4))
    at = b.add(b.add(a.weight, b.mul(line, a.row_bytes)), offset)
    num_vectors = 1 if kind == "awq" else BLOCK_ROWS[kind] // LANES
    for v in range(num_vectors):
        prefetch(b, b.add(at, I64(4 * LANES * (num_vectors + v))))
        nibbles = [*nibbles_of(b, load(b, at, 4 * LANES * v, I32))]
        x_at = x
        for of_token in parts:
            for k, nibble in enumerate(nibbles):
                part = of_token[k if kind == "awq" else v]
                number = _number(b, x_at, 0 if kind == "awq" else k)
                b.store(fma(b, nibble, number, b.load(part)), part)
            x_at = b.add(x_at, a.x_bytes)


def _number(b: Any, at: Any, index: int) -> Any:
    """One value of x, in every lane."""
    pointer = b.inttoptr(b.add(at, I64(4 * index)), F32.as_pointer())
    return repeated(b, b.load(pointer, align=4))


def _scales(b: Any, loop: InnerLoop, a: KernelArguments, first: Any) -> list[Any]:
    """The scales of each vector of sums. Those of awq undo the factors that masking without shifts
    leaves.
    """
    assert loop.scale is not None, loop
    size = loop.scale_bytes
    at = b.add(a.scales, b.mul(first, I64(size)))
    if loop.kind != "awq":
        vectors = range(BLOCK_ROWS[loop.kind] // LANES)
        loaded = [load(b, at, size * LANES * v, STORED[size]) for v in vectors]
        return [scales_of(b, loop.scale, vector) for vector in loaded]
    every = load(b, at, 0, STORED[size], BLOCK_ROWS[loop.kind])
    picks = [[NIBBLES * lane + row for lane in range(LANES)] for row in AWQ_ROWS]
    picked = [b.shuffle_vector(every, every, ir.Constant(vector_of(I32), p)) for p in picks]
    units = [all_lanes(F32, float(unit)) for unit in NIBBLE_UNITS]
    return [
        b.fmul(scales_of(b, loop.scale, v), unit) for v, unit in zip(picked, units, strict=True)
    ]


def scales_of(b: Any, dtype: str, stored: Any) -> Any:
    """The scales in float32."""
    if dtype == "float32":
        return stored
    if dtype == "float16":
        return from_half(b, stored)
    if dtype == FLOAT8:
        return from_float8(b, stored)
    return from_bfloat(b, stored) if dtype == "bfloat16" else from_exponent(b, stored)


def _zeros(b: Any, kind: str, a: KernelArguments, first: Any) -> list[Any]:
    """The zeros of each vector of sums; those of awq have the same factors as the sums."""
    at = b.add(a.zeros, b.lshr(first, I64(1)))  # 8 rows are 4 bytes
    if kind == "awq":
        return [*nibbles_of(b, load(b, at, 0, I32))]
    shifts = ir.Constant(vector_of(I32), [4 * (lane % NIBBLES) for lane in range(LANES)])
    vectors = []
    for v in range(BLOCK_ROWS[kind] // LANES):
        pair = load(b, at, 8 * v, I32, 2)
        if kind == "gptq":  # stored less one
            pair = b.add(pair, all_lanes(I32, 0x11111111, 2))
        nibbles = b.and_(b.lshr(spread(b, pair), shifts), all_lanes(I32, 15))
        vectors.append(b.sitofp(nibbles, FLOATS))
    return vectors


def _store(b: Any, kind: str, vectors: list[Any], row: Any, out: Any) -> None:
    at = b.add(out, b.mul(row, I64(4)))
    for k, vector in enumerate(vectors):
        if kind != "awq":
            place = b.add(at, I64(4 * LANES * k))
            b.store(vector, b.inttoptr(place, FLOATS.as_pointer()), align=1)
            continue
        for lane in range(LANES):
            place = b.add(at, I64(4 * (NIBBLES * lane + AWQ_ROWS[k])))
            b.store(b.extract_element(vector, I32(lane)), b.inttoptr(place, F32.as_pointer()))
