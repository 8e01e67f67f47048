"""Tiles of weights in a slot, whose values are decoded in registers: the packed formats of
kernels/unpack.py, written for Triton; blocks.py has GGML's. `any_tile` takes the place of
`plain_tile` in the kernels of kernels/triton/experts.py.

A tile is [R rows, N chunks, C columns of a chunk]. Words are loaded with a last dimension of 1,
which becomes that of the numbers in a word. So these stay in the thread that loaded the word.

Every function has one `return`: what follows a `return` in a branch would be compiled for every
kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_infinity.gpu.kernels.blocks import block_values
from moe_infinity.kernels.triton.experts import floats_at, plain_tile
from moe_infinity.kernels.triton.slot_mlp import LOAD_BYTES
from moe_infinity.kernels.unpack import ZERO_OF_SYMMETRIC
from moe_infinity.layout import NIBBLES

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)
_NIBBLES = tl.constexpr(NIBBLES)
_SYMMETRIC_ZERO = tl.constexpr(float(ZERO_OF_SYMMETRIC))
_SIGNS = tl.constexpr(-0x7FFF8000)  # of two float16s in an int32
_LARGE = tl.constexpr(0x4B000000)  # the bits of 2 ** 23: a number of 8 bits added to them is added
_LARGE_FLOAT = tl.constexpr(2.0**23)


@triton.jit
def any_tile(slot, row_R, first_column, MATRIX: tl.constexpr, COLUMNS: tl.constexpr):
    """Return [R, COLUMNS]: some rows and columns of a weight, unpacked, in float32; those of a
    plain kind in their own dtype. 0 beyond the last column.
    """
    if MATRIX.kind == "bf16" or MATRIX.kind == "f16" or MATRIX.kind == "f32":
        tile_RK = plain_tile(slot, row_R, first_column, MATRIX, COLUMNS)
    else:
        row_R = MATRIX.first_row + MATRIX.row_step * row_R
        first_N = first_column + tl.arange(0, COLUMNS // MATRIX.chunk) * MATRIX.chunk
        if MATRIX.chunks_of_block > 0:
            tile_RNC = block_values(slot, row_R, first_N, MATRIX)
        else:
            tile_RNC = _values(slot, row_R, first_N, MATRIX)
        tile_RK = tl.reshape(tile_RNC, (row_R.shape[0], COLUMNS))
    return tile_RK


@triton.jit
def _values(slot, row_R, first_N, MATRIX: tl.constexpr):
    """[R, N, C] in float32, of what has its scales apart."""
    is_there_N = first_N < MATRIX.num_columns
    group_N = _groups(slot, is_there_N, first_N, MATRIX)
    if MATRIX.kind == "awq":
        values_RNC = _awq_values(slot, row_R, first_N, MATRIX)
    elif MATRIX.kind == "gptq" or MATRIX.kind == "gptq_v2":
        values_RNC = _gptq_values(slot, row_R, first_N, MATRIX)
    else:
        values_RNC = _row_values(slot, row_R, first_N, MATRIX)
    if MATRIX.has_zeros:
        values_RNC -= _zeros(slot, is_there_N, row_R, group_N, MATRIX)[:, :, None]
    if MATRIX.weight.scale is not None:
        values_RNC *= _scales(slot, is_there_N, row_R, group_N, MATRIX)[:, :, None]
    return values_RNC


@triton.jit
def _words_at(slot, OFFSET: tl.constexpr):
    return tl.multiple_of((slot + OFFSET).to(tl.pointer_type(tl.int32)), _LOAD_BYTES)


@triton.jit
def _groups(slot, is_there_N, first_N, MATRIX: tl.constexpr):
    """Return for each chunk the column of its scales."""
    group_N = first_N // MATRIX.block_columns
    if MATRIX.groups is not None:
        group_N = tl.load(_words_at(slot, MATRIX.groups.offset) + first_N, mask=is_there_N, other=0)
        group_N = tl.minimum(tl.maximum(group_N, 0), MATRIX.num_scale_columns - 1)
    return group_N


@triton.jit
def _zeros(slot, is_there_N, row_R, group_N, MATRIX: tl.constexpr):
    """[R, N] in float32, or one for all: the number that stands for 0."""
    if MATRIX.weight.zeros is not None:
        zeros = _words_at(slot, MATRIX.weight.zeros.offset)
        word_R = row_R // _NIBBLES * MATRIX.zeros_strides[0]
        word_RN = word_R[:, None] + (group_N * MATRIX.zeros_strides[1])[None, :]
        words_RN = tl.load(zeros + word_RN, mask=is_there_N[None, :], other=0)
        if MATRIX.kind == "gptq":  # zeros are stored less one
            words_RN += 0x11111111
        place_R = _row_places(row_R, tl.constexpr(MATRIX.kind))
        zeros_RN = ((words_RN >> (4 * place_R)[:, None]) & 15).to(tl.float32)
    else:
        zeros_RN = tl.full((1, 1), _SYMMETRIC_ZERO, tl.float32)
    return zeros_RN


@triton.jit
def _scales(slot, is_there_N, row_R, group_N, MATRIX: tl.constexpr):
    """[R, N] in float32; [R, 1] if rows have one scale. A byte is an exponent of two plus 127."""
    SCALE: tl.constexpr = MATRIX.weight.scale
    at_R = row_R // MATRIX.block_rows * MATRIX.scale_strides[0]
    if MATRIX.num_scale_columns == 1:
        at_RN = at_R[:, None]
        is_there_RN = at_RN >= 0
    else:
        at_RN = at_R[:, None] + (group_N * MATRIX.scale_strides[1])[None, :]
        is_there_RN = is_there_N[None, :]
    if MATRIX.has_exponents:
        exponent_RN = tl.load(slot + SCALE.offset + at_RN, mask=is_there_RN, other=0).to(tl.int32)
        # 2 ** -127 has no exponent.
        bits_RN = tl.where(exponent_RN == 0, 1 << 22, exponent_RN << 23)
        scale_RN = bits_RN.to(tl.float32, bitcast=True)
    elif MATRIX.has_float8_scales:  # a float16 that lacks a factor of 2 ** 8
        byte_RN = tl.load(slot + SCALE.offset + at_RN, mask=is_there_RN, other=0).to(tl.int32)
        bits_RN = ((byte_RN & 0x80) << 8) | ((byte_RN & 0x7F) << 7)
        scale_RN = bits_RN.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        scales = floats_at(slot, SCALE.offset, tl.constexpr(SCALE.dtype))
        scale_RN = tl.load(scales + at_RN, mask=is_there_RN, other=0).to(tl.float32)
    if MATRIX.weight.global_scale is not None:
        number = tl.load(floats_at(slot, MATRIX.weight.global_scale.offset, "float32"))
        scale_RN = scale_RN / number if MATRIX.kind == "nvfp4_divided" else scale_RN * number
    return scale_RN


@triton.jit
def _gptq_values(slot, row_R, first_N, MATRIX: tl.constexpr):
    """A word is 8 neighbouring columns of a row."""
    words = _words_at(slot, MATRIX.weight.values.offset)
    at_RN = row_R[:, None] + (first_N // _NIBBLES * MATRIX.column_stride)[None, :]
    is_there_N = first_N < MATRIX.num_columns
    words_RN1 = tl.load(words + at_RN[:, :, None], mask=is_there_N[None, :, None], other=0)
    place_NC = (first_N[:, None] + tl.arange(0, MATRIX.chunk)[None, :]) % _NIBBLES
    return _whole_numbers(words_RN1, place_NC[None, :, :], 4)


@triton.jit
def _awq_values(slot, row_R, first_N, MATRIX: tl.constexpr):
    """A word is 8 neighbouring rows of a column, as row_R has them."""
    ROWS: tl.constexpr = row_R.shape[0]
    NUM_WORDS: tl.constexpr = ROWS // _NIBBLES
    CHUNKS: tl.constexpr = first_N.shape[0]
    words = _words_at(slot, MATRIX.weight.values.offset)
    # Neighbouring threads have chunks, not columns of one.
    place = tl.arange(0, MATRIX.chunk * CHUNKS)
    column = tl.min(first_N, 0) + place % CHUNKS * MATRIX.chunk + place // CHUNKS
    is_there_11X = (column < MATRIX.num_columns)[None, None, :]
    first = tl.min(row_R, 0) // _NIBBLES
    if tl.constexpr(MATRIX.num_rows) % ROWS == 0 and tl.constexpr(MATRIX.first_row) % ROWS == 0:
        word_W = tl.multiple_of(first, NUM_WORDS) + tl.arange(0, NUM_WORDS)
    else:
        word_W = tl.minimum(first + tl.arange(0, NUM_WORDS), MATRIX.num_weight_rows // _NIBBLES - 1)
    at_WX = word_W[:, None] + (column * (MATRIX.column_stride // _NIBBLES))[None, :]
    words_W1X = tl.load(words + at_WX[:, None, :], mask=is_there_11X, other=0)
    place_8 = _row_places(tl.arange(0, _NIBBLES), "awq")
    values_W8X = _whole_numbers(words_W1X, place_8[None, :, None], 4)
    return tl.permute(tl.reshape(values_W8X, (ROWS, MATRIX.chunk, CHUNKS)), (0, 2, 1))


@triton.jit
def _row_values(slot, row_R, first_N, MATRIX: tl.constexpr):
    """For words along the rows. Words are little-endian: lower bits are earlier columns."""
    NUM_WORDS: tl.constexpr = MATRIX.chunk // MATRIX.per_word
    ROW: tl.constexpr = MATRIX.num_columns // MATRIX.per_word
    words = _words_at(slot, MATRIX.weight.values.offset)
    at_NW = (first_N // MATRIX.per_word)[:, None] + tl.arange(0, NUM_WORDS)[None, :]
    at_RNW = row_R[:, None, None] * ROW + at_NW[None, :, :]
    is_there_NW1 = (at_NW < ROW)[:, :, None]
    words_RNW1 = tl.load(words + at_RNW[:, :, :, None], mask=is_there_NW1[None, :, :, :], other=0)
    place_111P = tl.arange(0, MATRIX.per_word)[None, None, None, :]
    if MATRIX.kind == "int8":  # inverting the sign of an int8 adds 128
        values = _whole_numbers(words_RNW1 ^ -0x7F7F7F80, place_111P, 8) - 128.0
    elif MATRIX.kind == "int4":
        values = _whole_numbers(words_RNW1, place_111P, 4)
    elif MATRIX.is_fp4:
        values = _float_values(words_RNW1, tl.arange(0, 4)[None, None, None, :] * 4, 12, 9, 0xE00)
    else:
        values = _float_values(words_RNW1, tl.arange(0, 2)[None, None, None, :] * 8, 8, 7, 0x3F80)
        values = tl.where(tl.abs(values) == 1.875, float("nan"), values)
    return tl.reshape(values * MATRIX.unit, (row_R.shape[0], first_N.shape[0], MATRIX.chunk))


@triton.jit
def _row_places(row_R, KIND: tl.constexpr):
    """The place of each row's number in a word along columns. awq: rows 0, 2, 4, 6, 1, 3, ..."""
    place_R = row_R % _NIBBLES
    if KIND == "awq":
        place_R = place_R // 2 + place_R % 2 * 4
    return place_R


@triton.jit
def _whole_numbers(words, place, BITS: tl.constexpr):
    """Numbers at some places of words, in float32. A conversion would take longer than this."""
    bits = ((words >> (place * BITS)) & ((1 << BITS) - 1)) | _LARGE
    return bits.to(tl.float32, bitcast=True) - _LARGE_FLOAT


@triton.jit
def _float_values(
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
