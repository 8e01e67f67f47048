"""The MLPs of all activated experts of one layer in one call, from the slots they lie in: for the
few rows of a decode step, where calls from Python would cost more than they compute.

    FusedExperts(inputs, starts, addresses)
      up      x times gate and up     float32    blocks of rows of all experts, handed out to
      act     activation.py           float32    torch's number of threads; work.py
      down    hidden times down       float32
      ->      rounded once, to the dtype of the inputs

reference.expert_mlp rounds to the model's dtype after each of the three; this does not. What a row
gives depends on nothing but the row and its expert: not on the threads, the other rows or experts.

Legend: P rows of all experts, sorted by expert, D model width, F expert width, R rows (outputs), C
columns (inputs) of a weight.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.checkpoint.layout import (
    EXPONENTS,
    PLAIN,
    WORDS,
    StoredPart,
    StoredWeight,
    block_of,
)
from moe_infinity.kernels import host_float32
from moe_infinity.kernels.activation import FUNCTIONS, Activation

try:
    from moe_infinity.kernels.cpu import work as experts_work
    from moe_infinity.kernels.cpu.rows import row_function
    from moe_infinity.kernels.cpu.steps import (
        Arrangement,
        Fixed,
        Step,
        arrange,
        arrangement_for,
        fixed_for,
        step_for,
    )
    from moe_infinity.kernels.cpu.threads import num_threads
    from moe_infinity.kernels.cpu.words import BLOCK_ROWS
    from moe_infinity.kernels.cpu.work import BIASES, NO_BIAS, Call, Weights, job_for
except ImportError as error:
    raise ImportError(
        "moe_infinity.kernels.cpu.experts needs numba, which is not installed\n"
        "hint: pip install 'moe-infinity[cpu]'"
    ) from error

BLOCK_BYTES = 256 << 10  # of a weight, which a thread takes at once; the second cache holds it
MAX_STEPS = 1 << 16  # of a row, for which Fixed.inverse divides exactly


def fused_experts(
    up: Sequence[StoredWeight],
    down: Sequence[StoredWeight],
    activation: Activation,
    *,
    biases: Sequence[StoredPart] = (),
    is_interleaved: bool = False,
) -> FusedExperts | None:
    """Weights lie one below the other: of `up`, gate's rows come before up's or, interleaved, in
    turn with them. Biases: of up and of down, one weight each. None: it cannot be computed here.
    Compiles: 2 s of processor time for the first, then 0.3 s for each new kind.
    """
    up_steps, down_steps = (steps_of(weights) for weights in (up, down))
    if up_steps is None or down_steps is None:
        return None
    is_gated = activation.is_gated
    columns = {weight.shape[1] for weight in up}, {weight.shape[1] for weight in down}
    up_rows, width = (sum(weight.shape[0] for weight in weights) for weights in (up, down))
    if columns != ({width}, {up_rows // 2 if is_gated else up_rows}):
        return None
    if (is_gated and up_rows % 2) or (biases and (len(up), len(down), len(biases)) != (1, 1, 2)):
        return None
    if biases and (biases[0].dtype not in BIASES or biases[0].dtype != biases[1].dtype):
        return None
    if biases and {up[0].kind, down[0].kind} & {*WORDS}:  # rows of two blocks would have it twice
        return None
    return FusedExperts(
        Side.of(up, up_steps, up_rows),
        Side.of(down, down_steps, width),
        activation,
        biases,
        is_interleaved=is_interleaved,
    )


def steps_of(weights: Sequence[StoredWeight]) -> list[Step] | None:
    """By weight; None unless all can be computed and want x in the same arrangement."""
    steps = [step for weight in weights if (step := _step(weight)) is not None]
    if not steps or len(steps) < len(weights):
        return None
    first = steps[0]
    same = all(
        (step.num_vectors, step.has_zeros) == (first.num_vectors, first.has_zeros)
        and weight.kind == weights[0].kind
        for step, weight in zip(steps, weights, strict=True)
    )
    return steps if same else None


def _step(weight: StoredWeight) -> Step | None:
    (rows, columns), stored = weight.shape, weight.stored
    if min(rows, columns) < 1:
        return None
    step = None
    if weight.kind in PLAIN:
        if stored == {"": (PLAIN[weight.kind], (rows, columns))} and not weight.is_transposed:
            step = step_for(weight.kind, columns, group=columns, scale=None)
    elif (block := block_of(weight)) is not None and (rows >= BLOCK_ROWS.get(weight.kind, 1)):
        if weight.groups is not None and block[1] < columns:
            return None
        assert weight.scale is not None, weight  # block_of has seen it
        has_zeros, scale = weight.zeros is not None, weight.scale.dtype
        scale = torch.uint8 if scale in EXPONENTS else scale
        kind = "nibbles" if weight.kind == "int4" else weight.kind
        step = step_for(kind, columns, group=block[1], scale=scale, has_zeros=has_zeros)
    return step if step is not None and columns <= MAX_STEPS * step.num_columns else None


@dataclass(frozen=True, slots=True)
class Side:
    """Up or down, ready for machine code."""

    num_rows: int  # of all weights
    places: Arrangement  # of x
    fixed: NDArray[np.int64]  # by weight; blocks point here
    blocks: NDArray[np.int64]  # see experts_work.Weights

    @classmethod
    def of(cls, weights: Sequence[StoredWeight], steps: Sequence[Step], num_rows: int) -> Side:
        places = arrangement_for(steps[0], weights[0].shape[1])
        fixed = np.zeros((len(weights), len(Fixed._fields)), np.int64)
        blocks, offset = [], 0
        for weight, step, row in zip(weights, steps, fixed, strict=True):
            told = _fixed(weight, step)._replace(out_bytes=4 * num_rows)
            row[:] = told
            functions = [row_function(step._replace(num_tokens=n)).address for n in (1, 2)]
            values, unit = weight.values, BLOCK_ROWS.get(weight.kind, 1)
            row_bytes = prod(values.shape) * values.dtype.itemsize // weight.shape[0]
            at_once = max(1, BLOCK_BYTES // (row_bytes * unit)) * unit
            for first in range(0, weight.shape[0], at_once):
                last = min(first + at_once, weight.shape[0])
                at = row.ctypes.data
                blocks.append((*functions, at, first, last, offset, places.row_bytes))
            offset += 4 * weight.shape[0]
        return cls(num_rows, places, fixed, np.array(blocks, np.int64))


def _fixed(weight: StoredWeight, step: Step) -> Fixed:
    """Addresses from the start of a slot."""
    block, num_scale_rows = (1, weight.shape[1]), 1
    if step.scale is not None:
        found = block_of(weight)
        assert found is not None, weight  # _step has seen it
        block, num_scale_rows = found, -(-weight.shape[0] // found[0])
    scale, zeros = weight.scale, weight.zeros
    return fixed_for(step, weight.shape, block, num_scale_rows)._replace(
        weight=weight.values.offset,
        scales=0 if scale is None else scale.offset,
        zeros=0 if zeros is None else zeros.offset,
    )


class FusedExperts:
    """The MLPs of one MoE row; `fused_experts` makes them. Any number of threads may call."""

    def __init__(
        self,
        up: Side,
        down: Side,
        activation: Activation,
        biases: Sequence[StoredPart],
        *,
        is_interleaved: bool,
    ) -> None:
        self.up = up
        self.down = down
        numbers = activation.alpha, activation.shift, activation.limit
        self._numbers = np.array(numbers, np.float32)
        self.up_bytes = -(-4 * up.num_rows // 64) * 64  # so that no vector crosses a cache line
        self.row_bytes = self.up_bytes + down.places.row_bytes
        self.weights = Weights(
            up_blocks=up.blocks.ctypes.data,
            num_up=len(up.blocks),
            down_blocks=down.blocks.ctypes.data,
            num_down=len(down.blocks),
            up_bytes=4 * up.num_rows,
            out_bytes=4 * down.num_rows,
            function=FUNCTIONS.index(activation.function),
            is_gated=int(activation.is_gated),
            numbers=self._numbers.ctypes.data,
            gate_step=2 if is_interleaved else 1,
            first_up=1 if is_interleaved else up.num_rows // 2,
            up_bias=biases[0].offset if biases else NO_BIAS,
            down_bias=biases[1].offset if biases else NO_BIAS,
            bias=BIASES.index(biases[0].dtype) if biases else 0,
        )
        self(host_float32(0, down.num_rows), [0], [])  # compiles

    def __call__(
        self, inputs_PD: Tensor, starts: Sequence[int], addresses: Sequence[int]
    ) -> Tensor:
        """[P, D] -> [P, D]. Expert i has the rows from starts[i] to starts[i + 1], and its slot
        begins at addresses[i].
        """
        rows = self.begin(inputs_PD, len(inputs_PD))
        rows.compute(starts[:-1], starts[1:], addresses)
        return rows.out_PD.to(inputs_PD.dtype)

    def begin(self, inputs_PD: Tensor, num_rows: int) -> Rows:
        """Make ready to compute `num_rows` rows; one input may be that of all, for experts that
        have one row each.
        """
        return Rows(self, inputs_PD, num_rows)


class Rows:
    """Rows of all experts of a layer, whose experts come in any number of calls."""

    def __init__(self, experts: FusedExperts, inputs_PD: Tensor, num_rows: int) -> None:
        x, places = inputs_PD.to(torch.float32).contiguous(), experts.up.places
        num_x = len(x)
        self._experts = experts
        self._is_shared = num_x < num_rows
        # arranged x, and of each row what comes out of up and what goes into down
        self._scratch = torch.empty(
            num_x * places.row_bytes + num_rows * experts.row_bytes, dtype=torch.uint8, device="cpu"
        )
        self._up_at = self._scratch.data_ptr() + num_x * places.row_bytes
        self._hidden_at = self._up_at + num_rows * experts.up_bytes
        self.out_PD = host_float32(num_rows, experts.down.num_rows)
        arrange(x.data_ptr(), 4 * x.shape[1], self._scratch.data_ptr(), num_x, places)

    def compute(
        self, starts: Sequence[int], stops: Sequence[int], addresses: Sequence[int]
    ) -> None:
        """Fill `out_PD` from starts[i] to stops[i] for the expert whose slot begins at
        addresses[i], where it has to stay until this returns.
        """
        job, ints = job_for(
            starts,
            stops,
            addresses,
            x=self._scratch.data_ptr(),
            x_is_shared=int(self._is_shared),
            up=self._up_at,
            hidden=self._hidden_at,
            out=self.out_PD.data_ptr(),
        )
        experts = self._experts
        buffers = ints, self._scratch, self.out_PD
        Call(experts.weights, experts.down.places, job, buffers).run(num_threads())

    def sum(self, place_P: array[int], weights_TK: Tensor) -> Tensor:
        """[T, D]: each token's weighted rows, in the order of k; its pairs are told by their rows,
        token by token. Weights are float32 without gaps.
        """
        num_tokens, top_k = weights_TK.shape
        total_TD = host_float32(num_tokens, self.out_PD.shape[1]).zero_()
        experts_work.add_weighted(
            self.out_PD.data_ptr(), self.out_PD.shape[1], place_P.buffer_info()[0],
            weights_TK.data_ptr(), top_k, total_TD.data_ptr(), num_tokens,
        )  # fmt: skip
        return total_TD
