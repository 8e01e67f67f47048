"""Notices tensors whose contents have changed. Kernels copy the vectors of a layer in float32, and
a change of the original in place would not reach the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import types
from torch import Tensor

from moe_infinity.kernels.cpu.compiler import machine_code
from moe_infinity.kernels.cpu.vectors import int_at

WORD = 8  # bytes


@machine_code(types.boolean(types.int64, types.int64))
def _are_same(table: int, count: int) -> bool:
    """Compare pairs of words: of each pair the table has two addresses and a number of words. The
    last words of a pair may overlap.
    """
    different = types.int64(0)
    for i in range(count):
        one = int_at(table, 3 * i)
        other = int_at(table, 3 * i + 1)
        for j in range(int_at(table, 3 * i + 2)):
            different |= int_at(one, j) ^ int_at(other, j)
    return bool(different == 0)


class KeptContents:
    """The contents of tensors on the CPU, as they are when this is made."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """The tensors are kept, and have to stay where they are in memory."""
        tensors = [x.detach() for x in tensors]
        self._copies = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
        has_words = [x.is_contiguous() and x.nbytes >= WORD for x in tensors]
        pairs = list(zip(tensors, self._copies, has_words, strict=True))
        self._others = [(x, copied) for x, copied, has in pairs if not has]
        self._pairs = [(x, copied) for x, copied, has in pairs if has]
        rows = [row for x, copied in self._pairs for row in _rows(x, copied)]
        self._table = np.array(rows, np.int64)
        self._at = self._table.ctypes.data

    def are_same(self) -> bool:
        """Return True if no tensor's contents have changed."""
        is_same = bool(_are_same(self._at, len(self._table)))
        return is_same and all(torch.equal(x, copied) for x, copied in self._others)


def _rows(x: Tensor, copied: Tensor) -> list[tuple[int, int, int]]:
    """The rows of the table for a pair: all whole words; the last word again if bytes are left."""
    num_words, left = divmod(x.nbytes, WORD)
    rows = [(x.data_ptr(), copied.data_ptr(), num_words)]
    if left:
        last = x.nbytes - WORD
        rows.append((x.data_ptr() + last, copied.data_ptr() + last, 1))
    return rows
