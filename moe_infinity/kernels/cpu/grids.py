"""How blocks of GGML's types IQ1 to IQ3 become vectors of float32. A block has 256 weights: numbers
of entries in a table of 8 or 4 neighbouring weights each, signs, and scales of 32 or 16 weights.

    weight = scale x entry x sign                          IQ2, IQ3
    weight = scale x (entry, which is -1, 0 or 1, +- 1/8)  IQ1

What a block says is computed at once and written to the stack, from where it is read one by one.
Tables are those of the `gguf` package, and become constants of the compiled code. They are in
float32 as long as the first cache holds them: AVX2 takes several instructions to widen bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from moe_infinity.kernels.cpu.block_kind import BlockKind, BlockStep, Segment
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    all_lanes,
    joined,
    load,
    number_at,
    pick,
    repeated,
    store,
    vector_of,
)

EIGHT = 8  # neighbouring weights, which have a byte of signs
NUM_EIGHTS = 32  # of a block


class Table(NamedTuple):
    """The entries of a table, and which of them a block has."""

    name: str  # in the compiled code
    entries: NDArray[Any]  # [entries, weights], float32 or int8
    places: Any  # address of an int16 for each entry of the block: bytes from the table's start

    def eight(self, b: Any, index: int) -> Any:
        """The weights of a block from 8 x `index` on, in float32."""
        width = self.entries.shape[1]
        kind = F32 if self.entries.dtype == np.float32 else I8
        start = self._address(b)
        found = []
        for number in range(index * EIGHT // width, (index + 1) * EIGHT // width):
            place = b.zext(number_at(b, self.places, 2 * number, I16), I64)
            found.append(load(b, b.add(start, place), 0, kind, width))
        weights = joined(b, found)
        if kind == F32:
            return weights
        return b.sitofp(b.sext(weights, vector_of(I32, EIGHT)), vector_of(F32, EIGHT))

    def _address(self, b: Any) -> Any:
        name = f"moe_infinity_{self.name}"
        constant = b.module.globals.get(name)
        if constant is None:
            kind = ir.ArrayType(I8, self.entries.nbytes)
            constant = ir.GlobalVariable(b.module, kind, name)
            constant.initializer = ir.Constant(kind, bytearray(self.entries.tobytes()))
            constant.global_constant = True
            constant.linkage = "internal"
            constant.align = 64
        return b.ptrtoint(constant, I64)


class Signs(NamedTuple):
    """The signs of a block: a bit in one of 8 words for each weight."""

    words: Any  # address
    bits: tuple[int, ...] = tuple(range(32))  # of a word, by weight

    def of_two(self, b: Any, first: int, second: int) -> Iterator[Any]:
        """Yield the signs, in the uppermost bits, of the weights from 8 x `first` and 8 x `second`
        on, each in half of the lanes; then of the weights that follow them, 8 at a time.
        """
        places = [4 * (index // 4) for index in (first, second)]
        pair = [repeated(b, number_at(b, self.words, at, I32), EIGHT) for at in places]
        words = joined(b, pair)
        while True:
            starts = [EIGHT * (index % 4) for index in (first, second)]
            shifts = [31 - bit for start in starts for bit in self.bits[start : start + EIGHT]]
            yield b.and_(b.shl(words, ir.Constant(words.type, shifts)), all_lanes(I32, 1 << 31))
            first += 1
            second += 1


def _step(b: Any, table: Table, scales: Any, signs: Signs | None, minima: Any = None) -> BlockStep:
    """Decode a block whose `scales` are for equally many weights each. Half of the lanes are for
    one scale and half for the next: so sums are scaled half as often.
    """
    num_scales = scales.type.count
    per_scale = NUM_EIGHTS // num_scales
    scales_at = _on_stack(b, scales)

    def values(starts: list[int]) -> Iterator[Any]:
        bits = None if signs is None else signs.of_two(b, *starts)
        for k in range(per_scale):
            value = joined(b, [table.eight(b, start + k) for start in starts])
            if bits is not None:
                value = b.bitcast(b.xor(b.bitcast(value, vector_of(I32)), next(bits)), FLOATS)
            yield value

    def segments() -> Iterator[Segment]:
        for first in range(0, num_scales, 2):
            pair = [number_at(b, scales_at, 4 * number, F32) for number in (first, first + 1)]
            scale = joined(b, [repeated(b, number, EIGHT) for number in pair])
            yield Segment(scale, values([per_scale * first, per_scale * (first + 1)]))

    return BlockStep(segments(), minima)


def _on_stack(b: Any, vector: Any) -> Any:
    """Store a vector, and return the address."""
    with b.goto_entry_block():
        memory = b.alloca(vector.type)
    at = b.ptrtoint(memory, I64)
    store(b, vector, at)
    return at


def _grid(name: str) -> NDArray[np.float32]:
    """[entries, weights]: the table of a type."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    grid: NDArray[np.float32] = kind.grid.reshape(kind.grid_shape)
    return grid


