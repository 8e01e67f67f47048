"""Which rows go to which expert where experts compute together (experts_cpu.py), and the sum over a
token's experts: float32 throughout, rounded once. routing.py has the plain way.

Lists and not arrays: after each layer's weights have passed through the caches, what little code
there is costs most.

T tokens, K experts per token, P = T * K (token, k) pairs, D model width.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts

FUSED_ROWS = 8  # of one expert; for more torch's matrix product is faster


class FusedRows:
    """The work of one layer in one step; `flat_P` are its expert ids, one for every pair."""

    num_without = 0  # pairs without an expert

    def __init__(
        self,
        fused: FusedExperts,
        flat_P: list[int],
        x_TD: Tensor,
        top_k_weights_TK: Tensor,
        *,
        weighs_input: bool = False,  # weights scale what goes into an expert, not what comes out
    ) -> None:
        order_P = sorted(range(len(flat_P)), key=flat_P.__getitem__)  # of pairs by expert
        self._place_P = array("q", bytes(8 * len(flat_P)))  # among the rows, of each pair
        self._starts: dict[int, int] = {}
        self._stops: dict[int, int] = {}
        for place, pair in enumerate(order_P):
            self._place_P[pair] = place
            self._starts.setdefault(flat_P[pair], place)
            self._stops[flat_P[pair]] = place + 1
        self.activated = list(self._starts)  # distinct expert ids, ascending
        self._weights_TK = top_k_weights_TK.to(torch.float32).contiguous()
        if len(x_TD) > 1 or weighs_input:
            x_TD = x_TD[[pair * len(x_TD) // len(flat_P) for pair in order_P]]
        if weighs_input:
            x_TD = x_TD * top_k_weights_TK.reshape(-1, 1)[order_P]
            self._weights_TK = torch.ones_like(self._weights_TK)
        self._fused_rows = fused.begin(x_TD, len(flat_P))

    @property
    def counts(self) -> NDArray[np.int64] | int:
        """Tokens routed to each activated expert; 1 if to all of them."""
        if len(self._weights_TK) == 1:
            return 1
        return np.array([self._stops[idx] - start for idx, start in self._starts.items()])

    def add(self, expert_idxs: Sequence[int], addresses: Sequence[int]) -> None:
        """Compute these experts, in any order. They lie at `addresses`."""
        starts = [self._starts[expert_idx] for expert_idx in expert_idxs]
        stops = [self._stops[expert_idx] for expert_idx in expert_idxs]
        self._fused_rows.compute(starts, stops, addresses)

    def sum(self, dtype: torch.dtype) -> Tensor:
        """[T, D]: in the order of k, so the same bits whatever the order of the `add` calls."""
        return self._fused_rows.sum(self._place_P, self._weights_TK).to(dtype)
