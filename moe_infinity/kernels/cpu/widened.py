"""Products of many rows of x in bfloat16 by torch, for processors that multiply matrices (AMX). A
weight is widened to bfloat16 a piece at a time, into memory that each thread keeps for that.

    threads take experts, or pieces of a linear layer
        a piece of a weight    widen.py, into 2 MiB
        torch's linear         sums in float32, rounded to bfloat16

Each thread does all of its work alone: torch's threads and those of team.py would take the cores
from each other at every change.

Legend: P rows of all experts, D model width, F expert width, T tokens, R rows, C columns.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.cpu.compiler import machine_code
from moe_infinity.kernels.cpu.product import arguments_of, loop_of, row_blocks
from moe_infinity.kernels.cpu.steps import InnerLoop, KernelArguments
from moe_infinity.kernels.cpu.team import num_threads
from moe_infinity.kernels.cpu.widen import widening_function
from moe_infinity.kernels.cpu.work import BLOCK_BYTES, RowBlock, block_at, multiply
from moe_infinity.kernels.reference import Activation
from moe_infinity.layout import WORDS, WeightLayout, block_of

PIECE_BYTES = 2 << 20  # of a widened weight, which the second cache holds


class Piece(NamedTuple):
    """Neighbouring rows of a weight, or of weights that lie one below the other."""

    first: int  # row
    last: int  # one more than the last row
    blocks: int  # address of RowBlocks
    num_blocks: int


@machine_code(types.void(*[types.int64] * 4))
def _widen_blocks(blocks, num_blocks, table, out):  # type: ignore[no-untyped-def]
    for i in range(num_blocks):
        multiply(block_at(blocks + BLOCK_BYTES * i), table, 0, 0, 0, 0, out, 0)


@dataclass(frozen=True, slots=True)
class Widening:
    """Weights [R, C] one below the other, described for the code that widens them."""

    num_rows: int
    num_columns: int
    arguments: NDArray[np.int64]  # by weight; blocks point here
    blocks: NDArray[np.int64]  # RowBlocks

    @classmethod
    def of(
        cls, weights: Sequence[WeightLayout], parts: Sequence[ParamSpec] | None = None
    ) -> Widening | None:
        """The widening of these weights, with `parts` as for `Product.of`. None if kernels do not
        widen all of them.
        """
        loops = [loop for weight in weights if (loop := loop_of(weight)) is not None]
        kinds = {weight.kind for weight in weights}
        if len(loops) < len(weights) or kinds & {*WORDS}:
            return None
        if any(map(_ends_in_two_blocks, weights, loops)):
            return None
        num_columns = weights[0].shape[1]
        arguments = np.zeros((len(weights), len(KernelArguments._fields)), np.int64)
        blocks = []
        before = 0
        for weight, loop, row in zip(weights, loops, arguments, strict=True):
            row[:] = arguments_of(weight, loop, parts)._replace(out_bytes=2 * num_columns)
            function = widening_function(loop).address
            for first, last in row_blocks(weight):
                offset = 2 * num_columns * before
                blocks.append(RowBlock(function, row.ctypes.data, first, last, offset, 0, 0))
            before += weight.shape[0]
        return cls(before, num_columns, arguments, np.array(blocks, np.int64))

    def pieces(self, num_bytes: int) -> list[Piece]:
        """The weights, cut into pieces of about so many bytes in bfloat16."""
        fields = RowBlock._fields
        rows_of = self.blocks[:, fields.index("last")] - self.blocks[:, fields.index("first")]
        most = max(1, num_bytes // (2 * self.num_columns))
        pieces: list[Piece] = []
        at = self.blocks.ctypes.data
        for i, num_rows in enumerate(rows_of.tolist()):
            first = pieces[-1].last if pieces else 0
            if pieces and first + num_rows - pieces[-1].first <= most:
                piece = pieces.pop()
                first = piece.last
                piece = piece._replace(last=first + num_rows, num_blocks=piece.num_blocks + 1)
            else:
                piece = Piece(first, first + num_rows, at + BLOCK_BYTES * i, 1)
            pieces.append(piece)
        return pieces

    def multiply(
        self, piece: Piece, table: int, x_TC: Tensor, bias_R: Tensor | None = None
    ) -> Tensor:
        """[T, C] -> [T, rows of the piece], of the weights whose parts are in the table at this
        address; 0: there is none.
        """
        num_rows = piece.last - piece.first
        weight_RC = _memory(num_rows * self.num_columns).view(num_rows, self.num_columns)
        at = weight_RC.data_ptr() - 2 * self.num_columns * piece.first
        _widen_blocks(piece.blocks, piece.num_blocks, table, at)
        if bias_R is not None:
            bias_R = bias_R[piece.first : piece.last].to(x_TC.dtype)
        return linear(x_TC, weight_RC, bias_R)


def _ends_in_two_blocks(weight: WeightLayout, loop: InnerLoop) -> bool:
    """Return True if the last step of a row has columns of two blocks, the last of which is cut
    off: they are decoded with the scale of that one. Elsewhere x has zeros for the others.
    """
    columns = weight.shape[1]
    block = block_of(weight)
    return block is not None and bool(columns % loop.num_columns and columns % block[1])


class _Kept(threading.local):
    memory = torch.empty(0, dtype=torch.bfloat16, device="cpu")


_kept = _Kept()


def _memory(count: int) -> Tensor:
    """Memory for so many numbers, which is this thread's until it asks again."""
    if len(_kept.memory) < count:
        _kept.memory = torch.empty(count, dtype=torch.bfloat16, device="cpu")
    return _kept.memory[:count]


