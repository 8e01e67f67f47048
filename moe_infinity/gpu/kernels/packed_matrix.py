"""Packed weights of experts, described for the Triton functions that read them (packed.py). All
numbers here are known when a kernel is compiled.

A matrix is read in chunks: columns of a row that come with one load of 16 bytes and share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.triton.slot_mlp import LOAD_BYTES, Matrix, SlotMlp, plain_matrix
from moe_infinity.kernels.unpack import BLOCKS
from moe_infinity.layout import (
    EXPONENTS,
    FLOAT8,
    NIBBLES,
    PLAIN,
    WORDS,
    Block,
    WeightLayout,
    block_of,
)

FP4 = ("mxfp4", "nvfp4", "nvfp4_divided")
LOADED = {"int8": 16, "fp8": 16, "int4": 32, **dict.fromkeys(FP4 + WORDS, 32)}  # values
BLOCK_CHUNKS = {"q8_0": 32, "q4_k": 32, "q6_k": 16, "ggml_mxfp4": 32}  # columns that share a scale
NUMBER_BITS = {"int8": 8, "int4": 4, **dict.fromkeys(WORDS, 4)}
# What values lack because their bits are read as those of a float16.
UNITS = {"fp8": 2.0**8, **dict.fromkeys(FP4, 2.0**14)}


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
    def has_float8_scales(self) -> bool:
        """Return True if scales are stored as float8_e4m3fn."""
        return self.weight.scale is not None and self.weight.scale.dtype == FLOAT8

    @property
    def is_fp4(self) -> bool:
        """Return True if values are floats of 4 bits."""
        return self.kind in FP4

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
        return {"fp8": 4, **dict.fromkeys(FP4, 8)}.get(self.kind, 32 // (self.number_bits or 32))

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
