"""Packed weights of experts, described for the Triton functions that read them (packed.py). All
numbers here are known when a kernel is compiled.

A matrix is read in chunks: columns of a row that come with one load of 16 bytes and share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.triton.slot_mlp import LOAD_BYTES, Matrix, SlotMlp, plain_matrix
from moe_infinity.kernels.unpack import BLOCKS
from moe_infinity.layout import (
    EXPONENTS,
    NIBBLES,
    PLAIN,
    WORDS,
    Block,
    WeightLayout,
    block_of,
)

LOADED = {"int8": 16, "fp8": 16, "int4": 32, "mxfp4": 32, **dict.fromkeys(WORDS, 32)}  # values
BLOCK_CHUNKS = {"q8_0": 32, "q4_k": 32, "q6_k": 16, "ggml_mxfp4": 32}  # columns that share a scale
NUMBER_BITS = {"int8": 8, "int4": 4, **dict.fromkeys(WORDS, 4)}
# What values lack because their bits are read as those of a float16.
UNITS = {"fp8": 2.0**8, "mxfp4": 2.0**14}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix(Matrix):
    """[R, C]: some rows of a packed weight that may have more."""

    block: Block  # rows and columns of the weight that share a scale; all of it without scales

    @property
    def column_stride(self) -> int:
        """The distance from one row of words to the next in words; 1 for other kinds."""
        return self.weight.shape[0] if self.kind in WORDS else 1

    @property
    def block_rows(self) -> int:
        """Rows that share a scale."""
        return self.block[0]

    @property
    def block_columns(self) -> int:
        """Columns that share a scale."""
        return self.block[1]

    @property
    def num_scale_columns(self) -> int:
        """Scales of a row."""
        return -(-self.num_columns // self.block_columns)

    @property
    def has_zeros(self) -> bool:
        """Return True if another number than 0 stands for 0."""
        return self.weight.zeros is not None or self.kind == "int4"

    @property
    def has_exponents(self) -> bool:
        """Return True if scales are stored as bytes, exponents of two."""
        return self.weight.scale is not None and self.weight.scale.dtype in EXPONENTS

    @property
    def groups(self) -> ParamSpec | None:
        """The part that says which scale a column has; None: scales are in the order of columns."""
        return self.weight.groups if self.num_scale_columns > 1 else None

    @property
    def number_bits(self) -> int:
        """Bits of a whole number; 0 for floats."""
        return NUMBER_BITS.get(self.kind, 0)

    @property
    def per_word(self) -> int:
        """How many values are in an int32."""
        return {"fp8": 4, "mxfp4": 8}.get(self.kind, 32 // (self.number_bits or 32))

    @property
    def chunk(self) -> int:
        """Columns of a chunk, a power of two."""
        if self.kind in BLOCK_CHUNKS:
            return BLOCK_CHUNKS[self.kind]
        if self.groups is not None:
            return 1
        if self.kind in WORDS:
            return gcd(NIBBLES, self.block_columns)
        if self.num_scale_columns == 1:
            return LOADED[self.kind]
        return gcd(LOADED[self.kind], self.block_columns)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of GGML's formats; 0 for other kinds."""
        return BLOCKS[self._block_name][1] if self.kind in BLOCK_CHUNKS else 0

    @property
    def chunks_of_block(self) -> int:
        """Chunks of a block of GGML's formats; 0 for other kinds."""
        return BLOCKS[self._block_name][0] // self.chunk if self.kind in BLOCK_CHUNKS else 0

    @property
    def _block_name(self) -> str:
        return self.kind.removeprefix("ggml_")

    @property
    def scale_strides(self) -> tuple[int, int]:
        """The distance from one row of scales to the next, and from column to column."""
        if self.kind in WORDS:
            return 1, self.column_stride
        return self.num_scale_columns, 1

    @property
    def zeros_strides(self) -> tuple[int, int]:
        """The same for words of zeros."""
        if self.kind in WORDS:
            return 1, self.column_stride // NIBBLES
        return self.num_scale_columns, 1

    @property
    def unit(self) -> float:
        """The factor that values lack because their bits are read as those of another float."""
        return UNITS.get(self.kind, 1.0)

    @property
    def num_weight_rows(self) -> int:
        """Rows of the weight, up to the last one that belongs to this matrix."""
        return self.first_row + self.row_step * (self.num_rows - 1) + 1


def any_matrix(weight: WeightLayout) -> Matrix | None:
    """All rows of a weight, packed or plain. None: the functions of packed.py do not read it."""
    if weight.kind in PLAIN:
        return plain_matrix(weight)
    rows, columns = weight.shape
    if weight.kind in BLOCK_CHUNKS:
        return PackedMatrix(weight=weight, num_rows=rows, block=(rows, columns))
    if weight.kind not in LOADED or not weight.is_stored_in(8 * LOAD_BYTES // LOADED[weight.kind]):
        return None
    block = block_of(weight)
    if block is None or any(part.offset % LOAD_BYTES for part in weight.parts.values()):
        return None
    if weight.kind == "int8" and block != (1, columns):
        return None
    matrix = PackedMatrix(weight=weight, num_rows=rows, block=block)
    has_words = gcd(matrix.chunk, columns) % matrix.per_word == 0 or weight.kind in WORDS
    return matrix if has_words else None


def splits_words(mlp: SlotMlp) -> bool:
    """Return True if gate and up share words of awq, which packed.py does not read."""
    return any(
        matrix is not None
        and matrix.kind == "awq"
        and (matrix.first_row % NIBBLES or matrix.row_step > 1)
        for matrix in (mlp.gate, mlp.up)
    )


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