def _places(b: Any, low: Any, entry_bytes: int, high: Any = None, num_bits: int = 0) -> Any:
    """The address of the places of entries, of whose numbers these are the lower 8 bits. A number
    of `high` has `num_bits` more of several, the first in its lowest bits.
    """
    count = low.type.count
    shift = entry_bytes.bit_length() - 1
    places = b.shl(b.zext(low, vector_of(I16, count)), all_lanes(I16, shift, count))
    if high is not None:
        each = count // high.type.count
        spread = pick(b, high, [entry // each for entry in range(count)])
        if spread.type != places.type:
            spread = b.zext(spread, places.type)
        shifts = [shift + 8 - num_bits * (entry % each) for entry in range(count)]
        bits = b.shl(spread, ir.Constant(places.type, shifts))
        mask = (1 << num_bits) - 1 << shift + 8
        places = b.or_(places, b.and_(bits, all_lanes(I16, mask, count)))
    return _on_stack(b, places)


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


def _signs_of_words(b: Any, words: Any) -> Signs:
    """Four times 7 signs in the lower bits of a word. With an eighth their number is even: these
    take the four bits above them.
    """
    folded = words
    for shift in (1, 2):
        pairs, folded = folded, b.xor(folded, b.lshr(folded, all_lanes(I32, shift, 8)))
    folded = b.xor(folded, b.lshr(pairs, all_lanes(I32, 4, 8)))
    folded = b.xor(folded, b.lshr(words, all_lanes(I32, 6, 8)))
    odd = b.and_(folded, all_lanes(I32, 1 | 1 << 7 | 1 << 14 | 1 << 21, 8))
    odd = b.mul(odd, all_lanes(I32, 1 << 28 | 1 << 22 | 1 << 16 | 1 << 10, 8))
    odd = b.and_(odd, all_lanes(I32, 15 << 28, 8))
    words = b.or_(odd, b.and_(words, all_lanes(I32, (1 << 28) - 1, 8)))
    bits = [7 * k + lane if lane < 7 else 28 + k for k in range(4) for lane in range(EIGHT)]
    return Signs(_on_stack(b, words), tuple(bits))


def _signs_of_bytes(b: Any, sevens: Any) -> Signs:
    """Bytes of 7 signs; with an eighth their number is even."""
    words = folded = b.bitcast(sevens, vector_of(I32, 8))
    for shift in (4, 2, 1):
        folded = b.xor(folded, b.lshr(folded, all_lanes(I32, shift, 8)))
    odd = b.shl(b.and_(folded, all_lanes(I32, 0x01010101, 8)), all_lanes(I32, 7, 8))
    return Signs(_on_stack(b, b.or_(words, odd)))


def _iq1_s(b: Any, num_vectors: int, at: Any) -> BlockStep:
    high = load(b, at, 34, I16, 8)
    places = _places(b, load(b, at, 2, I8, 32), 8, high, 3)
    wide = b.zext(high, vector_of(I32, 8))
    numbers = b.and_(b.lshr(wide, all_lanes(I32, 12, 8)), all_lanes(I32, 7, 8))
    scales = _scales(b, numbers, _half(b, at, 0))
    signs = b.shl(b.lshr(wide, all_lanes(I32, 15, 8)), all_lanes(I32, 31, 8))
    minima = b.bitcast(b.xor(b.bitcast(scales, wide.type), signs), scales.type)
    table = Table("iq1_s", _grid("IQ1_S").astype(np.int8), places)
    return _step(b, table, scales, None, joined(b, [minima] * 2))


def _iq1_m(b: Any, num_vectors: int, at: Any) -> BlockStep:
    """Each entry has a bit that says which eighth is added: that is half of the table."""
    places = _places(b, load(b, at, 0, I8, 32), 8, load(b, at, 32, I8), 4)
    factor = I16(0)
    for k in range(4):
        top = b.and_(number_at(b, at, 48 + 2 * k, I16), I16(15 << 12))
        factor = b.or_(factor, b.lshr(top, I16(12 - 4 * k)))
    stored = b.zext(load(b, at, 48, I16, 4), vector_of(I32, 4))
    numbers = pick(b, stored, [number // 4 for number in range(16)])
    shifts = [3 * (number % 4) for number in range(16)]
    numbers = b.and_(b.lshr(numbers, ir.Constant(numbers.type, shifts)), all_lanes(I32, 7))
    eighths = 8 * _grid("IQ1_M")
    table = Table("iq1_m", np.vstack([eighths + 1, eighths - 1]).astype(np.int8), places)
    return _step(b, table, _scales(b, numbers, b.bitcast(factor, ir.HalfType())), None)


def _iq2_xxs(b: Any, num_vectors: int, at: Any) -> BlockStep:
    pairs = load(b, at, 2, I32)
    low = b.bitcast(pick(b, pairs, range(0, 16, 2)), vector_of(I8, 32))
    words = pick(b, pairs, range(1, 16, 2))
    scales = _scales(b, b.lshr(words, all_lanes(I32, 28, 8)), _half(b, at, 0))
    table = Table("iq2_xxs", _grid("IQ2_XXS"), _places(b, low, 32))
    return _step(b, table, scales, _signs_of_words(b, words))


def _iq2_xs(b: Any, num_vectors: int, at: Any) -> BlockStep:
    stored = load(b, at, 2, I16, 32)
    places = b.shl(b.and_(stored, all_lanes(I16, 511, 32)), all_lanes(I16, 5, 32))
    sevens = b.trunc(b.lshr(stored, all_lanes(I16, 9, 32)), vector_of(I8, 32))
    scales = _scales(b, _nibbles(b, at, 66, 16), _half(b, at, 0))
    table = Table("iq2_xs", _grid("IQ2_XS"), _on_stack(b, places))
    return _step(b, table, scales, _signs_of_bytes(b, sevens))


def _iq2_s(b: Any, num_vectors: int, at: Any) -> BlockStep:
    places = _places(b, load(b, at, 2, I8, 32), 32, load(b, at, 66, I8, 8), 2)
    scales = _scales(b, _nibbles(b, at, 74, 16), _half(b, at, 0))
    return _step(b, Table("iq2_s", _grid("IQ2_S"), places), scales, Signs(b.add(at, I64(34))))


def _iq3_xxs(b: Any, num_vectors: int, at: Any) -> BlockStep:
    words = load(b, at, 66, I32, 8)
    scales = _scales(b, b.lshr(words, all_lanes(I32, 28, 8)), _half(b, at, 0))
    table = Table("iq3_xxs", _grid("IQ3_XXS"), _places(b, load(b, at, 2, I8, 64), 16))
    return _step(b, table, scales, _signs_of_words(b, words))


def _iq3_s(b: Any, num_vectors: int, at: Any) -> BlockStep:
    places = _places(b, load(b, at, 2, I8, 64), 16, load(b, at, 66, I8, 8), 1)
    scales = _scales(b, _nibbles(b, at, 106, 8), _half(b, at, 0))
    return _step(b, Table("iq3_s", _grid("IQ3_S"), places), scales, Signs(b.add(at, I64(74))))


# As in blocks.py: pairs of scales, the two, eights, columns.
BY_32 = (4, 2, 4, 8), (0, 2, 1, 3)
BY_16 = (8, 2, 2, 8), (0, 2, 1, 3)
FOR_32 = tuple(range(8))  # the lane of each

# Rows that are decoded together share what is loaded of x, and their instructions wait for each
# other less: with AVX2, IQ1 takes 0.75 times as long with four, IQ2 and IQ3 0.9 times with two.
_by_table = partial(BlockKind, lacking=(1.0,), rows=2)

GRID_KINDS = {
    "iq1_s": _by_table(_iq1_s, BY_32, 32, FOR_32, times=0.125, rows=4),
    "iq1_m": _by_table(_iq1_m, BY_16, left_out=0.125, rows=4),
    "iq2_xxs": _by_table(_iq2_xxs, BY_32, left_out=0.125),
    "iq2_xs": _by_table(_iq2_xs, BY_16, left_out=0.125),
    "iq2_s": _by_table(_iq2_s, BY_16, left_out=0.125),
    "iq3_xxs": _by_table(_iq3_xxs, BY_32, left_out=0.25),
    "iq3_s": _by_table(_iq3_s, BY_32),
}
