"""How blocks of GGML's types IQ1 to IQ3 are decoded. A block has 256 weights: numbers of entries in
a table of 8 or 4 neighbouring weights each, signs, and scales of 32 or 16 weights.

    weight = scale x entry x sign                          IQ2, IQ3
    weight = scale x (entry, which is -1, 0 or 1, +- 1/8)  IQ1

Weights become bytes if the processor multiplies these, and float32 otherwise; entries.py has both
forms of the tables. Bytes have no signs: to each weight the same number is added, and its product
with the sums of x is subtracted, as that of a minimum is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from moe_infinity.kernels.cpu.block_kind import (
    LAST_SHIFTED,
    MASKED,
    BlockKind,
    BlockStep,
    Segment,
    segment_of,
)
from moe_infinity.kernels.cpu.compiler import multiplies_bytes
from moe_infinity.kernels.cpu.entries import (
    Entries,
    bytes_of_entries,
    grid,
    numbers_of_entries,
    on_stack,
)
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    LANES,
    all_lanes,
    joined,
    load,
    number_at,
    pick,
    repeated,
    spread,
    vector_of,
)

NUM_WEIGHTS = 256  # of a block
EIGHT = 8  # neighbouring weights, which have a byte of signs
NUM_EIGHTS = 32
TOGETHER = 128  # weights whose bytes are two vectors of words
Load = Callable[[Any, int, Any], BlockStep]


def _step(
    b: Any, name: str, numbers: Any, scales: Any, signs: Any = None, minima: Any = None
) -> BlockStep:
    """Decode a block: the numbers of its entries in the table of that name, scales of equally many
    weights each, and 8 words of a sign for each weight.
    """
    table = _table(name)
    added = ADDED[name]
    if not multiplies_bytes():
        entries = numbers_of_entries(b, name, table, numbers)
        return BlockStep(_segments(b, entries, scales, signs), _all(b, minima))
    entries = bytes_of_entries(b, name, table + added, numbers)
    segments = _segments_of_bytes(b, entries, added, scales, signs)
    return BlockStep(segments, _all(b, scales if minima is None else minima))


def _all(b: Any, minima: Any) -> Any:
    """Minima in all lanes, over and over."""
    if minima is None:
        return None
    return pick(b, minima, [lane % minima.type.count for lane in range(LANES)])


def _table(name: str) -> NDArray[np.int64]:
    """[entries, weights]. In IQ1_M each entry has a bit that says which eighth is added: that is
    half of the table.
    """
    if name != "IQ1_M":
        return grid(name)
    eighths = 8 * grid(name)
    return np.vstack([eighths + 1, eighths - 1])


def _segments(b: Any, entries: Entries, scales: Any, signs: Any) -> Iterator[Segment]:
    """Weights as float32. Half of the lanes are for one scale and half for the next: so sums are
    scaled half as often.
    """
    per_scale = NUM_EIGHTS // scales.type.count
    scales_at = on_stack(b, scales)
    signs_at = None if signs is None else on_stack(b, signs)

    def values(starts: list[int]) -> Iterator[Any]:
        bits = None if signs_at is None else _signs_of_two(b, signs_at, *starts)
        for k in range(per_scale):
            value = joined(b, [entries.eight(b, start + k) for start in starts])
            if bits is not None:
                value = b.bitcast(b.xor(b.bitcast(value, vector_of(I32)), next(bits)), FLOATS)
            yield value

    for first in range(0, scales.type.count, 2):
        pair = [number_at(b, scales_at, 4 * number, F32) for number in (first, first + 1)]
        scale = joined(b, [repeated(b, number, EIGHT) for number in pair])
        yield Segment(scale, values([per_scale * first, per_scale * (first + 1)]))


def _signs_of_two(b: Any, signs_at: Any, first: int, second: int) -> Iterator[Any]:
    """Yield the signs, in the uppermost bits, of the weights from 8 x `first` and 8 x `second` on,
    each in half of the lanes; then of the weights that follow them, 8 at a time.
    """
    places = [4 * (index // 4) for index in (first, second)]
    words = joined(b, [repeated(b, number_at(b, signs_at, at, I32), EIGHT) for at in places])
    while True:
        starts = [EIGHT * (index % 4) for index in (first, second)]
        shifts = [31 - bit for start in starts for bit in range(start, start + EIGHT)]
        yield b.and_(b.shl(words, ir.Constant(words.type, shifts)), all_lanes(I32, 1 << 31))
        first += 1
        second += 1


def _segments_of_bytes(
    b: Any, entries: Any, added: int, scales: Any, signs: Any
) -> Iterator[Segment]:
    """Weights as bytes of words. Half of those of each scale are in the first of two vectors."""
    length = NUM_WEIGHTS // scales.type.count // 2
    bits = None if signs is None else _by_halves(b, signs, length)

    def words(first: int, half: int) -> Any:
        runs = range(first + half * length, first + TOGETHER, 2 * length)
        firsts = (start for run in runs for start in range(run, run + length, entries.width))
        weights = entries.bytes_of(b, [start // entries.width for start in firsts])
        if bits is not None:
            of_these = number_at(b, bits[half], first // 16, I64)
            is_negative = b.bitcast(of_these, vector_of(ir.IntType(1), 64))
            negated = b.sub(all_lanes(I8, 2 * added, 64), weights)
            weights = b.select(is_negative, negated, weights)
        return b.bitcast(weights, vector_of(I32))

    for first in range(0, NUM_WEIGHTS, TOGETHER):
        numbers = range(first // (2 * length), (first + TOGETHER) // (2 * length))
        scale = spread(b, pick(b, scales, numbers))
        yield segment_of(b, scale, words(first, 0), words(first, 1), is_wide=_is_wide(added))


def _by_halves(b: Any, signs: Any, length: int) -> list[Any]:
    """The addresses of the signs of every second run of this length, and of the other runs."""
    runs = b.bitcast(signs, vector_of(ir.IntType(length), NUM_WEIGHTS // length))
    return [on_stack(b, pick(b, runs, range(half, runs.type.count, 2))) for half in range(2)]


def _numbers(b: Any, low: Any, high: Any = None, num_bits: int = 0) -> Any:
    """The numbers of entries, of which these are the lower 8 bits. A number of `high` has
    `num_bits` more of several, the first in its lowest bits.
    """
    count = low.type.count
    numbers = b.zext(low, vector_of(I16, count))
    if high is None:
        return numbers
    each = count // high.type.count
    repeats = pick(b, high, [entry // each for entry in range(count)])
    if repeats.type != numbers.type:
        repeats = b.zext(repeats, numbers.type)
    shifts = [8 - num_bits * (entry % each) for entry in range(count)]
    left, right = ([max(sign * shift, 0) for shift in shifts] for sign in (1, -1))
    bits = b.shl(repeats, ir.Constant(numbers.type, left))
    bits = b.lshr(bits, ir.Constant(numbers.type, right))
    mask = (1 << num_bits) - 1 << 8
    return b.or_(numbers, b.and_(bits, all_lanes(I16, mask, count)))


def _scales(b: Any, numbers: Any, factor: Any) -> Any:
    """Twice the numbers and one, times a float16."""
    lanes = numbers.type.count
    odd = b.or_(b.shl(numbers, all_lanes(I32, 1, lanes)), all_lanes(I32, 1, lanes))
    return b.fmul(b.sitofp(odd, vector_of(F32, lanes)), repeated(b, b.fpext(factor, F32), lanes))


def _half(b: Any, at: Any, offset: int) -> Any:
    return number_at(b, at, offset, ir.HalfType())


def _nibbles(b: Any, at: Any, offset: int, count: int) -> Any:
    """Load numbers of 4 bits, the first of two in the lower bits of a byte."""
    stored = b.zext(load(b, at, offset, I8, count // 2), vector_of(I32, count // 2))
    both = pick(b, stored, [number // 2 for number in range(count)])
    both = b.lshr(both, ir.Constant(both.type, [4 * (number % 2) for number in range(count)]))
    return b.and_(both, all_lanes(I32, 15, count))


def _signs_of_words(b: Any, words: Any) -> Any:
    """The signs of which a word has four times 7, in its lower bits."""
    sevens = vector_of(I32, 8)(None)
    for k in range(4):
        bits = b.and_(words, all_lanes(I32, 0x7F << 7 * k, 8))
        sevens = b.or_(sevens, b.shl(bits, all_lanes(I32, k, 8)))
    return _signs_of_bytes(b, sevens)


def _signs_of_bytes(b: Any, sevens: Any) -> Any:
    """The signs of which a byte has 7; with an eighth their number is even."""
    words = folded = b.bitcast(sevens, vector_of(I32, 8))
    for shift in (4, 2, 1):
        folded = b.xor(folded, b.lshr(folded, all_lanes(I32, shift, 8)))
    odd = b.shl(b.and_(folded, all_lanes(I32, 0x01010101, 8)), all_lanes(I32, 7, 8))
    return b.or_(words, odd)


def _iq1_s(b: Any, num_vectors: int, at: Any) -> BlockStep:
    """A bit says which eighth is added, which is a minimum, too."""
    high = load(b, at, 34, I16, 8)
    wide = b.zext(high, vector_of(I32, 8))
    numbers = b.and_(b.lshr(wide, all_lanes(I32, 12, 8)), all_lanes(I32, 7, 8))
    scales = _scales(b, numbers, _half(b, at, 0))
    bits = b.lshr(wide, all_lanes(I32, 15, 8))
    added = ADDED["IQ1_S"] if multiplies_bytes() else 0
    eighths = b.add(b.shl(bits, all_lanes(I32, 1, 8)), all_lanes(I32, 8 * added - 1, 8))
    minima = b.fmul(scales, b.sitofp(eighths, scales.type))
    numbers = _numbers(b, load(b, at, 2, I8, 32), high, 3)
    return _step(b, "IQ1_S", numbers, scales, minima=minima)


def _iq1_m(b: Any, num_vectors: int, at: Any) -> BlockStep:
    factor = I16(0)
    for k in range(4):
        top = b.and_(number_at(b, at, 48 + 2 * k, I16), I16(15 << 12))
        factor = b.or_(factor, b.lshr(top, I16(12 - 4 * k)))
    stored = b.zext(load(b, at, 48, I16, 4), vector_of(I32, 4))
    numbers = pick(b, stored, [number // 4 for number in range(16)])
    shifts = [3 * (number % 4) for number in range(16)]
    numbers = b.and_(b.lshr(numbers, ir.Constant(numbers.type, shifts)), all_lanes(I32, 7))
    scales = _scales(b, numbers, b.bitcast(factor, ir.HalfType()))
    numbers = _numbers(b, load(b, at, 0, I8, 32), load(b, at, 32, I8), 4)
    return _step(b, "IQ1_M", numbers, scales)


def _iq2_xxs(b: Any, num_vectors: int, at: Any) -> BlockStep:
    pairs = load(b, at, 2, I32)
    low = b.bitcast(pick(b, pairs, range(0, 16, 2)), vector_of(I8, 32))
    words = pick(b, pairs, range(1, 16, 2))
    scales = _scales(b, b.lshr(words, all_lanes(I32, 28, 8)), _half(b, at, 0))
    return _step(b, "IQ2_XXS", _numbers(b, low), scales, _signs_of_words(b, words))


def _iq2_xs(b: Any, num_vectors: int, at: Any) -> BlockStep:
    stored = load(b, at, 2, I16, 32)
    numbers = b.and_(stored, all_lanes(I16, 511, 32))
    sevens = b.trunc(b.lshr(stored, all_lanes(I16, 9, 32)), vector_of(I8, 32))
    scales = _scales(b, _nibbles(b, at, 66, 16), _half(b, at, 0))
    return _step(b, "IQ2_XS", numbers, scales, _signs_of_bytes(b, sevens))


def _iq2_s(b: Any, num_vectors: int, at: Any) -> BlockStep:
    numbers = _numbers(b, load(b, at, 2, I8, 32), load(b, at, 66, I8, 8), 2)
    scales = _scales(b, _nibbles(b, at, 74, 16), _half(b, at, 0))
    return _step(b, "IQ2_S", numbers, scales, load(b, at, 34, I32, 8))


def _iq3_xxs(b: Any, num_vectors: int, at: Any) -> BlockStep:
    words = load(b, at, 66, I32, 8)
    scales = _scales(b, b.lshr(words, all_lanes(I32, 28, 8)), _half(b, at, 0))
    numbers = _numbers(b, load(b, at, 2, I8, 64))
    return _step(b, "IQ3_XXS", numbers, scales, _signs_of_words(b, words))


def _iq3_s(b: Any, num_vectors: int, at: Any) -> BlockStep:
    numbers = _numbers(b, load(b, at, 2, I8, 64), load(b, at, 66, I8, 8), 1)
    scales = _scales(b, _nibbles(b, at, 106, 8), _half(b, at, 0))
    return _step(b, "IQ3_S", numbers, scales, load(b, at, 74, I32, 8))


# What is added to bytes: the largest size of a weight, or more.
ADDED = {
    "IQ1_S": 1, "IQ1_M": 9, "IQ2_XXS": 64, "IQ2_XS": 64, "IQ2_S": 64, "IQ3_XXS": 64, "IQ3_S": 16,
}  # fmt: skip


def _is_wide(added: int) -> bool:
    """True if bytes are not below 64."""
    return 2 * added >= 64


def _kind(name: str, load: Load, width: int, *, left_out: float = 1.0, rows: int = 2) -> BlockKind:
    """A kind whose blocks have a scale for `width` weights. Columns as in blocks.py: of bytes,
    halves of a block, scales, runs, words, bytes; of numbers, pairs of scales, the two, eights,
    columns.
    """
    num_scales = NUM_WEIGHTS // width
    lanes = tuple(range(num_scales))
    times = -0.125 if name == "IQ1_S" else -ADDED[name]
    if multiplies_bytes():
        shape: tuple[int, ...] = (2, num_scales // 2, 2, width // 8, 4)
        lacking = LAST_SHIFTED if _is_wide(ADDED[name]) else MASKED
        return BlockKind(load, (shape, (0, 2, 4, 1, 3)), width, lanes, times, left_out, lacking)
    shape = (num_scales // 2, 2, width // EIGHT, EIGHT)
    kind = BlockKind(load, (shape, (0, 2, 1, 3)), left_out=left_out, lacking=(1.0,), rows=rows)
    if name != "IQ1_S":
        return kind
    return kind._replace(sum_width=width, sum_lanes=lanes, times=times)


# Rows that are decoded together share what is loaded of x, and their instructions wait for each
# other less: with AVX2, IQ1 takes 0.75 times as long with four, IQ2 and IQ3 0.9 times with two.
GRID_KINDS = {
    "iq1_s": _kind("IQ1_S", _iq1_s, 32, rows=4),
    "iq1_m": _kind("IQ1_M", _iq1_m, 16, left_out=0.125, rows=4),
    "iq2_xxs": _kind("IQ2_XXS", _iq2_xxs, 32, left_out=0.125),
    "iq2_xs": _kind("IQ2_XS", _iq2_xs, 16, left_out=0.125),
    "iq2_s": _kind("IQ2_S", _iq2_s, 16, left_out=0.125),
    "iq3_xxs": _kind("IQ3_XXS", _iq3_xxs, 32, left_out=0.25),
    "iq3_s": _kind("IQ3_S", _iq3_s, 32),
}
