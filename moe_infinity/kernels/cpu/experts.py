"""The MLPs of all activated experts of one layer in one call, read from their slots. Made for the
few rows of a decode step, where one call for each expert would take longer than its arithmetic.

    FusedExperts(inputs, starts, addresses)
      up      x times gate and up     float32
      act     reference.py            float32
      down    hidden times down       float32
      ->      rounded once, to the dtype of the inputs

Threads share the blocks of rows of all experts (work.py); there are as many as torch has.

reference.PlainMlp rounds to the model's dtype after each of the three steps; this does not. The
result of a row depends on the row and its expert alone, not on threads, other rows or experts.

Legend: P rows of all experts, sorted by expert, D model width, F expert width, R rows (outputs), C
columns (inputs) of a weight.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import Ints, ParamSpec
from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu import work as experts_work
from moe_infinity.kernels.cpu.arrangement import (
    Arrangement,
    arrange,
    arrangement_for,
    one_behind_another,
)
from moe_infinity.kernels.cpu.rows import row_function
from moe_infinity.kernels.cpu.steps import (
    LOADERS,
    InnerLoop,
    KernelArguments,
    arguments_for,
    loop_for,
)
from moe_infinity.kernels.cpu.team import num_threads
from moe_infinity.kernels.cpu.words import BLOCK_ROWS
from moe_infinity.kernels.cpu.work import BIASES, NO_BIAS, ExpertMlp, RowBlock, run_job
from moe_infinity.kernels.reference import FUNCTIONS, Activation
from moe_infinity.layout import EXPONENTS, WORDS, WeightLayout, block_of

BLOCK_BYTES = 256 << 10  # of a weight, which a thread takes at once; the second cache holds it
SPARE_BYTES = 128  # behind the outputs of up, of which vectors are read
MAX_STEPS = 1 << 16  # of a row, for which KernelArguments.inverse divides exactly


def fused_experts(
    up: Sequence[WeightLayout],
    down: Sequence[WeightLayout],
    activation: Activation,
    *,
    biases: Sequence[ParamSpec] = (),
    is_interleaved: bool = False,
) -> FusedExperts | None:
    """The experts of a layer. Weights lie one below the other. In `up` all rows of gate come before
    those of up or, with `is_interleaved`, they alternate. Biases are one of up and one of down, or
    none. None: kernels do not read these weights. Compiles what no earlier start has compiled: 2 s
    of processor time for the first kind, 0.3 s for each further one, 0.5 to 3 s for one of GGML's.
    """
    first = Product.of(up)
    second = Product.of(down)
    if first is None or second is None:
        return None
    num_hidden = first.num_rows // 2 if activation.is_gated else first.num_rows
    if (first.num_columns, second.num_columns) != (second.num_rows, num_hidden):
        return None
    if (activation.is_gated and first.num_rows % 2) or (
        biases and (len(up), len(down), len(biases)) != (1, 1, 2)
    ):
        return None
    if biases and (biases[0].dtype not in BIASES or biases[0].dtype != biases[1].dtype):
        return None
    if biases and {up[0].kind, down[0].kind} & {*WORDS}:  # a row in two blocks would get it twice
        return None
    return FusedExperts(first, second, activation, biases, is_interleaved=is_interleaved)


def _loop_of(weight: WeightLayout) -> InnerLoop | None:
    """The loop that reads this weight. None: kernels do not read it."""
    loader = LOADERS.get(weight.kind)
    columns = weight.shape[1]
    if loader is None or not weight.is_stored_in(loader.bits):
        return None
    if weight.shape[0] < BLOCK_ROWS.get(weight.kind, 1):
        return None
    if weight.scale is None:
        if weight.is_transposed and weight.unpack is None:
            return None
        loop = loop_for(weight.kind, columns, group=columns, scale=None)
    else:
        block = block_of(weight)
        if block is None or (weight.groups is not None and block[1] < columns):
            return None
        scale = "uint8" if weight.scale.dtype in EXPONENTS else weight.scale.dtype
        has_zeros = weight.zeros is not None
        loop = loop_for(weight.kind, columns, group=block[1], scale=scale, has_zeros=has_zeros)
    return loop if loop is not None and columns <= MAX_STEPS * loop.num_columns else None


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with weights that lie one below the other, described for machine code."""

    num_rows: int  # of all weights
    num_columns: int
    arrangement: Arrangement  # of x
    arguments: NDArray[np.int64]  # by weight; blocks point here
    blocks: NDArray[np.int64]  # RowBlocks
    kept: list[array[int]]  # what `arrangement` points to

    @classmethod
    def of(cls, weights: Sequence[WeightLayout]) -> Product | None:
        """The product with these weights. None unless kernels read all of them, and they have as
        many columns as each other.
        """
        loops = [loop for weight in weights if (loop := _loop_of(weight)) is not None]
        if len(loops) < len(weights) or len({weight.shape[1] for weight in weights}) != 1:
            return None
        num_rows = sum(weight.shape[0] for weight in weights)
        num_columns = weights[0].shape[1]
        arrangements = [arrangement_for(loop, num_columns) for loop in loops]
        distinct = list(dict.fromkeys(arrangements))
        arrangement, kept = one_behind_another(distinct)
        arguments = np.zeros((len(weights), len(KernelArguments._fields)), np.int64)
        blocks = []
        offset = 0
        for weight, loop, own, row in zip(weights, loops, arrangements, arguments, strict=True):
            row[:] = _arguments(weight, loop)._replace(
                out_bytes=4 * num_rows, x_bytes=arrangement.row_bytes
            )
            x_offset = sum(before.row_bytes for before in distinct[: distinct.index(own)])
            function = row_function(loop).address
            unit = BLOCK_ROWS.get(weight.kind, 1)
            row_bytes = weight.values.num_bytes // weight.shape[0]
            at_once = max(1, BLOCK_BYTES // (row_bytes * unit)) * unit
            for first in range(0, weight.shape[0], at_once):
                last = min(first + at_once, weight.shape[0])
                at = row.ctypes.data
                block = RowBlock(function, at, first, last, offset, arrangement.row_bytes, x_offset)
                blocks.append(block)
            offset += 4 * weight.shape[0]
        return cls(num_rows, num_columns, arrangement, arguments, np.array(blocks, np.int64), kept)


def _arguments(weight: WeightLayout, loop: InnerLoop) -> KernelArguments:
    """The arguments for a kernel; addresses count from the start of a slot."""
    rows, columns = weight.shape
    block = block_of(weight) or (rows, columns)
    return arguments_for(loop, weight.shape, block, -(-rows // block[0]))._replace(
        weight=weight.values.offset,
        scales=0 if weight.scale is None else weight.scale.offset,
        zeros=0 if weight.zeros is None else weight.zeros.offset,
    )


class FusedExperts:
    """The MLPs of one MoE layer; `fused_experts` makes them. Any number of threads may call."""

    def __init__(
        self,
        up: Product,
        down: Product,
        activation: Activation,
        biases: Sequence[ParamSpec],
        *,
        is_interleaved: bool,
    ) -> None:
        self.up = up
        self.down = down
        numbers = activation.alpha, activation.shift, activation.limit
        self._numbers = np.array(numbers, np.float32)
        self.up_bytes = -(-4 * up.num_rows // 64) * 64  # so that no vector crosses a cache line
        self.row_bytes = self.up_bytes + down.arrangement.row_bytes
        mlp = ExpertMlp(
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
        self.mlp = array("q", mlp)
        self.hidden_arrangement = array("q", down.arrangement)
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

    def begin(self, inputs_TD: Tensor, num_rows: int, tokens_P: Tensor | None = None) -> Rows:
        """Prepare to compute `num_rows` rows, of which row i has the input tokens_P[i]. Without
        `tokens_P` it has input i, or the only one, if each expert has one row.
        """
        return Rows(self, inputs_TD, num_rows, tokens_P)


class Rows:
    """The rows of all experts of one layer in one step, computed in any number of calls."""

    def __init__(
        self, experts: FusedExperts, inputs_TD: Tensor, num_rows: int, tokens_P: Tensor | None
    ) -> None:
        x = inputs_TD.to(torch.float32).contiguous()
        arrangement = experts.up.arrangement
        self._experts = experts
        self._x = host_float32(len(x), arrangement.row_bytes // 4)
        arrange(x.data_ptr(), 4 * x.shape[1], self._x.data_ptr(), len(x), arrangement)
        if tokens_P is not None:
            self._x = self._x[tokens_P]
        self._is_shared = len(self._x) < num_rows
        # of each row what comes out of up and what goes into down
        self._scratch = torch.empty(
            num_rows * experts.row_bytes + SPARE_BYTES, dtype=torch.uint8, device="cpu"
        )
        self._hidden_at = self._scratch.data_ptr() + num_rows * experts.up_bytes
        self.out_PD = host_float32(num_rows, experts.down.num_rows)

    def compute(
        self, starts: Sequence[int], stops: Sequence[int], addresses: Sequence[int]
    ) -> None:
        """Fill `out_PD` from starts[i] to stops[i] for the expert whose slot begins at
        addresses[i], where it has to stay until this returns.
        """
        run_job(
            self._experts.mlp,
            self._experts.hidden_arrangement,
            starts,
            stops,
            addresses,
            num_threads=num_threads(),
            x=self._x.data_ptr(),
            x_is_shared=int(self._is_shared),
            up=self._scratch.data_ptr(),
            hidden=self._hidden_at,
            out=self.out_PD.data_ptr(),
        )

    def sum(self, row_P: Ints, top_k_weights_TK: Tensor) -> Tensor:
        """[T, D]: the weighted sum of each token's rows, in the order of k. `row_P` is the row of
        each pair, token by token; negative: it has none. Weights are float32, contiguous.
        """
        num_tokens, top_k = top_k_weights_TK.shape
        total_TD = host_float32(num_tokens, self.out_PD.shape[1]).zero_()
        experts_work.add_weighted(
            self.out_PD.data_ptr(), self.out_PD.shape[1], row_P.ctypes.data,
            top_k_weights_TK.data_ptr(), top_k, total_TD.data_ptr(), num_tokens,
        )  # fmt: skip
        return total_TD
