"""Rows of a matrix in a slot, whose values are decoded in registers: the packed formats of
unpack.py, written for Triton; blocks.py has GGML's.

    chunk_sums     their products with one x: one thread sums a chunk of columns
    weight_tile    the values, for products with many x at once

A tile is [R rows, N chunks, C columns of a chunk]. Scales and zeros are applied to sums where there
are sums, one for each chunk.

Whole numbers are not converted. A number n, masked where it is in the lower 24 bits of its word,
has exactly the bits of the float32 n * 2 ** (its lowest bit - 149): a denormal or, with bit 23, one
of the smallest normal numbers. x or the sum is multiplied by the rest of that power of two.

Words are loaded with a last dimension of 1, which becomes that of the numbers in a word. So these
stay in the thread that loaded the word.

Every function has one `return`: what follows a `return` in a branch would be compiled for every
kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_infinity.experimental.gpu.kernels.blocks import block_sums, block_values
from moe_infinity.experimental.gpu.kernels.slot_mlp import LOAD_BYTES, X_EXPONENT
from moe_infinity.kernels.unpack import ZERO_OF_SYMMETRIC
from moe_infinity.layout import NIBBLES

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)
_NIBBLES = tl.constexpr(NIBBLES)
_X_EXPONENT = tl.constexpr(X_EXPONENT)
_SYMMETRIC_ZERO = tl.constexpr(float(ZERO_OF_SYMMETRIC))
_SIGNS = tl.constexpr(-0x7FFF8000)  # of two float16s in an int32
_INT8_SIGNS = tl.constexpr(-0x7F7F7F80)  # of four int8s; inverting them adds 128


@triton.jit
def numbers_at(slot, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Where a part begins; 16 bytes at once can be loaded from there."""
    part = slot + OFFSET
    if DTYPE == "float32":
        numbers = part.to(tl.pointer_type(tl.float32))
    elif DTYPE == "bfloat16":
        numbers = part.to(tl.pointer_type(tl.bfloat16))
    elif DTYPE == "float16":
        numbers = part.to(tl.pointer_type(tl.float16))
    elif DTYPE == "int32":
        numbers = part.to(tl.pointer_type(tl.int32))
    elif DTYPE == "int8":
        numbers = part.to(tl.pointer_type(tl.int8))
    else:
        numbers = part.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(numbers, _LOAD_BYTES)


