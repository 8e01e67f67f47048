"""The MLP of the experts of one MoE layer, described for kernels that find an expert by the address
of its slot. All numbers here are known when a kernel is compiled.

    hidden = activation(gate x + bias, up x + bias)        out = down hidden + bias

For experts without a gate, `gate` is the one matrix before `down`.

A matrix is read in chunks: columns of a row that come with one load of 16 bytes and share a scale.
Where a weight is stored as [C, R], a load has neighbouring rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import gcd

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.activation import Activation
from moe_infinity.kernels.unpack import BLOCKS
from moe_infinity.layout import EXPONENTS, NIBBLES, WORDS, Block, WeightLayout, block_of

LOAD_BYTES = 16
LOADED = {  # values in one load
    "bf16": 8, "f16": 8, "f32": 4, "int8": 16, "fp8": 16, "int4": 32, "mxfp4": 32,
    **dict.fromkeys(WORDS, 32),
}  # fmt: skip
# A whole number n is read as n * 2 ** (bit - 149). x is multiplied by 2 ** (X_EXPONENT - bit), and
# sums by the rest of that power. For x from 2 ** -41 to 2 ** 63 this changes no rounding.
X_EXPONENT = 64
BLOCK_CHUNKS = {"q8_0": 32, "q4_k": 32, "q6_k": 16, "ggml_mxfp4": 32}  # columns that share a scale
NUMBER_BITS = {"int8": 8, "int4": 4, **dict.fromkeys(WORDS, 4)}
UNITS = {"fp8": 2.0**8, "mxfp4": 2.0**14, **dict.fromkeys(NUMBER_BITS, 2.0 ** (149 - X_EXPONENT))}


@dataclass(frozen=True, slots=True)
class Matrix:
    """[R, C]: some rows of a weight that may have more."""

    weight: WeightLayout
    num_rows: int
    block: Block  # rows and columns of the weight that share a scale; all of it without scales
    first_row: int = 0  # of the weight: row 0
    row_step: int = 1  # and how far it is to row 1; 2 where gate and up alternate
    bias: ParamSpec | None = None

    @property
    def kind(self) -> str:
        return self.weight.kind

    @property
    def num_columns(self) -> int:
        return self.weight.shape[1]

    @property
    def column_stride(self) -> int:
        """In values; for WORDS in rows of words. R where the weight is stored as [C, R], else 1."""
        lies_transposed = self.weight.is_transposed if self.is_plain else self.kind in WORDS
        return self.weight.shape[0] if lies_transposed else 1

    @property
    def block_rows(self) -> int:
        return self.block[0]

    @property
    def block_columns(self) -> int:
        return self.block[1]

    @property
    def num_scale_columns(self) -> int:
        return -(-self.num_columns // self.block_columns)

    @property
    def is_plain(self) -> bool:
        """Whether values are floats as they are."""
        return self.weight.unpack is None

    @property
    def has_zeros(self) -> bool:
        """Whether numbers have another one than 0 for 0."""
        return self.weight.zeros is not None or self.kind == "int4"

    @property
    def has_exponents(self) -> bool:
        """Whether scales are stored as bytes, exponents of two."""
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
        """How many values are in an int32; 1 where they are loaded as they are."""
        return {"fp8": 4, "mxfp4": 8}.get(self.kind, 32 // (self.number_bits or 32))

    @property
    def chunk(self) -> int:
        """Columns, a power of two."""
        if self.kind in BLOCK_CHUNKS:
            return BLOCK_CHUNKS[self.kind]
        if self.groups is not None:
            return 1
        if self.kind in WORDS:
            return gcd(NIBBLES, self.block_columns)
        if self.column_stride > 1:
            return 1
        if self.num_scale_columns == 1:
            return LOADED[self.kind]
        return gcd(LOADED[self.kind], self.block_columns)

    @property
    def block_bytes(self) -> int:
        """Of GGML's formats, else 0."""
        return BLOCKS[self._block_name][1] if self.kind in BLOCK_CHUNKS else 0

    @property
    def chunks_of_block(self) -> int:
        """Likewise."""
        return BLOCKS[self._block_name][0] // self.chunk if self.kind in BLOCK_CHUNKS else 0

    @property
    def _block_name(self) -> str:
        return self.kind.removeprefix("ggml_")

    @property
    def row_stride(self) -> int:
        return self.num_columns if self.column_stride == 1 else 1

    @property
    def scale_strides(self) -> tuple[int, int]:
        """From one row of scales to the next, and from column to column."""
        if self.kind in WORDS:
            return 1, self.column_stride
        return self.num_scale_columns, 1

    @property
    def zeros_strides(self) -> tuple[int, int]:
        """Of words."""
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


