"""Products of x with rows of a matrix that lies in a slot, decoded in registers: what the packed
formats (unpack.py) mean, written for Triton.

A tile is [R rows, N chunks, C columns of a chunk]. A thread loads a chunk of a row at once and sums
it up alone; scales are multiplied after that, one for each chunk.

Every function has one `return`: what follows one in a branch would be compiled for every kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_infinity.kernels.slot_mlp import LOAD_BYTES
from moe_infinity.kernels.unpack import NIBBLES, ZERO_OF_SYMMETRIC

_LOAD_BYTES, _NIBBLES = tl.constexpr(LOAD_BYTES), tl.constexpr(NIBBLES)
_SYMMETRIC_ZERO = tl.constexpr(ZERO_OF_SYMMETRIC)


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
    is_there_RN = (is_there & (first_N < MATRIX.num_columns))[None, :]
    group_N = first_N // MATRIX.block_columns
    if MATRIX.groups is not None:
        groups = numbers_at(slot, MATRIX.groups.offset, "int32")
        group_N = tl.load(groups + first_N, mask=is_there & (first_N < MATRIX.num_columns), other=0)
        group_N = tl.minimum(tl.maximum(group_N, 0), MATRIX.num_scale_columns - 1)
    values_RNC = load_values(slot, is_there, row_R, first_N, MATRIX)
    if MATRIX.zeros is not None:
        zeros = numbers_at(slot, MATRIX.zeros.offset, "int32")
        word_R = row_R // _NIBBLES * MATRIX.zeros_strides[0]
        word_RN = word_R[:, None] + (group_N * MATRIX.zeros_strides[1])[None, :]
        words_RN = tl.load(zeros + word_RN, mask=is_there_RN, other=0)
        if MATRIX.kind == "gptq":  # zeros are stored less one
            words_RN += 0x11111111
        zero_RN = (words_RN >> shift_of(row_R, tl.constexpr(MATRIX.kind))[:, None]) & 15
        values_RNC -= zero_RN.to(tl.float32)[:, :, None]
    elif MATRIX.kind == "int4":
        values_RNC -= _SYMMETRIC_ZERO
    sums_RN = tl.sum(values_RNC * x_NC[None, :, :], 2) * MATRIX.unit
    if MATRIX.scale is not None:
        at_R = row_R // MATRIX.block_rows * MATRIX.scale_strides[0]
        if MATRIX.num_scale_columns == 1:
            sums_RN *= load_scale(slot, at_R, is_there, MATRIX)[:, None]
        else:
            at_RN = at_R[:, None] + (group_N * MATRIX.scale_strides[1])[None, :]
            sums_RN *= load_scale(slot, at_RN, is_there_RN, MATRIX)
    return sums_RN


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
    """[R, N, C] in float32, in units of their scale and of MATRIX.unit."""
    if MATRIX.has_nibbles:
        # Two columns to a byte, the lower bits first; words are little-endian.
        HALF: tl.constexpr = MATRIX.chunk // 2
        byte = numbers_at(slot, MATRIX.values.offset, "uint8")
        at_NC = (first_N // 2)[:, None] + tl.arange(0, HALF)[None, :]
        is_there_NC = is_there & (at_NC < MATRIX.num_columns // 2)
        at_RNC = row_R[:, None, None] * (MATRIX.num_columns // 2) + at_NC[None, :, :]
        byte_RNC = tl.load(byte + at_RNC, mask=is_there_NC[None, :, :], other=0)
        low_RNC = nibble_value(byte_RNC & 15, tl.constexpr(MATRIX.kind))
        high_RNC = nibble_value(byte_RNC >> 4, tl.constexpr(MATRIX.kind))
        values_RNC = tl.interleave(low_RNC, high_RNC)
    elif MATRIX.kind == "awq":
        values_RNC = awq_values(slot, is_there, row_R, first_N, MATRIX)
    elif MATRIX.kind == "gptq" or MATRIX.kind == "gptq_v2":
        values_RNC = gptq_values(slot, is_there, row_R, first_N, MATRIX)
    else:
        values = numbers_at(slot, MATRIX.values.offset, tl.constexpr(MATRIX.values.dtype))
        at_NC = first_N[:, None] + tl.arange(0, MATRIX.chunk)[None, :]
        is_there_NC = is_there & (at_NC < MATRIX.num_columns)
        at_NC *= MATRIX.column_stride
        at_RNC = row_R[:, None, None] * MATRIX.row_stride + at_NC[None, :, :]
        values_RNC = tl.load(values + at_RNC, mask=is_there_NC[None, :, :], other=0)
        is_fp8: tl.constexpr = MATRIX.kind == "fp8"
        values_RNC = float8_value(values_RNC) if is_fp8 else values_RNC.to(tl.float32)
    return values_RNC


@triton.jit
def gptq_values(slot, is_there, row_R, first_N, MATRIX: tl.constexpr):
    """A word is neighbouring columns of a row."""
    words = numbers_at(slot, MATRIX.values.offset, "int32")
    at_RN = row_R[:, None] + (first_N // _NIBBLES * MATRIX.column_stride)[None, :]
    is_there_RN = (is_there & (first_N < MATRIX.num_columns))[None, :]
    words_RN = tl.load(words + at_RN, mask=is_there_RN, other=0)
    shift_NC = (first_N[:, None] + tl.arange(0, MATRIX.chunk)[None, :]) % _NIBBLES * 4
    return ((words_RN[:, :, None] >> shift_NC[None, :, :]) & 15).to(tl.float32)


@triton.jit
def awq_values(slot, is_there, row_R, first_N, MATRIX: tl.constexpr):
    """A word is 8 neighbouring rows of a column, as row_R has them."""
    ROWS: tl.constexpr = row_R.shape[0]
    NUM_WORDS: tl.constexpr = ROWS // _NIBBLES
    CHUNKS: tl.constexpr = first_N.shape[0]
    words = numbers_at(slot, MATRIX.values.offset, "int32")
    at_NC = first_N[:, None] + tl.arange(0, MATRIX.chunk)[None, :]
    is_there_NC = is_there & (at_NC < MATRIX.num_columns)
    first = tl.min(row_R, 0) // _NIBBLES
    if tl.constexpr(MATRIX.num_rows) % ROWS == 0 and tl.constexpr(MATRIX.first_row) % ROWS == 0:
        word_W = tl.multiple_of(first, NUM_WORDS) + tl.arange(0, NUM_WORDS)
    else:
        word_W = tl.minimum(first + tl.arange(0, NUM_WORDS), MATRIX.num_weight_rows // _NIBBLES - 1)
    at_WNC = word_W[:, None, None] + at_NC[None, :, :] * (MATRIX.column_stride // _NIBBLES)
    words_WNC = tl.load(words + at_WNC, mask=is_there_NC[None, :, :], other=0)
    shift_8 = shift_of(tl.arange(0, _NIBBLES), "awq")
    values_W8NC = (words_WNC[:, None, :, :] >> shift_8[None, :, None, None]) & 15
    return tl.reshape(values_W8NC, (ROWS, CHUNKS, MATRIX.chunk)).to(tl.float32)


@triton.jit
def shift_of(row_R, KIND: tl.constexpr):
    """Of the nibble of a row, in a word of rows; awq has them in the order 0, 2, 4, 6, 1, 3, ..."""
    place_R = row_R % _NIBBLES
    if KIND == "awq":
        place_R = place_R // 2 + place_R % 2 * 4
    return place_R * 4


@triton.jit
def nibble_value(nibble, KIND: tl.constexpr):
    """mxfp4: the sign to bit 15, exponent and mantissa to bits 9-11 of a float16."""
    if KIND == "mxfp4":
        bits = nibble.to(tl.int16)
        bits = ((bits & 8) << 12) | ((bits & 7) << 9)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = nibble.to(tl.float32)
    return value


@triton.jit
def float8_value(byte):
    """float8_e4m3fn on any GPU: the sign to bit 15, the rest to bits 7-13 of a float16."""
    byte = byte.to(tl.int16)
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def load_scale(slot, at, mask, MATRIX: tl.constexpr):
    """In float32; uint8 is an exponent of two, 127 standing for 2 ** 0."""
    scales = numbers_at(slot, MATRIX.scale.offset, tl.constexpr(MATRIX.scale.dtype))
    stored = tl.load(scales + at, mask=mask, other=0)
    if MATRIX.scale.dtype == "uint8":
        exponent = stored.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2 ** -127 has no exponent
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    return scale
