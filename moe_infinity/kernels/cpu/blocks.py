"""How GGML's blocks become vectors of float32, with the scales that lie among the values.

A step is a block of 256 weights, or several of 32. Its values come out of decoding in *segments*:
vectors whose products with x are added up before their sum is multiplied by one vector of scales.
Sixteen words of 32 bits are decoded together, a byte of each after the other, so a lane has four
neighbouring columns. `order` says which; x is arranged alike.

    weight = scale x value - minimum            stored, or the scale times the zero point

What minima subtract is one product for a step: of a vector of minima and of one with the sums of x
over their columns, which is arranged with x.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from moe_infinity.kernels.cpu.block_kind import (
    LAST_SHIFTED,
    BlockKind,
    BlockStep,
    Segment,
    segment_of,
)
from moe_infinity.kernels.cpu.vectors import (
    FLOATS,
    I8,
    I16,
    I32,
    LANES,
    all_lanes,
    from_exponent,
    from_float8,
    from_half,
    joined,
    load,
    look_up,
    number_at,
    pick,
    repeated,
    spread,
    vector_of,
)


def _field(b: Any, words: Any, shift: int, mask: int) -> Any:
    """The bits of `mask` of every byte, after a shift to the right or, if negative, to the left."""
    amount = all_lanes(I32, abs(shift))
    words = b.lshr(words, amount) if shift > 0 else b.shl(words, amount) if shift else words
    return b.and_(words, all_lanes(I32, 0x01010101 * mask))


def _shifted(b: Any, words: Any, shifts: list[int]) -> Any:
    return b.lshr(words, ir.Constant(words.type, shifts))


def _masked(b: Any, words: Any, masks: list[int]) -> Any:
    return b.and_(words, ir.Constant(words.type, [0x01010101 * mask for mask in masks]))


def _numbers(b: Any, words: Any) -> Any:
    """The 16 bytes of four words, in i32."""
    return b.zext(b.bitcast(words, vector_of(I8)), vector_of(I32))


def _halves(b: Any, at: Any, offset: int, count: int) -> Any:
    """Load `count` numbers of float16, each spread over LANES / count lanes."""
    return spread(b, from_half(b, load(b, at, offset, I16, count)))


def _twice(b: Any, at: Any, offset: int, shift: int) -> Any:
    """Eight words in both halves of a vector, shifted to the right in the second one."""
    words = pick(b, load(b, at, offset, I32, 8), [*range(8)] * 2)
    return _shifted(b, words, [0] * 8 + [shift] * 8)


# 256 weights with 8 scales and minima of 6 bits each


def _scales_and_minima(b: Any, at: Any) -> Any:
    """The scales and minima of q4_k and q5_k: 8 scales, then 8 minima."""
    words = load(b, at, 0, I32, 4)  # d and dmin; three words
    low = _masked(b, _shifted(b, pick(b, words, [1, 1, 2, 2]), [0, 2, 0, 2]), [63, 48, 63, 48])
    high = _masked(b, _shifted(b, pick(b, words, [3, 3, 3, 3]), [0, 0, 0, 4]), [0, 15, 0, 15])
    numbers = b.sitofp(_numbers(b, b.or_(low, high)), FLOATS)
    return b.fmul(numbers, _halves(b, at, 0, 2))


def _q4_k(b: Any, num_vectors: int, at: Any) -> BlockStep:
    scales = _scales_and_minima(b, at)

    def segments() -> Iterator[Segment]:
        for half in range(2):
            words = load(b, at, 16 + 64 * half, I32)
            for high in range(2):
                first = 4 * half + high
                scale = pick(b, scales, [first] * 8 + [first + 2] * 8)
                yield segment_of(b, scale, _field(b, words, 4 * high, 15))

    return BlockStep(segments(), scales)


def _q5_k(b: Any, num_vectors: int, at: Any) -> BlockStep:
    scales = _scales_and_minima(b, at)
    fifth = _twice(b, at, 16, 2)

    def segments() -> Iterator[Segment]:
        for half in range(2):
            words = load(b, at, 48 + 64 * half, I32)
            for high in range(2):
                first = 4 * half + high
                scale = pick(b, scales, [first] * 8 + [first + 2] * 8)
                values = b.or_(_field(b, words, 4 * high, 15), _field(b, fifth, first - 4, 16))
                yield segment_of(b, scale, values)

    return BlockStep(segments(), scales)


# 256 weights with 16 scales


def _q6_k(b: Any, num_vectors: int, at: Any) -> BlockStep:
    numbers = b.sext(load(b, at, 192, I8), vector_of(I32))
    scales = b.fmul(b.sitofp(numbers, FLOATS), _halves(b, at, 208, 1))

    def segments() -> Iterator[Segment]:
        for half in range(2):
            words = load(b, at, 64 * half, I32)
            top = _twice(b, at, 128 + 32 * half, 2)
            for high in range(2):
                first = 8 * half + 4 * high
                scale = spread(b, pick(b, scales, range(first, first + 4)))
                values = b.or_(_field(b, words, 4 * high, 15), _field(b, top, 4 * high - 4, 48))
                yield segment_of(b, scale, values)

    return BlockStep(segments(), scales)


def _q3_k(b: Any, num_vectors: int, at: Any) -> BlockStep:
    words = load(b, at, 96, I32, 3)
    low = _masked(b, _shifted(b, pick(b, words, [0, 1, 0, 1]), [0, 0, 4, 4]), [15] * 4)
    high = _masked(b, _shifted(b, pick(b, words, [2] * 4), [0, 2, 4, 6]), [3] * 4)
    both = b.or_(low, b.shl(high, all_lanes(I32, 4, 4)))
    numbers = b.sitofp(b.sub(_numbers(b, both), all_lanes(I32, 32)), FLOATS)
    scales = b.fmul(numbers, _halves(b, at, 108, 1))
    words = load(b, at, 32, I32)
    third = _twice(b, at, 0, 4)
    values = (
        b.or_(_field(b, words, 2 * place, 3), _field(b, third, place - 2, 4)) for place in range(4)
    )
    return BlockStep(_by_two_bits(b, scales, values), scales)


def _q2_k(b: Any, num_vectors: int, at: Any) -> BlockStep:
    numbers = b.zext(load(b, at, 0, I8), vector_of(I32))
    scales = b.sitofp(b.and_(numbers, all_lanes(I32, 15)), FLOATS)
    minima = b.sitofp(b.lshr(numbers, all_lanes(I32, 4)), FLOATS)
    scales = b.fmul(scales, _halves(b, at, 80, 1))
    minima = b.fmul(minima, _halves(b, at, 82, 1))
    words = load(b, at, 16, I32)
    values = (_field(b, words, 2 * place, 3) for place in range(4))
    return BlockStep(_by_two_bits(b, scales, values), minima)


def _tq2_0(b: Any, num_vectors: int, at: Any) -> BlockStep:
    words = load(b, at, 0, I32)
    scale = _halves(b, at, 64, 1)
    values = (_field(b, words, 2 * place, 3) for place in range(4))
    return BlockStep(_by_two_bits(b, scale, values), scale)


def _by_two_bits(b: Any, scales: Any, values: Iterable[Any]) -> Iterator[Segment]:
    for place, value in enumerate(values):
        scale = pick(b, scales, [2 * place + k + lane // 4 for k in (0, 8) for lane in range(8)])
        yield segment_of(b, scale, value)


# 32 weights with a scale, four blocks at once: four words of each


class FourBlocks(NamedTuple):
    """Four neighbouring blocks of `num_bytes` bytes each."""

    b: Any
    at: Any
    num_bytes: int

    def words(self, offset: int) -> Any:
        places = (offset + self.num_bytes * block for block in range(4))
        return joined(self.b, [load(self.b, self.at, place, I32, 4) for place in places])

    def numbers(self, offset: int, kind: Any) -> Any:
        """A number of each block."""
        found = vector_of(kind, 4)(ir.Undefined)
        for block in range(4):
            number = number_at(self.b, self.at, offset + self.num_bytes * block, kind)
            found = self.b.insert_element(found, number, I32(block))
        return found

    def halves(self, offset: int) -> Any:
        """A float16 of each block, spread over the lanes of its words."""
        return spread(self.b, from_half(self.b, self.numbers(offset, I16)))

    def nibbles(self, offset: int) -> list[Any]:
        """The lower ones of every byte, and the upper ones."""
        words = self.words(offset)
        return [_field(self.b, words, shift, 15) for shift in (0, 4)]

    def with_fifth_bits(self, offset: int) -> list[Any]:
        """Nibbles, and before them 32 bits, one for each."""
        words = spread(self.b, self.numbers(offset, I32))
        bits = _shifted(self.b, words, [4 * (lane % 4) for lane in range(LANES)])
        nibbles = self.nibbles(offset + 4)
        return [self.b.or_(nibbles[k], self._spread_bits(bits, 16 * k)) for k in range(2)]

    def _spread_bits(self, words: Any, shift: int) -> Any:
        """Four neighbouring bits: each to bit 4 of a byte."""
        bits = self.b.and_(self.b.lshr(words, all_lanes(I32, shift)), all_lanes(I32, 15))
        copies = self.b.mul(bits, all_lanes(I32, 0x02040810))
        return self.b.and_(copies, all_lanes(I32, 0x10101010))


def _q4_0(b: Any, num_vectors: int, at: Any) -> BlockStep:
    blocks = FourBlocks(b, at, 18)
    scale = blocks.halves(0)
    return BlockStep([segment_of(b, scale, *blocks.nibbles(2))], scale)


def _q4_1(b: Any, num_vectors: int, at: Any) -> BlockStep:
    blocks = FourBlocks(b, at, 20)
    return BlockStep([segment_of(b, blocks.halves(0), *blocks.nibbles(4))], blocks.halves(2))


def _q5_0(b: Any, num_vectors: int, at: Any) -> BlockStep:
    blocks = FourBlocks(b, at, 22)
    scale = blocks.halves(0)
    return BlockStep([segment_of(b, scale, *blocks.with_fifth_bits(2))], scale)


def _q5_1(b: Any, num_vectors: int, at: Any) -> BlockStep:
    blocks = FourBlocks(b, at, 24)
    values = blocks.with_fifth_bits(4)
    return BlockStep([segment_of(b, blocks.halves(0), *values)], blocks.halves(2))


def _q8_0(b: Any, num_vectors: int, at: Any) -> BlockStep:
    def values(first: int) -> Iterator[Any]:
        for offset in (first, first + LANES):
            yield b.sitofp(b.sext(load(b, at, offset, I8), vector_of(I32)), FLOATS)

    firsts = range(0, 34 * num_vectors // 2, 34)
    return BlockStep(Segment(_halves(b, at, first, 1), values(first + 2)) for first in firsts)


# Values from a table


IQ4 = (0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240)  # plus 127
MXFP4 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # twice the value, plus 12


def _iq4_nl(b: Any, num_vectors: int, at: Any) -> BlockStep:
    blocks = FourBlocks(b, at, 18)
    values = (look_up(b, IQ4, nibbles) for nibbles in blocks.nibbles(2))
    scale = blocks.halves(0)
    return BlockStep([segment_of(b, scale, *values, is_wide=True)], scale)


def _mxfp4(b: Any, num_vectors: int, at: Any) -> BlockStep:
    blocks = FourBlocks(b, at, 17)
    values = (look_up(b, MXFP4, nibbles) for nibbles in blocks.nibbles(1))
    scale = spread(b, from_exponent(b, blocks.numbers(0, I8)))
    return BlockStep([segment_of(b, scale, *values)], scale)


def _nvfp4(b: Any, num_vectors: int, at: Any) -> BlockStep:
    """Two blocks of 64 weights. Sixteen have a float8 whose sign does not count; 0x7F is 0."""
    bits = joined(b, [load(b, at, k, I8, 4) for k in (0, 36)])
    is_number = b.icmp_signed("!=", bits, all_lanes(I8, 0x7F, 8))
    bits = b.select(is_number, b.and_(bits, all_lanes(I8, 0x7F, 8)), bits.type(None))
    scale = spread(b, from_float8(b, bits))
    words = joined(b, [load(b, at, k, I32, 8) for k in (4, 40)])
    values = (look_up(b, MXFP4, _field(b, words, shift, 15)) for shift in (0, 4))
    return BlockStep([segment_of(b, scale, *values)], scale)


def _iq4_xs(b: Any, num_vectors: int, at: Any) -> BlockStep:
    """Eight scales, in lanes 0 to 7 and again in the others."""
    eight = [*range(8)] * 2
    high = repeated(b, b.zext(number_at(b, at, 2, I16), I32))
    low = repeated(b, number_at(b, at, 4, I32))
    high = b.and_(_shifted(b, high, [2 * k for k in eight]), all_lanes(I32, 3))
    low = b.and_(_shifted(b, low, [4 * k for k in eight]), all_lanes(I32, 15))
    numbers = b.or_(low, b.shl(high, all_lanes(I32, 4)))
    numbers = b.sitofp(b.sub(numbers, all_lanes(I32, 32)), FLOATS)
    scales = b.fmul(numbers, _halves(b, at, 0, 1))

    def segments() -> Iterator[Segment]:
        for half in range(2):
            words = load(b, at, 8 + 64 * half, I32)
            values = (look_up(b, IQ4, _field(b, words, shift, 15)) for shift in (0, 4))
            scale = spread(b, pick(b, scales, range(4 * half, 4 * half + 4)))
            yield segment_of(b, scale, *values, is_wide=True)

    return BlockStep(segments(), scales)


# A shape of the columns of a step, and its axes as decoding gives them: bytes of a word come before
# the lanes, which are words.
TWO_BITS = (2, 4, 8, 4), (1, 3, 0, 2)  # halves, pairs of bits, words, bytes
PAIRS = (2, 2, 2, 8, 4), (0, 2, 4, 1, 3)  # halves, runs of 32 bytes, nibbles, words, bytes
WHOLE = (4, 16, 4), (0, 2, 1)  # nibbles of 64 bytes, words, bytes
FOURS = (-1, 4, 2, 4, 4), (0, 2, 4, 1, 3)  # halves, blocks, nibbles, words, bytes
SIXTEENS = (8, 2, 2, 4), (1, 3, 0, 2)  # runs of 8 bytes, nibbles, words, bytes
ALL = tuple(range(LANES))
OF_BLOCKS = (0, 4, 8, 12)  # the first lane of each

BLOCK_KINDS = {
    "q8_0": BlockKind(_q8_0, lacking=(1.0,)),
    "q4_0": BlockKind(_q4_0, FOURS, 32, OF_BLOCKS, -8),
    "q4_1": BlockKind(_q4_1, FOURS, 32, OF_BLOCKS, 1),
    "q5_0": BlockKind(_q5_0, FOURS, 32, OF_BLOCKS, -16),
    "q5_1": BlockKind(_q5_1, FOURS, 32, OF_BLOCKS, 1),
    "q2_k": BlockKind(_q2_k, TWO_BITS, 16, ALL, -1),
    "tq2_0": BlockKind(_tq2_0, TWO_BITS, 16, ALL, -1),
    "q3_k": BlockKind(_q3_k, TWO_BITS, 16, ALL, -4),
    "q4_k": BlockKind(_q4_k, PAIRS, 32, ALL[8:], -1),
    "q5_k": BlockKind(_q5_k, PAIRS, 32, ALL[8:], -1),
    "q6_k": BlockKind(_q6_k, WHOLE, 16, ALL, -32),
    "iq4_nl": BlockKind(_iq4_nl, FOURS, 32, OF_BLOCKS, -127, lacking=LAST_SHIFTED),
    "iq4_xs": BlockKind(_iq4_xs, FOURS, 32, ALL[:8], -127, lacking=LAST_SHIFTED),
    "ggml_mxfp4": BlockKind(_mxfp4, FOURS, 32, OF_BLOCKS, -12, left_out=0.5),
    "ggml_nvfp4": BlockKind(_nvfp4, SIXTEENS, 16, ALL[::2], -12, left_out=0.5),
}