@dataclass(frozen=True, slots=True)
class SlotMlp:
    """The experts of one MoE layer. D model width, F expert width."""

    gate: Matrix  # [F, D]
    up: Matrix | None  # [F, D]; None without a gate
    down: Matrix  # [D, F]
    activation: Activation
    num_bytes: int  # of a slot that are read
    weighs_input: bool  # the routing weight scales x, not the output


def slot_mlp(
    up: Sequence[WeightLayout],
    down: WeightLayout,
    *,
    activation: Activation,
    biases: Sequence[ParamSpec] = (),
    is_interleaved: bool = False,
    weighs_input: bool = False,
) -> SlotMlp | None:
    """`up` is gate and up: two weights, or one with all rows of gate before those of up or, with
    `is_interleaved`, with alternating rows. Without a gate it is one weight. There are as many
    biases as weights, down's last, or none. None: kernels do not read these weights.
    """
    matrices = [_matrix(weight) for weight in (*up, down)]
    if len(biases) not in (0, len(matrices)) or None in matrices:
        return None
    *halves, last = [
        replace(matrix, bias=bias)
        for matrix, bias in zip_longest(matrices, biases)
        if matrix is not None
    ]
    is_gated = activation.is_gated
    if is_gated and len(halves) == 1 and halves[0].num_rows % 2 == 0:
        width = halves[0].num_rows // 2
        step = 2 if is_interleaved else 1
        half = replace(halves[0], num_rows=width, row_step=step)
        halves = [half, replace(half, first_row=1 if is_interleaved else width)]
    elif is_interleaved:
        return None
    if any(m.kind == "awq" and (m.first_row % NIBBLES or m.row_step > 1) for m in halves):
        return None
    kinds = {(m.kind, m.num_rows, m.num_columns, m.chunk) for m in halves}
    if len(halves) != 1 + is_gated or len(kinds) != 1:
        return None
    gate = halves[0]
    up_half = halves[1] if is_gated else None
    if (gate.num_rows, gate.num_columns) != (last.num_columns, last.num_rows):
        return None
    ends = [weight.end for weight in (*up, down)]
    num_bytes = max(*ends, *(bias.offset + bias.num_bytes for bias in biases))
    return SlotMlp(gate, up_half, last, activation, num_bytes, weighs_input)


def _matrix(weight: WeightLayout) -> Matrix | None:
    """All rows of a weight. None: kernels do not read it."""
    if weight.kind in BLOCK_CHUNKS:
        rows, columns = weight.shape
        return Matrix(weight, rows, block=(rows, columns))
    if weight.kind not in LOADED or not weight.is_stored_in(8 * LOAD_BYTES // LOADED[weight.kind]):
        return None
    if any(part.offset % LOAD_BYTES for part in weight.parts.values()):
        return None
    rows, columns = weight.shape
    if weight.scale is None:
        return Matrix(weight, rows, block=(rows, columns))
    block = block_of(weight)
    if block is None or (weight.kind == "int8" and block != (1, columns)):
        return None
    matrix = Matrix(weight, rows, block)
    has_words = gcd(matrix.chunk, columns) % matrix.per_word == 0 or weight.kind in WORDS
    return matrix if has_words else None
