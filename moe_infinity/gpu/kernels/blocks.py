"""Rows of a matrix in one of GGML's block formats, for Triton. Scales lie among the values, at
addresses that are multiples of 2 or of nothing. So bytes are loaded one by one: what
a warp loads is next to each other, and the hardware joins it.

A chunk is the columns that share a scale: 32, or 16 of q6_k. Legend: R rows, N chunks, C columns of
a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_values(slot, row_R, first_N, MATRIX: tl.constexpr):
    """Return [R, N, C] in float32: the weights."""
    values_RNC, scale_RN, minimum_RN = _block(slot, row_R, first_N, MATRIX)
    values_RNC = values_RNC.to(tl.float32) * scale_RN[:, :, None]
    if MATRIX.kind == "q4_k":
        values_RNC -= minimum_RN[:, :, None]
    return values_RNC


@triton.jit
def _block(slot, row_R, first_N, MATRIX: tl.constexpr):
    """Whole numbers [R, N, C], their scale [R, N], and what is to be subtracted after that."""
    ROW_BYTES: tl.constexpr = MATRIX.weight.values.shape[1]
    chunk_N = first_N // MATRIX.chunk
    at_RN = row_R.to(tl.int64)[:, None] * ROW_BYTES
    at_RN += (chunk_N // MATRIX.chunks_of_block * MATRIX.block_bytes)[None, :]
    block_RN = slot + MATRIX.weight.values.offset + at_RN
    there_RN = (first_N < MATRIX.num_columns)[None, :]
    chunk_N = chunk_N % MATRIX.chunks_of_block
    column_C = tl.arange(0, MATRIX.chunk)
    if MATRIX.kind == "q8_0":
        values_RNC, scale_RN, minimum_RN = _q8_0(block_RN, there_RN, column_C)
    elif MATRIX.kind == "q4_k":
        values_RNC, scale_RN, minimum_RN = _q4_k(block_RN, there_RN, chunk_N, column_C)
    elif MATRIX.kind == "q6_k":
        values_RNC, scale_RN, minimum_RN = _q6_k(block_RN, there_RN, chunk_N, column_C)
    else:
        values_RNC, scale_RN, minimum_RN = _mxfp4(block_RN, there_RN, column_C)
    return values_RNC, scale_RN, minimum_RN


@triton.jit
def _byte(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(at_RN, there_RN):
    """A float16 of two bytes, in float32."""
    bits = _byte(at_RN, there_RN) | (_byte(at_RN + 1, there_RN) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bytes(at_RN, there_RN, offset_NC):
    """[R, N, C]"""
    return _byte(at_RN[:, :, None] + offset_NC[None, :, :], there_RN[:, :, None])


@triton.jit
def _signed(byte):
    return byte - ((byte & 128) << 1)


@triton.jit
def _q8_0(block_RN, there_RN, column_C):
    """A scale, then 32 numbers."""
    values_RNC = _signed(_bytes(block_RN, there_RN, 2 + column_C[None, :]))
    return values_RNC, _half(block_RN, there_RN), 0.0


@triton.jit
def _q4_k(block_RN, there_RN, chunk_N, column_C):
    """The scales of scales and of minima; 8 of both in 6 bits each; then 32 bytes for two chunks,
    the lower halves for the first.
    """
    offset_NC = 16 + (chunk_N // 2 * 32)[:, None] + column_C[None, :]
    shift_N = chunk_N % 2 * 4
    values_RNC = (_bytes(block_RN, there_RN, offset_NC) >> shift_N[None, :, None]) & 15
    # Of the first four chunks both are whole in a byte; of the others parts are in two.
    is_first_N = (chunk_N < 4)[None, :]
    place_N = 4 + chunk_N % 4
    lower_RN = _byte(block_RN + place_N[None, :], there_RN)
    upper_RN = _byte(block_RN + place_N[None, :] + 4, there_RN)
    last_RN = _byte(block_RN + place_N[None, :] + 8, there_RN)
    scale_RN = tl.where(is_first_N, lower_RN & 63, (last_RN & 15) | (lower_RN >> 6 << 4))
    minimum_RN = tl.where(is_first_N, upper_RN & 63, (last_RN >> 4) | (upper_RN >> 6 << 4))
    scale_RN = _half(block_RN, there_RN) * scale_RN.to(tl.float32)
    return values_RNC, scale_RN, _half(block_RN + 2, there_RN) * minimum_RN.to(tl.float32)


@triton.jit
def _q6_k(block_RN, there_RN, chunk_N, column_C):
    """Decode a block of 256 numbers: the lower 4 bits, the upper 2, 16 scales, and their scale.
    Each half of the block is four runs of 32 columns, of which two share the bytes of lower bits
    and all those of upper bits.
    """
    half_N = chunk_N // 8
    run_N = chunk_N % 8 // 2
    within_NC = (chunk_N % 2 * 16)[:, None] + column_C[None, :]
    offset_NC = (half_N * 64 + run_N % 2 * 32)[:, None] + within_NC
    lower_RNC = _bytes(block_RN, there_RN, offset_NC) >> (run_N // 2 * 4)[None, :, None] & 15
    offset_NC = 128 + (half_N * 32)[:, None] + within_NC
    upper_RNC = _bytes(block_RN, there_RN, offset_NC) >> (run_N * 2)[None, :, None] & 3
    values_RNC = (lower_RNC | upper_RNC << 4) - 32
    scale_RN = _signed(_byte(block_RN + 192 + chunk_N[None, :], there_RN)).to(tl.float32)
    return values_RNC, _half(block_RN + 208, there_RN) * scale_RN, 0.0


@triton.jit
def _mxfp4(block_RN, there_RN, column_C):
    """An exponent of two, then 16 bytes: the lower halves are the first 16 columns. Numbers are
    twice those of float4_e2m1.
    """
    nibbles_RNC = _bytes(block_RN, there_RN, 1 + column_C[None, :] % 16)
    nibbles_RNC = nibbles_RNC >> (column_C // 16 * 4)[None, None, :]
    size_RNC = nibbles_RNC & 7
    doubled = (2 + (size_RNC & 1)) << tl.maximum((size_RNC >> 1) - 1, 0)
    size_RNC = tl.where(size_RNC < 2, size_RNC, doubled)
    values_RNC = tl.where((nibbles_RNC & 8) != 0, -size_RNC, size_RNC)
    exponent_RN = _byte(block_RN, there_RN)
    bits_RN = tl.where(exponent_RN < 2, 1 << (21 + exponent_RN), (exponent_RN - 1) << 23)
    return values_RNC, bits_RN.to(tl.float32, bitcast=True), 0.0