def run_all(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Do the work of all items, by as many threads as kernels have."""
    pool = _pool(os.getpid(), num_threads())
    # Each thread has its own: in no other may a tensor of inference mode be written to.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else nullcontext

    def run(item: Any) -> None:
        with mode():
            work(item)

    try:
        for _ in pool.map(run, items):
            pass
    finally:  # a thread that sets its own number sets that of threads to come, too
        torch.set_num_threads(torch.get_num_threads())


@cache
def _pool(pid: int, count: int) -> ThreadPoolExecutor:
    """The threads of a process, since they do not survive a fork."""
    return ThreadPoolExecutor(count, "widened", initializer=_begin_thread)


def _begin_thread() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


class WidenedLinear:
    """Linear layers with the same input, multiplied piece by piece."""

    def __init__(self, widening: Widening) -> None:
        self._widening = widening

    def __call__(self, x_TC: Tensor, bias_R: Tensor | None) -> Tensor:
        """[T, C] -> [T, R of all weights] in bfloat16."""
        widening = self._widening
        out_TR = x_TC.new_empty(len(x_TC), widening.num_rows)
        share = 2 * widening.num_rows * widening.num_columns // num_threads()

        def compute(piece: Piece) -> None:
            out_TR[:, piece.first : piece.last] = widening.multiply(piece, 0, x_TC, bias_R)

        run_all(compute, widening.pieces(min(PIECE_BYTES, share)))
        return out_TR


class WidenedExperts:
    """The MLPs of one MoE layer. Legend as in experts.py."""

    def __init__(
        self,
        up: Widening,
        down: Widening,
        activation: Activation,
        parts: Sequence[ParamSpec],
        biases: Sequence[ParamSpec],
        *,
        is_interleaved: bool,
    ) -> None:
        self._up = up
        self._down = down
        self._up_pieces = up.pieces(PIECE_BYTES)
        self._down_pieces = down.pieces(PIECE_BYTES)
        self._activation = activation
        self._biases = [(bias, parts.index(bias)) for bias in biases]
        self._is_interleaved = is_interleaved

    def compute(self, x_RD: Tensor, table: int) -> Tensor:
        """[R, D] -> [R, D] of the expert with this table. As in the model's own code, what comes
        out of a product or of the activation is rounded to bfloat16.
        """
        up_bias_R = down_bias_R = None
        if self._biases:
            *up_biases, down_bias_R = (_bias_in(table, *bias) for bias in self._biases)
            up_bias_R = torch.cat(up_biases)
        up_RF = _product(self._up, self._up_pieces, table, x_RD, up_bias_R).float()
        if not self._activation.is_gated:
            hidden = self._activation(up_RF)
        elif self._is_interleaved:
            hidden = self._activation(up_RF[:, 0::2], up_RF[:, 1::2])
        else:
            hidden = self._activation(*up_RF.chunk(2, dim=1))
        hidden = hidden.to(x_RD.dtype)
        return _product(self._down, self._down_pieces, table, hidden, down_bias_R)


def _bias_in(table: int, bias: ParamSpec, number: int) -> Tensor:
    at = ctypes.c_int64.from_address(table + 8 * number).value
    memory = (ctypes.c_uint8 * bias.num_bytes).from_address(at)
    return torch.frombuffer(memory, dtype=getattr(torch, bias.dtype))


def _product(
    widening: Widening, pieces: list[Piece], table: int, x_RC: Tensor, bias_R: Tensor | None
) -> Tensor:
    return torch.cat([widening.multiply(piece, table, x_RC, bias_R) for piece in pieces], dim=1)
