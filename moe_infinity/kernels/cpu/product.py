"""A matrix product with weights as they are stored, described for machine code.

Legend: R rows (outputs), C columns (inputs) of a weight.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.cpu.arrangement import (
    Arrangement,
    arrangement_for,
    one_behind_another,
    panel_arrangement,
)
from moe_infinity.kernels.cpu.panels import panel_function, reads_panels
from moe_infinity.kernels.cpu.rows import row_function
from moe_infinity.kernels.cpu.steps import (
    LOADERS,
    InnerLoop,
    KernelArguments,
    arguments_for,
    loop_for,
)
from moe_infinity.kernels.cpu.words import BLOCK_ROWS
from moe_infinity.kernels.cpu.work import RowBlock
from moe_infinity.kernels.many_rows import PANEL_PATHS, RowPath
from moe_infinity.layout import EXPONENTS, WeightLayout, block_of

BLOCK_BYTES = 256 << 10  # of a weight, which a thread takes at once; the second cache holds it
MAX_STEPS = 1 << 16  # of a row, for which KernelArguments.inverse divides exactly


def loop_of(weight: WeightLayout) -> InnerLoop | None:
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
        if has_zeros and not loader.subtracts_zero:
            return None
        if (loader.global_scale is None) != (weight.global_scale is None):
            return None
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
    kept: list[array[int]]  # what `arrangement` points to, and itself

    @property
    def arranged_by(self) -> array[int]:
        """The numbers of `arrangement` in memory, for `arrange_by`; it is chained last."""
        return self.kept[-1]

    @classmethod
    def of(
        cls,
        weights: Sequence[WeightLayout],
        *,
        path: RowPath = RowPath.FEW,
        parts: Sequence[ParamSpec] | None = None,
    ) -> Product | None:
        """The product with these weights, of few rows of x or, in panels, of many. Their parts are
        where a table of the addresses of `parts` says, or without `parts` where their offsets say,
        which are addresses. None unless kernels of this path read all weights, and they have as
        many columns as each other.
        """
        loops = [loop for weight in weights if (loop := loop_of(weight)) is not None]
        if len(loops) < len(weights) or len({weight.shape[1] for weight in weights}) != 1:
            return None
        num_rows = sum(weight.shape[0] for weight in weights)
        num_columns = weights[0].shape[1]
        function_of: Callable[[InnerLoop], Any] = row_function
        arrangements = [arrangement_for(loop, num_columns) for loop in loops]
        if path in PANEL_PATHS:
            is_half = path is RowPath.HALF_PANELS
            if not all(reads_panels(loop, is_half=is_half) for loop in loops):
                return None
            function_of = partial(panel_function, is_half=is_half)
            arrangements = [panel_arrangement(loop, num_columns, is_half=is_half) for loop in loops]
        distinct = list(dict.fromkeys(arrangements))
        arrangement, kept = one_behind_another(distinct)
        arguments = np.zeros((len(weights), len(KernelArguments._fields)), np.int64)
        blocks = []
        offset = 0
        for weight, loop, own, row in zip(weights, loops, arrangements, arguments, strict=True):
            row[:] = arguments_of(weight, loop, parts)._replace(
                out_bytes=4 * num_rows, x_bytes=arrangement.row_bytes
            )
            x_offset = sum(before.row_bytes for before in distinct[: distinct.index(own)])
            function = function_of(loop).address
            at = row.ctypes.data
            for first, last in row_blocks(weight):
                block = RowBlock(function, at, first, last, offset, arrangement.row_bytes, x_offset)
                blocks.append(block)
            offset += 4 * weight.shape[0]
        return cls(num_rows, num_columns, arrangement, arguments, np.array(blocks, np.int64), kept)


def row_blocks(weight: WeightLayout) -> Iterator[tuple[int, int]]:
    """Yield the first row, and one more than the last, of what a thread takes at once."""
    unit = BLOCK_ROWS.get(weight.kind, 1)
    row_bytes = weight.values.num_bytes // weight.shape[0]
    at_once = max(1, BLOCK_BYTES // (row_bytes * unit)) * unit
    for first in range(0, weight.shape[0], at_once):
        yield first, min(first + at_once, weight.shape[0])


def arguments_of(
    weight: WeightLayout, loop: InnerLoop, parts: Sequence[ParamSpec] | None
) -> KernelArguments:
    """The arguments for a kernel. They have the numbers of the weight's parts among `parts` or,
    without these, their addresses.
    """

    def at(part: ParamSpec | None) -> int:
        if part is None:
            return 0
        return part.offset if parts is None else parts.index(part)

    rows, columns = weight.shape
    block = block_of(weight) or (rows, columns)
    return arguments_for(loop, weight.shape, block, -(-rows // block[0]))._replace(
        weight=at(weight.values),
        scales=at(weight.scale),
        zeros=at(weight.zeros),
        global_scale=at(weight.global_scale),
    )
