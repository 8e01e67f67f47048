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

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_infinity.experts import Ints, ParamSpec
from moe_infinity.kernels import host_float32, many_rows
from moe_infinity.kernels.cpu import work as experts_work
from moe_infinity.kernels.cpu.arrangement import arrange_by
from moe_infinity.kernels.cpu.product import Product
from moe_infinity.kernels.cpu.team import num_threads
from moe_infinity.kernels.cpu.widened import WidenedExperts, Widening, run_all
from moe_infinity.kernels.cpu.words import BLOCK_ROWS
from moe_infinity.kernels.cpu.work import BIASES, NO_BIAS, ExpertMlp, run_job
from moe_infinity.kernels.many_rows import PANEL_PATHS, RowPath
from moe_infinity.kernels.reference import FUNCTIONS, Activation
from moe_infinity.layout import WeightLayout

SPARE_BYTES = 128  # behind the outputs of up, of which vectors are read


def fused_experts(
    up: Sequence[WeightLayout],
    down: Sequence[WeightLayout],
    activation: Activation,
    *,
    biases: Sequence[ParamSpec] = (),
    is_interleaved: bool = False,
) -> FusedExperts | None:
    """The experts of a layer. Weights lie one below the other. In `up` all rows of gate come before
    those of up or, with `is_interleaved`, they alternate. There is a bias for each weight, that of
    down last, or none. None: kernels do not read these weights. Compiles what no earlier start has
    compiled: 2 s of processor time for the first kind, 0.3 s for each further one, 0.5 to 3 s for
    one of GGML's.
    """
    parts = [part for weight in (*up, *down) for part in weight.parts.values()] + [*biases]
    first = Product.of(up, parts=parts)
    second = Product.of(down, parts=parts)
    if first is None or second is None:
        return None
    num_hidden = first.num_rows // 2 if activation.is_gated else first.num_rows
    if (first.num_columns, second.num_columns) != (second.num_rows, num_hidden):
        return None
    if activation.is_gated and first.num_rows % 2:
        return None
    if biases and not _reads_biases(up, down, biases):
        return None
    in_panels = {}
    widened = None
    for path in PANEL_PATHS:
        many = Product.of(up, path=path, parts=parts)
        then = Product.of(down, path=path, parts=parts)
        if many is not None and then is not None:
            in_panels[path] = FusedExperts(
                many, then, activation, parts, biases, is_interleaved=is_interleaved
            )
    if (
        many_rows.has_products_of_matrices()
        and (wide := Widening.of(up, parts))
        and (end := Widening.of(down, parts))
    ):
        widened = WidenedExperts(
            wide, end, activation, parts, biases, is_interleaved=is_interleaved
        )
    return FusedExperts(
        first, second, activation, parts, biases, is_interleaved=is_interleaved,
        in_panels=in_panels, widened=widened,
    )  # fmt: skip


def _reads_biases(
    up: Sequence[WeightLayout], down: Sequence[WeightLayout], biases: Sequence[ParamSpec]
) -> bool:
    """True if kernels add these biases."""
    weights = *up, *down
    if len(biases) != len(weights) or len(up) > 2 or len(down) > 1:
        return False
    if biases[0].dtype not in BIASES or {bias.dtype for bias in biases} != {biases[0].dtype}:
        return False
    (last,) = down  # a block that begins before its first row would compute others' without a bias
    return last.shape[0] % BLOCK_ROWS.get(last.kind, 1) == 0


class FusedExperts:
    """The MLPs of one MoE layer; `fused_experts` makes them. Any number of threads may call."""

    def __init__(
        self,
        up: Product,
        down: Product,
        activation: Activation,
        parts: Sequence[ParamSpec],
        biases: Sequence[ParamSpec],
        *,
        is_interleaved: bool,
        in_panels: Mapping[RowPath, FusedExperts] | None = None,  # the same on other paths
        widened: WidenedExperts | None = None,
    ) -> None:
        self.parts = tuple(parts)  # whose addresses a table has
        self.in_panels = in_panels or {}
        self.widened = widened
        self.up = up
        self.down = down
        numbers = activation.alpha, activation.shift, activation.limit
        self._numbers = np.array(numbers, np.float32)
        self.up_bytes = -(-4 * up.num_rows // 64) * 64  # so that no vector crosses a cache line
        self.row_bytes = self.up_bytes + down.arrangement.row_bytes
        numbers_of = [self.parts.index(bias) for bias in biases]
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
            up_bias=numbers_of[0] if biases else NO_BIAS,
            second_row=biases[0].shape[0] if biases else 0,
            second_bias=numbers_of[1] if len(biases) > 2 else NO_BIAS,
            down_bias=numbers_of[-1] if biases else NO_BIAS,
            bias=BIASES.index(biases[0].dtype) if biases else 0,
        )
        self.mlp = array("q", mlp)
        self.hidden_arrangement = down.arranged_by
        self(host_float32(0, down.num_rows), [0], [])  # compiles

    def __call__(
        self,
        inputs_PD: Tensor,
        starts: Sequence[int],
        addresses: Sequence[int],
        path: RowPath = RowPath.FEW,
    ) -> Tensor:
        """[P, D] -> [P, D]. Expert i has the rows from starts[i] to starts[i + 1], and its slot
        begins at addresses[i].
        """
        rows = self.begin(inputs_PD, len(inputs_PD), path=path)
        offsets = np.array([part.offset for part in self.parts])
        tables = np.add.outer(np.array(addresses, np.int64), offsets)
        rows.compute(starts[:-1], starts[1:], [table.ctypes.data for table in tables])
        return rows.out_PD.to(inputs_PD.dtype)

    def begin(
        self,
        inputs_TD: Tensor,
        num_rows: int,
        tokens_P: Tensor | None = None,
        *,
        path: RowPath = RowPath.FEW,
    ) -> Rows:
        """Prepare to compute `num_rows` rows, of which row i has the input tokens_P[i]. Without
        `tokens_P` it has input i, or the only one, if each expert has one row. Weights that `path`
        does not know take the next slower one.
        """
        if path is RowPath.WIDENED and self.widened is not None:
            return WidenedRows(self.widened, inputs_TD, num_rows, tokens_P)
        experts = self
        if path is not RowPath.FEW:
            experts = self.in_panels.get(path) or self.in_panels.get(RowPath.PANELS) or self
        return FusedRows(experts, inputs_TD, num_rows, tokens_P)


