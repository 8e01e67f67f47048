"""The inner loop of packed_cpu.py's word formats, as vector instructions.

    for each block of rows    for each group    for each row of words    values x x, onto sums

gptq: a word is 8 columns of a row, lanes are rows. awq: a word is 8 rows of a column, lanes are
words, and a nibble's place tells the row. Either way neighbouring words are other rows, so that a
block is a stretch of a line of words; the next stretch is prefetched meanwhile.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    NIBBLES,
    all_lanes,
    fma,
    load,
    nibbles_of,
    prefetch,
    repeated,
    smaller,
    spread,
    vector_of,
)  # fmt: skip

BLOCK_ROWS = {"gptq": 4 * LANES, "awq": NIBBLES * LANES}  # computed at once
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles


class Fixed(NamedTuple):
    """What a kernel is told beside its rows, x and out: integers; in its code, LLVM's values.
    Without a unit, an address.
    """

    words: Any
    scales: Any  # float32 [G, R]
    zeros: Any
    sums: Any  # of x, float32 [T, G]
    line_bytes: Any  # of words
    num_rows: Any
    num_groups: Any
    num_lines: Any  # of a group
    x_bytes: Any  # of a token
    out_bytes: Any  # of a token


@cache
def word_kernel(kind: str, num_tokens: int) -> Any:
    """Machine code for rows [first, last); x, out and sums are addresses, x divided by 16 ** k for
    gptq. Gives awq's rows in the order [8, R / 8].
    """
    fixed = types.NamedUniTuple(types.int64, len(Fixed._fields), Fixed)
    signature = types.void(types.int64, types.int64, types.int64, types.int64, fixed)

    @intrinsic  # type: ignore[untyped-decorator]
    def words(_: Any, first: Any, last: Any, x: Any, out: Any, fixed: Any) -> Any:
        return signature, partial(_emit_words, kind, num_tokens)

    @njit(signature, nogil=True)  # type: ignore[untyped-decorator]
    def kernel(first: int, last: int, x: int, out: int, fixed: Fixed) -> None:
        words(first, last, x, out, fixed)

    return kernel


def _emit_words(kind: str, num_tokens: int, context: Any, b: Any, _: Any, args: Any) -> Any:
    """out[t, rows] = the sum over groups of scale x (nibbles x x[t] - zero x sum of x[t])."""
    (first, last, x, out), a = args[:4], Fixed(*cgutils.unpack_tuple(b, args[4]))
    block_rows = BLOCK_ROWS[kind]
    last_start = b.sub(a.num_rows, I64(block_rows))
    count = num_tokens * block_rows // LANES
    totals = [cgutils.alloca_once(b, FLOATS) for _ in range(count)]
    parts = [cgutils.alloca_once(b, FLOATS) for _ in range(count)]
    with cgutils.for_range_slice(b, first, last, I64(block_rows), intp=I64) as (row, _):
        row = smaller(b, row, last_start)
        _clear(b, totals)
        with cgutils.for_range(b, a.num_groups, intp=I64) as groups:
            _clear(b, parts)
            with cgutils.for_range(b, a.num_lines, intp=I64) as lines:
                line = b.add(b.mul(groups.index, a.num_lines), lines.index)
                _add_line(b, kind, num_tokens, a, x, row, line, parts)
            scales = _scales(b, kind, a, row, groups.index)
            zeros = _zeros(b, kind, a, row, groups.index)
            for i, (total, part) in enumerate(zip(totals, parts, strict=True)):
                t, n = divmod(i, len(scales))
                sum_idx = b.add(b.mul(a.num_groups, I64(t)), groups.index)
                lacks = fma(b, zeros[n], _number(b, a.sums, sum_idx), FLOATS(None))
                value = b.fsub(b.load(part), lacks)
                b.store(fma(b, value, scales[n], b.load(total)), total)
        for i, total in enumerate(totals):
            t, n = divmod(i, block_rows // LANES)
            at = b.add(out, b.mul(a.out_bytes, I64(t)))
            if kind == "gptq":
                at = b.add(at, b.mul(b.add(row, I64(LANES * n)), I64(4)))
            else:
                at = b.add(at, b.lshr(b.add(row, b.mul(a.num_rows, I64(n))), I64(1)))
            b.store(b.load(total), b.inttoptr(at, FLOATS.as_pointer()), align=1)
    return context.get_dummy_value()


def _clear(b: Any, totals: list[Any]) -> None:
    for total in totals:
        b.store(FLOATS(None), total)


def _add_line(
    b: Any, kind: str, num_tokens: int, a: Fixed, x: Any, row: Any, line: Any, parts: list[Any]
) -> None:
    """The products of a stretch of a line of words: 8 columns of gptq, a column of awq."""
    offset = b.mul(row, I64(4)) if kind == "gptq" else b.lshr(row, I64(1))
    at = b.add(b.add(a.words, b.mul(line, a.line_bytes)), offset)
    num_vectors = BLOCK_ROWS[kind] // LANES if kind == "gptq" else 1
    of_token = len(parts) // num_tokens
    for v in range(num_vectors):
        prefetch(b, b.add(at, I64(4 * LANES * (num_vectors + v))))
        nibbles = nibbles_of(b, load(b, at, 4 * LANES * v, I32))
        for t in range(num_tokens):
            x_at = b.add(x, b.mul(a.x_bytes, I64(t)))
            for k, nibble in enumerate(nibbles):
                if kind == "gptq":
                    part = parts[t * of_token + v]
                    number = _number(b, x_at, b.add(b.mul(line, I64(NIBBLES)), I64(k)))
                else:
                    part, number = parts[t * of_token + k], _number(b, x_at, line)
                b.store(fma(b, nibble, number, b.load(part)), part)


def _scales(b: Any, kind: str, a: Fixed, row: Any, group: Any) -> list[Any]:
    """By vector of sums; those of awq have what masking left too large."""
    at = b.add(a.scales, b.mul(b.add(b.mul(group, a.num_rows), row), I64(4)))
    if kind == "gptq":
        return [load(b, at, 4 * LANES * v, F32) for v in range(BLOCK_ROWS[kind] // LANES)]
    every = load(b, at, 0, F32, BLOCK_ROWS[kind])
    picks = [[NIBBLES * lane + row for lane in range(LANES)] for row in AWQ_ROWS]
    picked = [b.shuffle_vector(every, every, ir.Constant(vector_of(I32), p)) for p in picks]
    units = [*(16.0**-k for k in range(NIBBLES - 1)), 1.0]
    return [b.fmul(v, all_lanes(F32, unit)) for v, unit in zip(picked, units, strict=True)]


def _zeros(b: Any, kind: str, a: Fixed, row: Any, group: Any) -> list[Any]:
    """By vector of sums, as large as these."""
    at = b.add(b.mul(group, a.num_rows), row)
    at = b.add(a.zeros, b.lshr(at, I64(1)))  # 8 rows are 4 bytes
    if kind == "gptq":
        shifts = ir.Constant(vector_of(I32), [4 * (lane % NIBBLES) for lane in range(LANES)])
        pairs = [load(b, at, 8 * v, I32, 2) for v in range(BLOCK_ROWS[kind] // LANES)]
        nibbles = [b.and_(b.lshr(spread(b, pair), shifts), all_lanes(I32, 15)) for pair in pairs]
        return [b.sitofp(v, FLOATS) for v in nibbles]
    return nibbles_of(b, load(b, at, 0, I32))


def _number(b: Any, at: Any, index: Any) -> Any:
    """One of x, in every lane."""
    pointer = b.inttoptr(b.add(at, b.mul(index, I64(4))), F32.as_pointer())
    return repeated(b, b.load(pointer, align=4))
