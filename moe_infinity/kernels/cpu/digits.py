"""Digits of x, for processors that multiply bytes (AVX512-VNNI).

Values that are bytes of words are multiplied without being converted: in the columns of a step, x
becomes whole numbers with one unit, a power of two, and these become three digits of 8 bits.

    x = unit x (256 x 256 x first + 256 x second + third), each from -128 to 127

A word has four neighbouring columns, and the digits of its columns are four bytes in each of three
vectors, in the lane that decoding gives the word. Sums of such products are exact. What x loses is
at most 2 ** -22 of the largest column of its step, or 2 ** -20 with digits of 7 bits. With 8 bits
numbers of bfloat16 lose nothing unless they are less than 2 ** -14 of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    all_lanes,
    call,
    dot_of_bytes,
    load,
    number_at,
    repeated,
    store,
    vector_of,
)

NUM_DIGITS = 3
FIRST_BITS = 6  # of the first digit, without the sign
# Of a step's largest number, as it is stored. Smaller ones keep fewer bits; with a smaller exponent
# their unit would be no normal number.
LEAST_EXPONENT = 30
MOST_COLUMNS = 256  # of a step


@intrinsic  # type: ignore[untyped-decorator]
def largest_exponent(_: Any, x: Any, num_vectors: Any) -> Any:
    """The largest exponent of numbers at an address, as it is stored; 255 if one is infinite or
    NaN.
    """

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        x, num_vectors = args
        largest = cgutils.alloca_once_value(b, vector_of(I32)(None))
        with cgutils.for_range(b, num_vectors, intp=I64) as each:
            bits = load(b, b.add(x, b.mul(each.index, I64(4 * LANES))), 0, I32)
            bits = b.and_(bits, all_lanes(I32, 0x7FFFFFFF))
            before = b.load(largest)
            b.store(b.select(b.icmp_signed(">", bits, before), bits, before), largest)
        bits = call(b, "llvm.vector.reduce.smax.v16i32", I32, [b.load(largest)])
        return b.zext(b.lshr(bits, I32(23)), I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def memory_of_step(_: Any) -> Any:
    """The address of room for the numbers of a step, on the stack of the caller."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(I32, MOST_COLUMNS))
        return b.ptrtoint(memory, I64)

    return types.int64(), emit


@intrinsic  # type: ignore[untyped-decorator]
def put_digits(
    _: Any, x: Any, counted: Any, exponent: Any, digit_bits: Any, places: Any, out: Any,
    numbers: Any,
) -> Any:  # fmt: skip
    """Store 16 columns of a step as int32 at `numbers`, and their digits at `out`: four words for
    each digit, those of the first where `places` says. Columns before `counted` are 0.
    """

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        x, counted, exponent, digit_bits, places, out, numbers_at = args
        number_bits = _number_bits(b, digit_bits)
        bits = b.trunc(digit_bits, I32)
        half = b.shl(I32(1), b.sub(bits, I32(1)))
        bits, half, mask = (
            repeated(b, each) for each in (bits, half, b.sub(b.shl(I32(1), bits), I32(1)))
        )
        is_new = b.icmp_signed(">=", _count(), repeated(b, b.trunc(counted, I32)))
        per_unit = _power(b, b.sub(b.add(number_bits, I64(2 * 127 - 1)), exponent))
        numbers = b.fmul(load(b, x, 0, F32), repeated(b, per_unit))
        numbers = b.select(is_new, numbers, FLOATS(None))
        rest = b.fptosi(call(b, "llvm.nearbyint.v16f32", FLOATS, [numbers]), vector_of(I32))
        store(b, rest, numbers_at)
        for digit in reversed(range(NUM_DIGITS)):
            value = rest
            if digit:
                value = b.sub(b.and_(b.add(rest, half), mask), half)
                rest = b.ashr(b.sub(rest, value), bits)
            words = b.bitcast(b.trunc(value, vector_of(I8)), vector_of(I32, 4))
            for word in range(4):
                place = b.add(out, number_at(b, places, 8 * word, I64))
                to = b.inttoptr(b.add(place, I64(4 * LANES * digit)), I32.as_pointer())
                b.store(b.extract_element(words, I32(word)), to)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


@intrinsic  # type: ignore[untyped-decorator]
def unit_of(_: Any, exponent: Any, digit_bits: Any) -> Any:
    """The unit of numbers whose largest has this exponent; NaN if that is none."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        exponent, digit_bits = args
        unit = _power(b, b.sub(exponent, b.sub(_number_bits(b, digit_bits), I64(1))))
        is_number = b.icmp_signed("<", exponent, I64(255))
        return b.select(is_number, unit, F32(float("nan")))

    return types.float32(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_numbers(_: Any, numbers: Any, count: Any) -> Any:
    """The sum of `count` int32, a multiple of 16, rounded to float32 once."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        numbers, count = args
        total = cgutils.alloca_once_value(b, vector_of(I32)(None))
        with cgutils.for_range_slice(b, I64(0), count, I64(LANES), intp=I64) as (first, _):
            vector = load(b, b.add(numbers, b.mul(first, I64(4))), 0, I32)
            b.store(b.add(b.load(total), vector), total)
        return b.sitofp(call(b, "llvm.vector.reduce.add.v16i32", I32, [b.load(total)]), F32)

    return types.float32(types.int64, types.int64), emit


def _number_bits(b: Any, digit_bits: Any) -> Any:
    """The bits of numbers, without the sign."""
    return b.add(b.mul(digit_bits, I64(NUM_DIGITS - 1)), I64(FIRST_BITS))


def _count() -> Any:
    return vector_of(I32)([*range(LANES)])


def _power(b: Any, exponent: Any) -> Any:
    """The power of two whose exponent is stored so."""
    return b.bitcast(b.shl(b.trunc(exponent, I32), I32(23)), F32)


def product_of_words(b: Any, words: Sequence[Any], x: Any, first: int, digit_bits: int) -> Any:
    """The sums of the products of these words' bytes with x, as many units: float32. Their digits
    begin `first` vectors behind the address `x`.
    """
    total = vector_of(I32)(None)
    for digit in range(NUM_DIGITS):
        if digit:
            total = b.shl(total, all_lanes(I32, digit_bits))
        for k, word in enumerate(words):
            offset = 4 * LANES * (first + NUM_DIGITS * k + digit)
            total = dot_of_bytes(b, word, load(b, x, offset, I32), total)
    return b.sitofp(total, FLOATS)
