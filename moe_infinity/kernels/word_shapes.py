"""The shapes of integers in words tell bits, rows and columns of the weight, and how many of its
columns share a scale.

Every function gets the shapes of a weight's parts by role, and returns the shape [R, C] and the
rows and columns that share a scale, which is None where only an index of groups tells; or None if
the parts disagree. unpack.py reads such parts; legend: R rows, C columns, G groups of columns, W
words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from moe_infinity.kernels.unpack import WORD_BITS
from moe_infinity.layout import Block

GPTQ_BITS = (2, 4, 8)  # of which words hold whole numbers, and libraries write them

Shapes = Mapping[str, tuple[int, ...]]
Measured = tuple[tuple[int, ...], Block | None] | None


class Width(NamedTuple):
    """How integers of pack-quantized may be stored."""

    bits: int
    group_size: int | None = None  # columns; -1: all. None: as many as shapes tell
    has_index: bool = False  # of the groups of columns, which may be in any order


def measure_ints(shapes: Shapes, widths: Collection[Width]) -> Measured:
    """pack-quantized: values [R, W], scale [R, G], perhaps zeros [W, G] and groups [C]. None also
    if several widths fit and disagree.
    """
    fitting = {_measure_width(shapes, width) for width in widths} - {None}
    return fitting.pop() if len(fitting) == 1 else None


def _measure_width(shapes: Shapes, width: Width) -> Measured:
    """A width that fills no whole word is only in the values of weight_shape; no model has one."""
    num_rows, num_words = shapes["values"]
    num_columns = WORD_BITS // width.bits * num_words
    num_groups = shapes["scale"][-1] if shapes["scale"] else 0
    size = width.group_size
    if size is None:
        size = num_columns // max(1, num_groups)
    if not 0 < size < num_columns:
        size = num_columns
    fits = shapes["scale"] == (num_rows, num_groups) and num_groups * size == num_columns > 0
    zeros = -(-num_rows * width.bits // WORD_BITS), num_groups
    fits &= shapes.get("zeros") in (None, zeros)
    fits &= "groups" not in shapes or (width.has_index and shapes["groups"] == (num_columns,))
    is_in_order = "groups" not in shapes or num_groups == 1
    return ((num_rows, num_columns), (1, size) if is_in_order else None) if fits else None


def measure_gptq(shapes: Shapes, sizes: set[int], *, is_in_order: bool) -> Measured:
    """GPTQ: values [W, R], zeros [G, W], scale [G, R], perhaps groups [C]. `sizes` are the columns
    of a group that the checkpoint says to have, the last of which may be shorter.
    """
    if len(shapes["scale"]) != 2 or 0 in shapes["scale"]:
        return None
    num_groups, num_rows = shapes["scale"]
    bits = WORD_BITS * shapes["zeros"][-1] // num_rows if shapes["zeros"] else 0
    if bits not in GPTQ_BITS or shapes["values"][1] != num_rows:
        return None
    shape = num_rows, WORD_BITS // bits * shapes["values"][0]
    if not _fits_groups(shapes, shape, bits):
        return None
    size = _group_size(shape[1], num_groups, sizes)
    if "groups" not in shapes:
        return (shape, (1, size)) if size else None
    if shapes["groups"] != shape[1:]:
        return None
    is_told = is_in_order and num_groups * size == shape[1] and bool(sizes or num_groups == 1)
    return shape, ((1, size) if is_told else None)


def _group_size(num_columns: int, num_groups: int, sizes: set[int]) -> int:
    """The columns of a group; 0 if neither `sizes` nor the columns tell."""
    if num_groups == 1:
        return num_columns
    if not sizes:
        return 0 if num_columns % num_groups else num_columns // num_groups
    fitting = [size for size in sizes if -(-num_columns // size) == num_groups]
    return fitting[0] if len(fitting) == 1 else 0


def measure_awq(shapes: Shapes) -> Measured:
    """AWQ: values [C, W], zeros [G, W], scale [G, R]."""
    num_columns, num_words = shapes["values"]
    num_rows = WORD_BITS // 4 * num_words
    if not _fits_groups(shapes, (num_rows, num_columns), 4):
        return None
    size, rest = divmod(num_columns, shapes["scale"][0])
    return None if rest else ((num_rows, num_columns), (1, size))


def _fits_groups(shapes: Shapes, shape: tuple[int, int], bits: int) -> bool:
    num_rows, num_columns = shape
    scales = shapes["scale"]
    words, rest = divmod(num_rows * bits, WORD_BITS)
    return (
        len(scales) == 2
        and 0 < scales[0] <= num_columns
        and scales[1] == num_rows
        and shapes["zeros"] == (scales[0], words)
        and rest == 0
    )
