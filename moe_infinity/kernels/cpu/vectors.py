"""Vectors of 16 lanes in LLVM's terms, for the inner loops of rows.py and words.py.

Only what LLVM has for every processor. `b` builds the code of a function; what functions here take
and return are values in that code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.compiler import permutes_bytes
from moe_infinity.layout import NIBBLES

LANES = 16  # float32 values of a vector; LLVM splits them where the machine has narrower ones

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))


def vector_of(kind: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(kind, lanes)


FLOATS = vector_of(F32)
EXPONENTIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip


def all_lanes(kind: Any, value: float, lanes: int = LANES) -> Any:
    return ir.Constant(vector_of(kind, lanes), [value] * lanes)


def load(b: Any, at: Any, offset: int, kind: Any, lanes: int = LANES) -> Any:
    pointer = b.inttoptr(b.add(at, I64(offset)), vector_of(kind, lanes).as_pointer())
    return b.load(pointer, align=1)


def store(b: Any, vector: Any, at: Any) -> None:
    b.store(vector, b.inttoptr(at, vector.type.as_pointer()), align=4)


def spread(b: Any, vector: Any) -> Any:
    """LANES lanes from fewer: each element is repeated over neighbouring lanes."""
    count = vector.type.count
    lanes = [lane * count // LANES for lane in range(LANES)]
    return b.shuffle_vector(vector, vector, ir.Constant(vector_of(I32), lanes))


def repeated(b: Any, value: Any, lanes: int = LANES) -> Any:
    one = b.insert_element(ir.Constant(vector_of(value.type, lanes), None), value, I32(0))
    return pick(b, one, [0] * lanes)


def pick(b: Any, vector: Any, lanes: Iterable[int], other: Any = None) -> Any:
    """These lanes of a vector, or of two one behind the other."""
    chosen = list(lanes)
    mask = ir.Constant(vector_of(I32, len(chosen)), chosen)
    return b.shuffle_vector(vector, vector if other is None else other, mask)


def joined(b: Any, vectors: list[Any]) -> Any:
    """Two or four vectors, one behind the other."""
    while len(vectors) > 1:
        lanes = range(2 * vectors[0].type.count)
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [pick(b, one, lanes, other) for one, other in pairs]
    return vectors[0]


def number_at(b: Any, at: Any, offset: int, kind: Any) -> Any:
    return b.load(b.inttoptr(b.add(at, I64(offset)), kind.as_pointer()), align=1)


def look_up(b: Any, table: tuple[int, ...], words: Any) -> Any:
    """Every byte of 16 words, which is below 16, replaced by a byte of the table.

    LLVM makes one instruction of the picks from a vector, if the processor has it: for 64 bytes
    with AVX512-VBMI, elsewhere for 16.
    """
    width = 64 if permutes_bytes() else 16
    source = ir.Constant(vector_of(I8, width), [*table] * (width // len(table)))
    every = b.bitcast(words, vector_of(I8, 64))
    found = []
    for first in range(0, 64, width):
        places = pick(b, every, range(first, first + width))
        values = vector_of(I8, width)(ir.Undefined)
        for lane in range(width):
            place = b.zext(b.extract_element(places, I32(lane)), I32)
            values = b.insert_element(values, b.extract_element(source, place), I32(lane))
        found.append(values)
    return b.bitcast(joined(b, found), words.type)


def from_half(b: Any, bits: Any) -> Any:
    lanes = bits.type.count
    return b.fpext(b.bitcast(bits, vector_of(ir.HalfType(), lanes)), vector_of(F32, lanes))


def from_float8(b: Any, bits: Any) -> Any:
    """The numbers of float8_e4m3fn, none of which is NaN: a float16 that lacks a factor of 2 ** 8,
    times that.
    """
    lanes = bits.type.count
    halves = b.shl(b.sext(bits, vector_of(I16, lanes)), all_lanes(I16, 7, lanes))
    halves = b.and_(halves, all_lanes(I16, 0xBF80, lanes))
    return b.fmul(from_half(b, halves), all_lanes(F32, 2.0**8, lanes))


def from_bfloat(b: Any, bits: Any) -> Any:
    return _from_top(b, bits, 16)


def to_bfloat(b: Any, floats: Any) -> Any:
    """The bits of bfloat16: rounded to nearest, ties to even. NaN stays NaN."""
    bits = b.bitcast(floats, vector_of(I32))
    top = b.lshr(bits, all_lanes(I32, 16))
    half = b.add(all_lanes(I32, 0x7FFF), b.and_(top, all_lanes(I32, 1)))
    rounded = b.lshr(b.add(bits, half), all_lanes(I32, 16))
    is_number = b.fcmp_ordered("ord", floats, floats)
    return b.trunc(b.select(is_number, rounded, b.or_(top, all_lanes(I32, 0x40))), vector_of(I16))


def to_bfloats(b: Any, low: Any, high: Any) -> Any:
    """The bits of the bfloat16 of two vectors, one behind the other. The processor takes numbers
    below the smallest normal one for 0. Only for AVX512-BF16.
    """
    binding.initialize_native_asmparser()
    kind = ir.FunctionType(vector_of(I16, 2 * LANES), [FLOATS, FLOATS])
    return b.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [low, high], False)


def from_exponent(b: Any, bits: Any) -> Any:
    """Two to the power of the bits less 127."""
    return _from_top(b, bits, 23)


def _from_top(b: Any, bits: Any, shift: int) -> Any:
    lanes = bits.type.count
    bits = b.shl(b.zext(bits, vector_of(I32, lanes)), all_lanes(I32, shift, lanes))
    return b.bitcast(bits, vector_of(F32, lanes))


def nibbles_of(b: Any, words: Any) -> Iterator[Any]:
    """The 8 nibbles of each lane's word, in float32. Nibble k is multiplied by 16 ** k, as it is
    masked without a shift; only the last one is shifted.
    """
    for k in range(NIBBLES - 1):
        yield b.sitofp(b.and_(words, all_lanes(I32, 15 << 4 * k)), FLOATS)
    yield b.sitofp(b.lshr(words, all_lanes(I32, 28)), FLOATS)


def smaller(b: Any, one: Any, other: Any) -> Any:
    """The smaller number; `one` also where that is no number."""
    compare = b.icmp_signed if one.type == I64 else b.fcmp_unordered
    return b.select(compare("<", one, other), one, other)


def larger(b: Any, one: Any, other: Any) -> Any:
    """The larger number; of equal ones `other`, also where that is no number."""
    compare = b.icmp_signed if one.type == I64 else b.fcmp_ordered
    return b.select(compare(">", one, other), one, other)


def exponential(b: Any, x: Any) -> Any:
    """The exponential of x <= 0, to 2 units in the last place; 0 where that is the smallest normal
    number or less.

    It is the nearest whole power of two, times a polynomial of the rest (Cephes, expf).
    """
    power = call(b, "llvm.nearbyint.v16f32", FLOATS, [b.fmul(x, all_lanes(F32, 1.44269504))])
    r = fma(b, power, all_lanes(F32, -0.693359375), x)
    r = fma(b, power, all_lanes(F32, 2.12194440e-4), r)
    value = all_lanes(F32, EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        value = fma(b, value, r, all_lanes(F32, coefficient))
    value = b.fadd(fma(b, value, b.fmul(r, r), r), all_lanes(F32, 1.0))
    is_normal = b.fcmp_ordered(">", x, all_lanes(F32, -87.0))
    power = b.select(is_normal, power, FLOATS(None))
    bits = b.shl(b.fptosi(power, vector_of(I32)), all_lanes(I32, 23))
    scaled = b.bitcast(b.add(b.bitcast(value, vector_of(I32)), bits), FLOATS)
    return b.select(is_normal, scaled, FLOATS(None))


def fma(b: Any, one: Any, other: Any, addend: Any) -> Any:
    return call(b, f"llvm.fma.v{one.type.count}f32", one.type, [one, other, addend])


def dot(b: Any, one: Any, other: Any, addend: Any) -> Any:
    """Add to each float32 lane the products of a pair of bfloat16 in each of two words. Only for
    AVX512-BF16; the types of LLVM's own function for it changed between its versions.
    """
    binding.initialize_native_asmparser()
    kind = ir.FunctionType(FLOATS, [FLOATS, one.type, other.type])
    return b.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [addend, one, other], False)


def dot_of_bytes(b: Any, one: Any, other: Any, addend: Any) -> Any:
    """Add to each lane of i32 the products of the four unsigned bytes of a word of `one` with the
    signed ones of `other`. Only for AVX512-VNNI.
    """
    return call(b, "llvm.x86.avx512.vpdpbusd.512", one.type, [addend, one, other])


def sum_of_lanes(b: Any, vector: Any) -> Any:
    """Add halves onto each other until one lane is left: the same additions as in store_sums."""
    return b.extract_element(_fold(b, _fold(b, _fold(b, _fold(b, vector)))), I32(0))


def _fold(b: Any, vector: Any) -> Any:
    half = vector.type.count // 2
    return b.fadd(*(pick(b, vector, range(k * half, (k + 1) * half)) for k in (0, 1)))


def store_sums(b: Any, vectors: list[Any], at: Any, count: Any) -> None:
    """Store the sums over the lanes of one, two or four vectors next to each other, but no more
    than `count` of them. A sum's bits do not depend on the other vectors.
    """
    store_some(b, _sums(b, vectors), at, count)


def add_sums(b: Any, vectors: list[Any], at: Any, count: Any, is_first: Any) -> None:
    """Add the sums over the lanes of vectors to what is stored there, or store them if that
    `is_first`; otherwise as `store_sums`.
    """
    sums = _sums(b, vectors)
    lanes = len(vectors)
    kind = vector_of(F32, lanes)
    is_read = b.and_(_before(b, count, lanes), repeated(b, b.not_(is_first), lanes))
    pointer = b.inttoptr(at, kind.as_pointer())
    args = [pointer, I32(4), is_read, kind(None)]
    before = call(b, f"llvm.masked.load.v{lanes}f32.p0", kind, args)
    store_some(b, b.fadd(before, sums), at, count)


def _sums(b: Any, vectors: list[Any]) -> Any:
    """The sums over the lanes of one, two or four vectors, as one vector."""
    num = len(vectors)
    width = vectors[0].type.count
    while len(vectors) > 1:  # lanes of pairs, so that one addition halves both
        half = width // 2
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_fold_two(b, *pair, half) for pair in pairs]
        width = half
    (vector,) = vectors
    while width > 1:
        half = width // 2
        low = [k * width + lane for k in range(num) for lane in range(half)]
        vector = b.fadd(pick(b, vector, low), pick(b, vector, [lane + half for lane in low]))
        width = half
    return vector


def _fold_two(b: Any, one: Any, other: Any, half: int) -> Any:
    """Fold two vectors that have sums of the same number of lanes; the result has those of one,
    then of the other.
    """
    count = one.type.count
    width = 2 * half
    low = [k * width + lane for k in range(2 * count // width) for lane in range(half)]
    return b.fadd(pick(b, one, low, other), pick(b, one, [lane + half for lane in low], other))


def store_some(b: Any, vector: Any, at: Any, count: Any) -> None:
    """Store the first `count` lanes, or all if that is more."""
    lanes = vector.type.count
    pointer = b.inttoptr(at, vector.type.as_pointer())
    args = [vector, pointer, I32(4), _before(b, count, lanes)]
    call(b, f"llvm.masked.store.v{lanes}f32.p0", ir.VoidType(), args)


def _before(b: Any, count: Any, lanes: int) -> Any:
    """True for the first `count` lanes."""
    places = ir.Constant(vector_of(I64, lanes), [*range(lanes)])
    return b.icmp_signed("<", places, repeated(b, count, lanes))


def largest_of_lanes(b: Any, vector: Any) -> Any:
    return call(b, "llvm.vector.reduce.fmax.v16f32", F32, [vector])


def prefetch(b: Any, at: Any) -> None:
    pointer = b.inttoptr(at, I8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(3), I32(1)])


def call(b: Any, name: str, result: Any, args: list[Any], fastmath: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args, fastmath=fastmath)


# For functions that numba compiles. Memory is an address to them, not an array: so they compile
# several times as fast.


@intrinsic  # type: ignore[untyped-decorator]
def int_at(_: Any, address: Any, index: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return b.load(_element(b, args, I64))

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def words_at(_: Any, address: Any) -> Any:
    """For numba: the 64-bit words from an address on."""

    def emit(_: Any, b: Any, __: Any, args: Any) -> Any:
        return b.inttoptr(args[0], I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def float_at(_: Any, address: Any, index: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return b.load(_element(b, args, F32))

    return types.float32(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def bfloat_at(_: Any, address: Any, index: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        bits = b.zext(b.load(_element(b, args, I16)), I32)
        return b.bitcast(b.shl(bits, I32(16)), F32)

    return types.float32(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def half_at(_: Any, address: Any, index: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return b.fpext(b.load(_element(b, args, ir.HalfType())), F32)

    return types.float32(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def put_float(_: Any, address: Any, index: Any, value: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        b.store(args[2], _element(b, args, F32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic  # type: ignore[untyped-decorator]
def put_int(_: Any, address: Any, index: Any, value: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        b.store(args[2], _element(b, args, I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def put_half(_: Any, address: Any, index: Any, value: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        b.store(b.fptrunc(args[2], ir.HalfType()), _element(b, args, ir.HalfType()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic  # type: ignore[untyped-decorator]
def put_bfloat(_: Any, address: Any, index: Any, value: Any) -> Any:
    """Rounds to nearest, ties to even. NaN stays NaN."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        bits = b.bitcast(args[2], I32)
        top = b.lshr(bits, I32(16))
        rounded = b.lshr(b.add(bits, b.add(I32(0x7FFF), b.and_(top, I32(1)))), I32(16))
        is_number = b.fcmp_ordered("ord", args[2], args[2])
        kept = b.select(is_number, rounded, b.or_(top, I32(0x40)))
        b.store(b.trunc(kept, I16), _element(b, args, I16))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


def _element(b: Any, args: Any, kind: Any) -> Any:
    return b.gep(b.inttoptr(args[0], kind.as_pointer()), [args[1]])


@njit(nogil=True)
def sigmoid(x):  # type: ignore[no-untyped-def]
    """Return 1 / (1 + exp(-x))."""
    return types.float32(1) / (types.float32(1) + math.exp(-x))
