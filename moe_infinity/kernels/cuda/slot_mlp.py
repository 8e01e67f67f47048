"""The MLP of the experts of one MoE row, described for kernels that find an expert by the address
of its slot: everything is a number known when they are compiled.

    hidden = activation(gate x + bias, up x + bias)        out = down hidden + bias

Of experts without a gate, the one matrix before `down` stands in its place.

A matrix is read in chunks: columns of a row that one 16-byte load brings and that share a scale.
Where a weight lies as [C, R], a load brings neighbouring rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import gcd, prod

from moe_infinity.checkpoint.layout import (
    EXPONENTS,
    PLAIN,
    WORDS,
    StoredPart,
    StoredWeight,
    block_of,
)
from moe_infinity.kernels.activation import Activation
from moe_infinity.kernels.unpack import NIBBLES

LOAD_BYTES = 16
VALUES = {  # of a load
    "bf16": 8, "f16": 8, "f32": 4, "int8": 16, "fp8": 16, "int4": 32, "mxfp4": 32,
    **dict.fromkeys(WORDS, 32),
}  # fmt: skip
# Whole numbers are read as n * 2 ** (bit - 149); x is multiplied by 2 ** (X_EXPONENT - bit), and
# sums by the rest. Products are rounded as ever for x from 2 ** -41 to 2 ** 63.
X_EXPONENT = 64
NUMBER_BITS = {"int8": 8, "int4": 4, **dict.fromkeys(WORDS, 4)}
UNITS = {"fp8": 2.0**8, "mxfp4": 2.0**14, **dict.fromkeys(NUMBER_BITS, 2.0 ** (149 - X_EXPONENT))}


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers that lie in every slot."""

    offset: int  # bytes from the start of the slot, a multiple of LOAD_BYTES
    dtype: str  # torch's name, but "uint8" for all exponents of two


@dataclass(frozen=True, slots=True)
class Matrix:
    """[R, C]: some rows of a weight that may have more."""

    kind: str
    num_rows: int
    num_columns: int
    values: Part
    first_row: int = 0  # of the weight: row 0
    row_step: int = 1  # and how far it is to row 1; 2 where gate and up alternate
    column_stride: int = 1  # in numbers; where the weight lies as [C, R], its R
    scale: Part | None = None
    zeros: Part | None = None  # of int4 and WORDS, packed along rows
    groups: Part | None = None  # which scale a column has, if that is not in order
    bias: Part | None = None
    block_rows: int = 1  # rows and columns of the weight that share a scale
    block_columns: int = 1
    num_scale_columns: int = 1

    @property
    def number_bits(self) -> int:
        """Of whole numbers; 0 for floats."""
        return NUMBER_BITS.get(self.kind, 0)

    @property
    def per_word(self) -> int:
        """How many values are in an int32; 1 where they are loaded as they are."""
        return {"fp8": 4, "mxfp4": 8}.get(self.kind, 32 // (self.number_bits or 32))

    @property
    def chunk(self) -> int:
        """Columns, a power of two."""
        if self.groups is not None:
            return 1
        if self.kind in WORDS:
            return gcd(NIBBLES, self.block_columns)
        if self.column_stride > 1:
            return 1
        if self.num_scale_columns == 1:
            return VALUES[self.kind]
        return gcd(VALUES[self.kind], self.block_columns)

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
        """What values lack whose bits are read as those of another float."""
        return UNITS.get(self.kind, 1.0)

    @property
    def num_weight_rows(self) -> int:
        """Of the weight, as far as this reads it."""
        return self.first_row + self.row_step * (self.num_rows - 1) + 1


@dataclass(frozen=True, slots=True)
class SlotMlp:
    """D model width, F expert width."""

    gate: Matrix  # [F, D]
    up: Matrix | None  # [F, D]; None without a gate
    down: Matrix  # [D, F]
    activation: Activation
    num_bytes: int  # of a slot that are read
    weighs_input: bool  # by the weight of its routing, instead of what comes out


def slot_mlp(
    up: Sequence[StoredWeight],
    down: StoredWeight,
    *,
    activation: Activation,
    biases: Sequence[StoredPart] = (),
    is_interleaved: bool = False,
    weighs_input: bool = False,
) -> SlotMlp | None:
    """`up` is gate and up: two weights, or one with gate's rows before up's, or, interleaved, with
    gate's rows and up's in turn; one weight without a gate. As many biases as weights, down's
    last, or none. None: kernels cannot read it.
    """
    matrices = [_matrix(weight) for weight in (*up, down)]
    if len(biases) not in (0, len(matrices)) or None in matrices:
        return None
    *halves, last = [
        replace(matrix, bias=None if bias is None else _part(bias))
        for matrix, bias in zip_longest(matrices, biases)
        if matrix is not None
    ]
    is_gated = activation.is_gated
    if is_gated and len(halves) == 1 and halves[0].num_rows % 2 == 0:
        width, step = halves[0].num_rows // 2, 2 if is_interleaved else 1
        half = replace(halves[0], num_rows=width, row_step=step)
        halves = [half, replace(half, first_row=1 if is_interleaved else width)]
    elif is_interleaved:
        return None
    if any(m.kind == "awq" and (m.first_row % NIBBLES or m.row_step > 1) for m in halves):
        return None
    kinds = {(m.kind, m.num_rows, m.num_columns, m.chunk) for m in halves}
    if len(halves) != 1 + is_gated or len(kinds) != 1:
        return None
    gate, up_half = halves[0], halves[1] if is_gated else None
    if (gate.num_rows, gate.num_columns) != (last.num_columns, last.num_rows):
        return None
    parts = [part for weight in (*up, down) for part in weight.parts.values()]
    num_bytes = max(
        part.offset + prod(part.shape) * part.dtype.itemsize for part in (*parts, *biases)
    )
    return SlotMlp(gate, up_half, last, activation, num_bytes, weighs_input)


def _matrix(weight: StoredWeight) -> Matrix | None:
    (rows, columns), stored = weight.shape, weight.stored
    if min(rows, columns) < 1:
        return None
    if any(part.offset % LOAD_BYTES for part in weight.parts.values()):
        return None
    if weight.kind in PLAIN:
        shape, stride = ((columns, rows), rows) if weight.is_transposed else ((rows, columns), 1)
        if stored != {"": (PLAIN[weight.kind], shape)}:
            return None
        return Matrix(weight.kind, rows, columns, _part(weight.values), column_stride=stride)
    block = block_of(weight) if weight.kind in VALUES else None
    if block is None or weight.scale is None:
        return None
    if weight.kind == "int8" and block != (1, columns):
        return None
    matrix = Matrix(
        weight.kind,
        rows,
        columns,
        _part(weight.values),
        column_stride=rows if weight.kind in WORDS else 1,
        scale=_part(weight.scale),
        zeros=None if weight.zeros is None else _part(weight.zeros),
        groups=None if weight.groups is None or block[1] == columns else _part(weight.groups),
        block_rows=block[0],
        block_columns=block[1],
        num_scale_columns=-(-columns // block[1]),
    )
    has_words = gcd(matrix.chunk, columns) % matrix.per_word == 0 or weight.kind in WORDS
    return matrix if has_words else None


def _part(part: StoredPart) -> Part:
    return Part(part.offset, "uint8" if part.dtype in EXPONENTS else str(part.dtype)[6:])