class Rows(ABC):
    """The rows of all experts of one layer in one step, computed in any number of calls."""

    out_PD: Tensor  # float32

    @abstractmethod
    def compute(
        self,
        starts: Sequence[int],
        stops: Sequence[int],
        tables: Sequence[int],
    ) -> None:
        """Fill `out_PD` from starts[i] to stops[i] for the expert whose table is at tables[i]:
        int64 [parts], the address of each of `parts`. It has to stay until this returns.
        """

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


class WidenedRows(Rows):
    """Rows that torch multiplies with widened weights."""

    def __init__(
        self, experts: WidenedExperts, inputs_TD: Tensor, num_rows: int, tokens_P: Tensor | None
    ) -> None:
        self._experts = experts
        self._inputs_TD = inputs_TD
        self._tokens_P = tokens_P
        self.out_PD = host_float32(num_rows, inputs_TD.shape[1])

    def compute(
        self,
        starts: Sequence[int],
        stops: Sequence[int],
        tables: Sequence[int],
    ) -> None:
        """Fill `out_PD`, as each class of `Rows` does."""

        def compute_one(expert: tuple[int, int, int]) -> None:
            start, stop, table = expert
            rows = slice(start, stop) if self._tokens_P is None else self._tokens_P[start:stop]
            x_RD = self._inputs_TD[rows]
            self.out_PD[start:stop] = self._experts.compute(x_RD, table)

        run_all(compute_one, zip(starts, stops, tables, strict=True))


class FusedRows(Rows):
    """Rows that machine code multiplies, all experts of a call at once. What lies between input and
    output is kept for the rows of one call alone: of a long prompt it is most of the memory.
    """

    def __init__(
        self, experts: FusedExperts, inputs_TD: Tensor, num_rows: int, tokens_P: Tensor | None
    ) -> None:
        x = inputs_TD.to(torch.float32).contiguous()
        arranged_by = experts.up.arranged_by.buffer_info()[0]
        self._experts = experts
        self._x = host_float32(len(x), experts.up.arrangement.row_bytes // 4)
        arrange_by(x.data_ptr(), 4 * x.shape[1], self._x.data_ptr(), len(x), arranged_by)
        self._tokens_P = tokens_P
        self._is_shared = tokens_P is None and len(x) < num_rows
        self.out_PD = host_float32(num_rows, experts.down.num_rows)

    def compute(
        self,
        starts: Sequence[int],
        stops: Sequence[int],
        tables: Sequence[int],
    ) -> None:
        """Fill `out_PD`, as each class of `Rows` does."""
        ends = [0, *np.cumsum(np.subtract(stops, starts)).tolist()]  # among the rows of this call
        num_rows = ends[-1]
        rows: slice | Tensor = slice(min(starts, default=0), max(stops, default=0))
        if is_apart := [*starts[1:]] != [*stops[:-1]]:
            rows = torch.from_numpy(np.concatenate([*map(np.arange, starts, stops)]))
        inputs = rows if self._tokens_P is None else self._tokens_P[rows]
        x = self._x if self._is_shared else self._x[inputs]
        out = host_float32(num_rows, self.out_PD.shape[1]) if is_apart else self.out_PD[rows]
        # of each row what comes out of up and what goes into down
        scratch = torch.empty(
            num_rows * self._experts.row_bytes + SPARE_BYTES, dtype=torch.uint8, device="cpu"
        )
        run_job(
            self._experts.mlp,
            self._experts.hidden_arrangement,
            ends[:-1],
            ends[1:],
            tables,
            num_threads=num_threads(),
            x=x.data_ptr(),
            x_is_shared=int(self._is_shared),
            up=scratch.data_ptr(),
            hidden=scratch.data_ptr() + num_rows * self._experts.up_bytes,
            out=out.data_ptr(),
        )
        if is_apart:
            self.out_PD[rows] = out
