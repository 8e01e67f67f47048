"""Which rows go to which expert, and the sum over a token's experts in a fixed order.

Two of transformers' implementations are reproduced bit for bit, in whatever order experts come:

    grouped_mm  (its default on CPU)  rows of an expert in token order;
                                      a token's K outputs summed as one reduction
    eager       (the class's loop)    rows of an expert in (k, token) order;
                                      outputs added one by one by expert id

T tokens, K experts per token, P = T * K (token, k) pairs, D model width, R rows of one expert.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class RoutedRows:
    """The rows of one layer in one step, sorted by expert; collects outputs expert by expert."""

    def __init__(self, top_k_index_TK: Ints, *, is_eager: bool) -> None:
        self._index_TK = top_k_index_TK
        self._is_eager = is_eager
        num_tokens, top_k = top_k_index_TK.shape
        flat = (top_k_index_TK.T if is_eager else top_k_index_TK).ravel()
        order = flat.argsort(kind="stable")
        pairs = order % num_tokens * top_k + order // num_tokens if is_eager else order
        by_expert = flat[order]
        bounds = ((by_expert[1:] != by_expert[:-1]).nonzero()[0] + 1).tolist()
        starts, stops = [0, *bounds], [*bounds, len(flat)]
        self.activated: Ints = by_expert[starts]  # distinct expert ids, ascending
        self._rows = dict(zip(self.activated.tolist(), map(slice, starts, stops), strict=True))
        self._pairs_P = torch.from_numpy(pairs)
        self._inputs_PD: Tensor | None = None
        self._outputs_PD: Tensor | None = None

    def gather(self, x_TD: Tensor) -> None:
        """Copy the rows of every expert next to each other."""
        self._inputs_PD = x_TD[self._pairs_P // self._index_TK.shape[1]]

    def inputs_of(self, expert_idx: int) -> Tensor:
        """[R, D]: the rows routed to this expert."""
        assert self._inputs_PD is not None, "gather() comes first"
        return self._inputs_PD[self._rows[expert_idx]]

    def add(self, expert_idx: int, out_RD: Tensor, top_k_weights_TK: Tensor) -> None:
        """Keep an expert's output, weighted, at the places of its (token, k) pairs."""
        pairs_R = self._pairs_P[self._rows[expert_idx]]
        weighted_RD = out_RD * top_k_weights_TK.reshape(-1)[pairs_R, None]
        if self._outputs_PD is None:
            self._outputs_PD = weighted_RD.new_empty(len(self._pairs_P), out_RD.shape[1])
        self._outputs_PD[pairs_R] = weighted_RD

    def sum(self, dtype: torch.dtype) -> Tensor:
        """[T, D]: the layer's output, the same bits whatever the order of the `add` calls."""
        assert self._outputs_PD is not None, "add() comes first"
        num_tokens, top_k = self._index_TK.shape
        outputs_TKD = self._outputs_PD.view(num_tokens, top_k, -1)
        if not self._is_eager:
            return outputs_TKD.sum(dim=1).to(dtype)
        by_expert_TK = torch.from_numpy(self._index_TK.argsort(axis=1, kind="stable"))
        total_TD = outputs_TKD.new_zeros(num_tokens, outputs_TKD.shape[2], dtype=dtype)
        tokens = torch.arange(num_tokens)
        for k in range(top_k):
            total_TD += outputs_TKD[tokens, by_expert_TK[:, k]].to(dtype)
        return total_TD
