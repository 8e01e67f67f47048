"""The MLP of the experts of one MoE layer, described for kernels that find an expert by the address
of its slot. All numbers here are known when a kernel is compiled.

    hidden = activation(gate x + bias, up x + bias)        out = down hidden + bias

Experts without a gate have one matrix before `down`, and it is called `gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.reference import Activation
from moe_infinity.layout import PLAIN, WeightLayout

LOAD_BYTES = 16  # that a thread loads at once; every part of a slot begins at a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """[R, C]: the rows of a weight, or every second of them, or half of them."""

    weight: WeightLayout
    num_rows: int
    first_row: int = 0  # the row of the weight that is row 0,
    row_step: int = 1  # and how far it is to row 1: 2 where gate and up alternate
    bias: ParamSpec | None = None

    @property
    def kind(self) -> str:
        """The kind of the weight, see WeightLayout."""
        return self.weight.kind

    @property
    def num_columns(self) -> int:
        """C"""
        return self.weight.shape[1]

    @property
    def row_stride(self) -> int:
        """The distance from one row to the next, in values."""
        return 1 if self.weight.is_transposed else self.num_columns

    @property
    def column_stride(self) -> int:
        """The distance from one column to the next, in values."""
        return self.weight.shape[0] if self.weight.is_transposed else 1


@dataclass(frozen=True, slots=True)
class SlotMlp:
    """The experts of one MoE layer. D model width, F expert width."""

    gate: Matrix  # [F, D]
    up: Matrix | None  # [F, D]; None without a gate
    down: Matrix  # [D, F]
    activation: Activation
    num_bytes: int  # of a slot that are read
    weighs_input: bool  # the routing weight scales x, not the output


def plain_matrix(weight: WeightLayout) -> Matrix | None:
    """All rows of a weight in bfloat16, float16 or float32. None: the kernel does not read it."""
    if weight.kind not in PLAIN or weight.values.offset % LOAD_BYTES:
        return None
    if not weight.is_stored_in(8 * PLAIN[weight.kind].itemsize):
        return None
    return Matrix(weight=weight, num_rows=weight.shape[0])


def slot_mlp(
    up: Sequence[WeightLayout],
    down: WeightLayout,
    *,
    activation: Activation,
    biases: Sequence[ParamSpec] = (),
    is_interleaved: bool = False,
    weighs_input: bool = False,
    matrix_of: Callable[[WeightLayout], Matrix | None] = plain_matrix,
) -> SlotMlp | None:
    """Describe experts whose weights are `up` and `down`. None: kernels do not read them.

    `up` has gate and up: as two weights, or as one with all rows of gate before those of up or,
    with `is_interleaved`, with alternating rows. Without a gate it is one weight. There are as many
    biases as weights, that of `down` last, or none. `matrix_of` knows the weights that a kernel
    reads.
    """
    matrices = [matrix_of(weight) for weight in (*up, down)]
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
    kinds = {(half.kind, half.num_rows, half.num_columns) for half in halves}
    if len(halves) != 1 + is_gated or len(kinds) != 1:
        return None
    gate = halves[0]
    up_half = halves[1] if is_gated else None
    if (gate.num_rows, gate.num_columns) != (last.num_columns, last.num_rows):
        return None
    ends = [weight.end for weight in (*up, down)]
    num_bytes = max(*ends, *(bias.offset + bias.num_bytes for bias in biases))
    return SlotMlp(gate, up_half, last, activation, num_bytes, weighs_input)
