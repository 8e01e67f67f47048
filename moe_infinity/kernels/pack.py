"""Quantizes weights: computes the parts from which unpack.py gives back nearly the same weight.

    weight -> groups that share a scale -> scale -> round(weight / scale) -> stored parts

    nearest   the largest magnitude of the group becomes half of the grid's width
    search    that scale is multiplied by several factors. Each result rounds the group, and the
              rounded values have a best scale of their own (least squares). The best of all is
              kept, unless nearest has the smaller error in the weight as it will be read

Legend: R rows (outputs), C columns (inputs), N groups of G columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.kernels.unpack import ZERO_OF_SYMMETRIC

# Work in pieces that stay in a core's cache: 128 Ki values were fastest of 32, 128 and 256 Ki.
CHUNK_VALUES = 1 << 17
# Factors of the search. Error of int4 in groups of 32, normal weights: 9.48 %
# rounded to nearest, 8.71 % with 3 factors, 8.64 % with these 6, 8.61 % with 9, 8.59 % with a grid
# of 61 scales; one core searches 300, 200, 150 and, the grid, 20 MB/s of bfloat16.
FACTORS = (0.70, 0.78, 0.86, 0.94, 1.02, 1.10)
SPLIT_OF_FLOAT8 = 2.0**20 + 1  # Veltkamp's: leaves 4 of the 24 significant bits of a float32

PartShapes = dict[str, tuple[str, tuple[int, ...]]]  # role -> dtype in a header, shape


@dataclass(frozen=True, slots=True)
class Precision:
    """A grid of the values that a quantized weight may have, in units of its scale."""

    name: str
    lowest: float
    highest: float
    scale_dtype: torch.dtype
    group_size: int | None = None  # columns that share a scale, at least; None: all of a row

    @property
    def is_float(self) -> bool:
        return self.name == "fp8"

    def group_of(self, num_columns: int) -> int | None:
        """The number of columns that share a scale: `group_size`, or the next larger multiple of 8
        that divides `num_columns`, or all columns. None if they do not fill words.
        """
        if self.group_size is None:
            return num_columns
        if num_columns % 8:
            return None
        sizes = range(min(self.group_size, num_columns), num_columns + 1, 8)
        return next(size for size in sizes if num_columns % size == 0)

    def layout(self, shape_RC: tuple[int, int]) -> PartShapes:
        """The stored parts of a weight of this shape, widest elements first."""
        num_rows, num_columns = shape_RC
        group_size = self.group_of(num_columns)
        assert group_size is not None, (self, shape_RC)
        scales = num_rows, num_columns // group_size
        if self.name == "int4":
            return {"values": ("I32", (num_rows, num_columns // 8)), "scale": ("BF16", scales)}
        return {
            "scale": ("F32", scales),
            "values": ("F8_E4M3" if self.is_float else "I8", shape_RC),
        }

    def rounded(self, values: Tensor) -> Tensor:
        """Round `values` in place to the grid: to nearest, ties to even."""
        if self.is_float:
            values.clamp_(self.lowest, self.highest)
            return values.to(torch.float8_e4m3fn).to(torch.float32)
        return values.round_().clamp_(self.lowest, self.highest)

    def nearly_rounded(self, values: Tensor) -> Tensor:
        """Round like `rounded`, but ten times faster for float8, where values near zero and ties
        differ.
        """
        if not self.is_float:
            return self.rounded(values)
        values.clamp_(self.lowest, self.highest)
        stretched = values * SPLIT_OF_FLOAT8
        return stretched - (stretched - values)


def precision_of(name: str, group_size: int) -> Precision:
    """The precision of this name: int4, int8 or fp8. `group_size` (columns, a multiple of 8) is for
    int4.
    """
    return {
        "int4": Precision("int4", -8, 7, torch.bfloat16, group_size),
        "int8": Precision("int8", -128, 127, torch.float32),
        "fp8": Precision("fp8", -448, 448, torch.float32),
    }[name]


class Packed(NamedTuple):
    """The stored parts of a weight, and their error."""

    parts: dict[str, Tensor]  # by role
    squared_error: float  # sum over the weight, of the values as they are read
    squared_norm: float  # of the weight; not finite if a value of the weight is not


def pack(weight_RC: Tensor, precision: Precision, *, is_searched: bool) -> Packed:
    """Quantize a weight [R, C]. `precision` has to have a group size for C columns."""
    num_rows, num_columns = weight_RC.shape
    group_size = precision.group_of(num_columns)
    assert group_size is not None, (precision, num_columns)
    values_RC = []
    scales_RG = []
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for rows_RC in weight_RC.split(max(1, CHUNK_VALUES // num_columns)):
        groups_NG = rows_RC.to(torch.float32).view(-1, group_size)
        rounded = _round_groups(groups_NG, precision, weight_RC.dtype, is_searched=is_searched)
        squares += torch.stack([rounded.errors_N1.sum(), groups_NG.double().square().sum()])
        values_RC.append(_stored_values(rounded.values_NG.view(rows_RC.shape), precision))
        scales_RG.append(rounded.scales_N1.view(len(rows_RC), -1).to(precision.scale_dtype))
    parts = {"values": torch.cat(values_RC), "scale": torch.cat(scales_RG)}
    return Packed(parts, *squares.tolist())


class _Rounded(NamedTuple):
    """N groups of G columns, on the grid."""

    scales_N1: Tensor  # float32, rounded to the dtype they are stored in
    values_NG: Tensor  # in units of the scale
    errors_N1: Tensor  # sums of squares, of the values as they are read


def _round_groups(
    groups_NG: Tensor, precision: Precision, dtype: torch.dtype, *, is_searched: bool
) -> _Rounded:
    widths_N1 = groups_NG.abs().amax(1, keepdim=True) / ((precision.highest - precision.lowest) / 2)
    widths_N1 = torch.where(widths_N1 > 0, widths_N1, 1.0)  # a group of zeros
    nearest = _rounded(groups_NG, widths_N1, precision, dtype)
    if not is_searched:
        return nearest
    found = _rounded(groups_NG, _search(groups_NG, widths_N1, precision), precision, dtype)
    is_better_N1 = found.errors_N1 < nearest.errors_N1
    pairs = zip(found, nearest, strict=True)
    return _Rounded(*(torch.where(is_better_N1, better, other) for better, other in pairs))


def _rounded(
    groups_NG: Tensor, scales_N1: Tensor, precision: Precision, dtype: torch.dtype
) -> _Rounded:
    scales_N1 = scales_N1.to(precision.scale_dtype).to(torch.float32)
    scales_N1 = torch.where(scales_N1 > 0, scales_N1, 1.0)  # too small for its dtype: values are 0
    values_NG = precision.rounded(groups_NG / scales_N1)
    read_NG = (values_NG * scales_N1).to(precision.scale_dtype).to(dtype).to(torch.float32)
    errors_NG = read_NG.sub_(groups_NG).square_()
    return _Rounded(scales_N1, values_NG, errors_NG.sum(1, keepdim=True, dtype=torch.float64))


def _search(groups_NG: Tensor, widths_N1: Tensor, precision: Precision) -> Tensor:
    """The best scales. A group w rounded to q has the best scale wq / qq, and with it the squared
    error ww - (wq)^2 / qq.
    """
    best_N1 = widths_N1
    gains_N1 = torch.zeros_like(widths_N1)
    for factor in FACTORS:
        values_NG = precision.nearly_rounded(groups_NG * (1 / (widths_N1 * factor)))
        squares_N1 = torch.linalg.vecdot(values_NG, values_NG).unsqueeze(1)
        products_N1 = torch.linalg.vecdot(values_NG, groups_NG).unsqueeze(1)
        scales_N1 = products_N1 / squares_N1
        is_better_N1 = scales_N1 * products_N1 > gains_N1  # False for 0 / 0, a group of zeros
        best_N1 = torch.where(is_better_N1, scales_N1, best_N1)
        gains_N1 = torch.where(is_better_N1, scales_N1 * products_N1, gains_N1)
    return best_N1


def _stored_values(values_RC: Tensor, precision: Precision) -> Tensor:
    """The values as a checkpoint stores them. int4: a word has 8 neighbouring columns, the first in
    its lowest bits, and stores each value plus 8.
    """
    if precision.is_float:
        return values_RC.to(torch.float8_e4m3fn)
    if precision.name == "int8":
        return values_RC.to(torch.int8)
    nibbles_RC = (values_RC + ZERO_OF_SYMMETRIC).to(torch.uint8)
    bytes_RC = nibbles_RC[:, 0::2] | (nibbles_RC[:, 1::2] << 4)
    return bytes_RC.contiguous().view(torch.int32)
