"""Which rows go to which expert where experts compute together (experts_cpu.py), and the sum over a
token's experts: float32 throughout, rounded once. dispatch.py has the plain way.

T tokens, K experts per token, P = T * K (token, k) pairs, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from moe_infinity.kernels.experts_cpu import FusedExperts


class FusedRows:
    """The work of one layer in one step. Every pair has an expert."""

    def __init__(
        self,
        fused: FusedExperts,
        index_TK: NDArray[np.int64],
        x_TD: Tensor,
        top_k_weights_TK: Tensor,
    ) -> None:
        flat_P = index_TK.ravel()
        order_P = flat_P.argsort(kind="stable")  # of pairs by expert
        sorted_P = flat_P[order_P]
        starts = np.flatnonzero(np.diff(sorted_P, prepend=-1))
        self.activated: list[int] = sorted_P[starts].tolist()  # distinct expert ids, ascending
        self.counts = np.diff(starts, append=len(flat_P))  # rows of each
        stops = (starts + self.counts).tolist()
        self._rows = dict(
            zip(self.activated, zip(starts.tolist(), stops, strict=True), strict=True)
        )
        self._weights_TK = top_k_weights_TK.to(torch.float32).contiguous().numpy()
        self._place_TK = np.empty(index_TK.shape, np.int64)  # among the rows, of each pair
        self._place_TK.ravel()[order_P] = np.arange(len(flat_P))
        if len(index_TK) > 1:
            x_TD = x_TD[torch.from_numpy(order_P // index_TK.shape[1])]
        self._fused_rows = fused.begin(x_TD, len(flat_P))

    def add(self, expert_idxs: Sequence[int], addresses: Sequence[int]) -> None:
        """Compute these experts, in any order. They lie at `addresses`."""
        starts, stops = zip(*(self._rows[expert_idx] for expert_idx in expert_idxs), strict=True)
        self._fused_rows.compute(starts, stops, addresses)

    def sum(self, dtype: torch.dtype) -> Tensor:
        """[T, D]: in the order of k, so the same bits whatever the order of the `add` calls."""
        return self._fused_rows.sum(self._place_TK, self._weights_TK).to(dtype)