@triton.jit
def load_x(x, first_column, NUM_COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """[N, C] in float32; 0 beyond the last column."""
    column_NC = first_column + tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(x + column_NC, mask=column_NC < NUM_COLUMNS, other=0.0).to(tl.float32)


@triton.jit
def chunk_sums(
    slot, is_there, row_R, x_NC, first_column, MATRIX: tl.constexpr, CHUNKS: tl.constexpr
):
    """[R, N] in float32: for some rows and chunks, the sum of weights times x."""
    row_R = MATRIX.first_row + MATRIX.row_step * row_R
    first_N = first_column + tl.arange(0, CHUNKS) * MATRIX.chunk
    if MATRIX.chunks_of_block > 0:
        sums_RN = block_sums(slot, is_there, row_R, x_NC, first_N, MATRIX)
    else:
        sums_RN = _sums(slot, is_there, row_R, x_NC, first_N, MATRIX)
    return sums_RN


@triton.jit
def _sums(slot, is_there, row_R, x_NC, first_N, MATRIX: tl.constexpr):
    """Of what has its scales apart."""
    is_there_N = is_there & (first_N < MATRIX.num_columns)
    group_N = load_groups(slot, is_there_N, first_N, MATRIX)
    values_RNC = load_values(slot, is_there, row_R, first_N, MATRIX)
    all_N = tl.sum(x_NC, 1)
    if MATRIX.number_bits > 0:
        x_NC *= power_of_two(_X_EXPONENT, lowest_bit(column_places(first_N, MATRIX), MATRIX))
    sums_RN = tl.sum(values_RNC * x_NC[None, :, :], 2) * MATRIX.unit
    if MATRIX.kind == "awq":
        sums_RN *= power_of_two(0, lowest_bit(row_places(row_R, "awq"), MATRIX))[:, None]
    if MATRIX.has_zeros:
        zeros_RN = load_zeros(slot, is_there_N, row_R, group_N, MATRIX)
        sums_RN -= zeros_RN * all_N[None, :]
    if MATRIX.weight.scale is not None:
        sums_RN *= load_scales(slot, is_there, is_there_N, row_R, group_N, MATRIX)
    return sums_RN


@triton.jit
def weight_tile(slot, row_R, first_column, MATRIX: tl.constexpr, CHUNKS: tl.constexpr):
    """[R, K]: some rows and the K = N * C columns of N chunks, unpacked, in float32; those of a
    plain kind in their own dtype. 0 beyond the last column.
    """
    row_R = MATRIX.first_row + MATRIX.row_step * row_R
    first_N = first_column + tl.arange(0, CHUNKS) * MATRIX.chunk
    if MATRIX.is_plain:
        values = numbers_at(
            slot, MATRIX.weight.values.offset, tl.constexpr(MATRIX.weight.values.dtype)
        )
        at_K = first_column + tl.arange(0, CHUNKS * MATRIX.chunk)
        at_RK = row_R[:, None] * MATRIX.row_stride + (at_K * MATRIX.column_stride)[None, :]
        tile_RK = tl.load(values + at_RK, mask=(at_K < MATRIX.num_columns)[None, :], other=0)
    else:
        if MATRIX.chunks_of_block > 0:
            tile_RNC = block_values(slot, row_R, first_N, MATRIX)
        else:
            tile_RNC = _values(slot, row_R, first_N, MATRIX)
        tile_RK = tl.reshape(tile_RNC, (row_R.shape[0], CHUNKS * MATRIX.chunk))
    return tile_RK


@triton.jit
def _values(slot, row_R, first_N, MATRIX: tl.constexpr):
    """[R, N, C] in float32, of what has its scales apart."""
    is_there_N = first_N < MATRIX.num_columns
    group_N = load_groups(slot, is_there_N, first_N, MATRIX)
    values_RNC = load_values(slot, True, row_R, first_N, MATRIX)
    if MATRIX.number_bits > 0:
        place_NC = lowest_bit(column_places(first_N, MATRIX), MATRIX)
        values_RNC *= power_of_two(_X_EXPONENT, place_NC)[None, :, :]
    values_RNC *= MATRIX.unit
    if MATRIX.kind == "awq":
        place_R = lowest_bit(row_places(row_R, "awq"), MATRIX)
        values_RNC *= power_of_two(0, place_R)[:, None, None]
    if MATRIX.has_zeros:
        values_RNC -= load_zeros(slot, is_there_N, row_R, group_N, MATRIX)[:, :, None]
    if MATRIX.weight.scale is not None:
        scale_RN = load_scales(slot, True, is_there_N, row_R, group_N, MATRIX)
        values_RNC *= scale_RN[:, :, None]
    return values_RNC


@triton.jit
def load_groups(slot, is_there_N, first_N, MATRIX: tl.constexpr):
    """Of each chunk the column that its scales have."""
    group_N = first_N // MATRIX.block_columns
    if MATRIX.groups is not None:
        groups = numbers_at(slot, MATRIX.groups.offset, "int32")
        group_N = tl.load(groups + first_N, mask=is_there_N, other=0)
        group_N = tl.minimum(tl.maximum(group_N, 0), MATRIX.num_scale_columns - 1)
    return group_N


@triton.jit
def load_zeros(slot, is_there_N, row_R, group_N, MATRIX: tl.constexpr):
    """[R, N] in float32, or one for all: the number that stands for 0."""
    if MATRIX.weight.zeros is not None:
        zeros = numbers_at(slot, MATRIX.weight.zeros.offset, "int32")
        word_R = row_R // _NIBBLES * MATRIX.zeros_strides[0]
        word_RN = word_R[:, None] + (group_N * MATRIX.zeros_strides[1])[None, :]
        words_RN = tl.load(zeros + word_RN, mask=is_there_N[None, :], other=0)
        if MATRIX.kind == "gptq":  # zeros are stored less one
            words_RN += 0x11111111
        place_R = row_places(row_R, tl.constexpr(MATRIX.kind))
        zeros_RN = ((words_RN >> (4 * place_R)[:, None]) & 15).to(tl.float32)
    else:
        zeros_RN = tl.full((1, 1), _SYMMETRIC_ZERO, tl.float32)
    return zeros_RN


@triton.jit
def load_scales(slot, is_there, is_there_N, row_R, group_N, MATRIX: tl.constexpr):
    """[R, N] in float32; [R, 1] if rows have one scale."""
    at_R = row_R // MATRIX.block_rows * MATRIX.scale_strides[0]
    if MATRIX.num_scale_columns == 1:
        scales_RN = load_scale(slot, at_R, is_there, MATRIX)[:, None]
    else:
        at_RN = at_R[:, None] + (group_N * MATRIX.scale_strides[1])[None, :]
        scales_RN = load_scale(slot, at_RN, is_there_N[None, :], MATRIX)
    return scales_RN


@triton.jit
def load_bias(slot, is_there, row_R, MATRIX: tl.constexpr):
    """[R] in float32; 0 where there is none."""
    bias_R = tl.zeros(row_R.shape, tl.float32)
    if MATRIX.bias is not None:
        bias = numbers_at(slot, MATRIX.bias.offset, tl.constexpr(MATRIX.bias.dtype))
        at_R = MATRIX.first_row + MATRIX.row_step * row_R
        bias_R += tl.load(bias + at_R, mask=is_there, other=0.0).to(tl.float32)
    return bias_R


@triton.jit
def load_values(slot, is_there, row_R, first_N, MATRIX: tl.constexpr):
    """[R, N, C] in float32, in units of their scale and of MATRIX.unit. Whole numbers are
    multiplied by 2 ** their lowest bit.
    """
    if MATRIX.kind == "awq":
        values_RNC = awq_values(slot, is_there, row_R, first_N, MATRIX)
    elif MATRIX.kind == "gptq" or MATRIX.kind == "gptq_v2":
        # A word is neighbouring columns of a row.
        words = numbers_at(slot, MATRIX.weight.values.offset, "int32")
        at_RN = row_R[:, None] + (first_N // _NIBBLES * MATRIX.column_stride)[None, :]
        is_there_RN1 = (is_there & (first_N < MATRIX.num_columns))[None, :, None]
        words_RN1 = tl.load(words + at_RN[:, :, None], mask=is_there_RN1, other=0)
        values_RNC = whole_numbers(words_RN1, column_places(first_N, MATRIX)[None, :, :], MATRIX)
    elif MATRIX.per_word > 1:
        values_RNC = row_values(slot, is_there, row_R, first_N, MATRIX)
    else:
        values = numbers_at(
            slot, MATRIX.weight.values.offset, tl.constexpr(MATRIX.weight.values.dtype)
        )
        at_NC = first_N[:, None] + tl.arange(0, MATRIX.chunk)[None, :]
        is_there_NC = is_there & (at_NC < MATRIX.num_columns)
        at_NC *= MATRIX.column_stride
        at_RNC = row_R[:, None, None] * MATRIX.row_stride + at_NC[None, :, :]
        values_RNC = tl.load(values + at_RNC, mask=is_there_NC[None, :, :], other=0).to(tl.float32)
    return values_RNC


@triton.jit
def row_values(slot, is_there, row_R, first_N, MATRIX: tl.constexpr):
    """For words along the rows. Words are little-endian: lower bits are earlier columns."""
    NUM_WORDS: tl.constexpr = MATRIX.chunk // MATRIX.per_word
    ROW: tl.constexpr = MATRIX.num_columns // MATRIX.per_word
    words = numbers_at(slot, MATRIX.weight.values.offset, "int32")
    at_NW = (first_N // MATRIX.per_word)[:, None] + tl.arange(0, NUM_WORDS)[None, :]
    at_RNW = row_R[:, None, None] * ROW + at_NW[None, :, :]
    is_there_NW1 = (is_there & (at_NW < ROW))[:, :, None]
    words_RNW1 = tl.load(words + at_RNW[:, :, :, None], mask=is_there_NW1[None, :, :, :], other=0)
    if MATRIX.number_bits > 0:
        places = tl.arange(0, MATRIX.per_word)[None, None, None, :]
        if MATRIX.kind == "int8":
            values = whole_numbers(words_RNW1 ^ _INT8_SIGNS, places, MATRIX)
            values -= whole_numbers(_INT8_SIGNS, places, MATRIX)
        else:
            values = whole_numbers(words_RNW1, places, MATRIX)
    elif MATRIX.kind == "mxfp4":
        values = float_values(words_RNW1, tl.arange(0, 4)[None, None, None, :] * 4, 12, 9, 0xE00)
    else:
        values = float_values(words_RNW1, tl.arange(0, 2)[None, None, None, :] * 8, 8, 7, 0x3F80)
        values = tl.where(tl.abs(values) == 1.875, float("nan"), values)
    return tl.reshape(values, (row_R.shape[0], first_N.shape[0], MATRIX.chunk))


@triton.jit
def awq_values(slot, is_there, row_R, first_N, MATRIX: tl.constexpr):
    """A word is 8 neighbouring rows of a column, as row_R has them."""
    ROWS: tl.constexpr = row_R.shape[0]
    NUM_WORDS: tl.constexpr = ROWS // _NIBBLES
    CHUNKS: tl.constexpr = first_N.shape[0]
    words = numbers_at(slot, MATRIX.weight.values.offset, "int32")
    # Neighbouring threads have chunks, not columns of one.
    place = tl.arange(0, MATRIX.chunk * CHUNKS)
    column = tl.min(first_N, 0) + place % CHUNKS * MATRIX.chunk + place // CHUNKS
    is_there_11X = (is_there & (column < MATRIX.num_columns))[None, None, :]
    first = tl.min(row_R, 0) // _NIBBLES
    if tl.constexpr(MATRIX.num_rows) % ROWS == 0 and tl.constexpr(MATRIX.first_row) % ROWS == 0:
        word_W = tl.multiple_of(first, NUM_WORDS) + tl.arange(0, NUM_WORDS)
    else:
        word_W = tl.minimum(first + tl.arange(0, NUM_WORDS), MATRIX.num_weight_rows // _NIBBLES - 1)
    at_WX = word_W[:, None] + (column * (MATRIX.column_stride // _NIBBLES))[None, :]
    words_W1X = tl.load(words + at_WX[:, None, :], mask=is_there_11X, other=0)
    place_8 = row_places(tl.arange(0, _NIBBLES), "awq")
    values_W8X = whole_numbers(words_W1X, place_8[None, :, None], MATRIX)
    return tl.permute(tl.reshape(values_W8X, (ROWS, MATRIX.chunk, CHUNKS)), (0, 2, 1))


@triton.jit
def column_places(first_N, MATRIX: tl.constexpr):
    """[N or 1, C]: the place of each column's number in its word, counted from the lowest bits; 0
    for awq, where a word has a single column.
    """
    places_NC = tl.arange(0, MATRIX.chunk)[None, :]
    if MATRIX.kind == "awq":
        places_NC *= 0
    elif MATRIX.chunk % MATRIX.per_word > 0:
        places_NC += first_N[:, None]
    return places_NC % MATRIX.per_word


@triton.jit
def row_places(row_R, KIND: tl.constexpr):
    """The place of each row's number in a word along columns. awq: rows 0, 2, 4, 6, 1, 3, ..."""
    place_R = row_R % _NIBBLES
    if KIND == "awq":
        place_R = place_R // 2 + place_R % 2 * 4
    return place_R


@triton.jit
def lowest_bit(place, MATRIX: tl.constexpr):
    """Of a number in its word, after numbers beyond the lower 24 bits were moved down."""
    return place % (24 // MATRIX.number_bits) * MATRIX.number_bits


@triton.jit
def whole_numbers(words, place, MATRIX: tl.constexpr):
    BITS: tl.constexpr = MATRIX.number_bits
    words = tl.where(place < 24 // BITS, words, words >> 24)
    mask = ((1 << BITS) - 1) << lowest_bit(place, MATRIX)
    return (words & mask).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(EXPONENT: tl.constexpr, less):
    return ((-less + (127 + EXPONENT)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float_values(
    words, first_bit, SIGN_SHIFT: tl.constexpr, SHIFT: tl.constexpr, REST: tl.constexpr
):
    """float8_e4m3fn or float4_e2m1 on any GPU. Two values at once are moved to the places that sign
    and other bits have in the two float16s of a word. The upper float16 has a column of the word's
    upper half.
    """
    words = words >> first_bit
    halves = ((words << SIGN_SHIFT) & _SIGNS) | ((words << SHIFT) & (REST | REST << 16))
    lower = halves.to(tl.int16).to(tl.float16, bitcast=True)
    upper = (halves >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.permute(tl.join(lower, upper), (0, 1, 2, 4, 3)).to(tl.float32)


@triton.jit
def load_scale(slot, at, mask, MATRIX: tl.constexpr):
    """In float32. A byte is an exponent of two plus 127."""
    scales = numbers_at(slot, MATRIX.weight.scale.offset, tl.constexpr(MATRIX.weight.scale.dtype))
    stored = tl.load(scales + at, mask=mask, other=0)
    if MATRIX.has_exponents:
        exponent = stored.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2 ** -127 has no exponent
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    return scale
