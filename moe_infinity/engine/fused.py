"""The fused backend: the experts that have arrived compute in one call of our kernels.

T tokens, K experts per token, P = T * K (token, k) pairs, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_infinity.experts import Routing, rows_of_experts
from moe_infinity.kernels.many_rows import RowPath
from moe_infinity.memory.slots import Slots

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts, Rows

NO_ROW = -1  # of a pair without an expert


class FusedBackend:
    """Computes the experts of one MoE layer with our kernels."""

    def __init__(self, experts: FusedExperts, slots: Slots, *, weighs_input: bool) -> None:
        """The weights of a routing scale what comes out of an expert or, with `weighs_input`, what
        goes in.
        """
        self.experts = experts
        self.tables = slots.tables(experts.parts)
        self.weighs_input = weighs_input

    def compute(
        self,
        rows: Rows,
        rows_of: dict[int, slice],
        expert_idxs: Sequence[int],
        slot_ids: Sequence[int],
    ) -> None:
        """The rows of these experts, which lie in these slots."""
        rows.compute(
            [rows_of[expert_idx].start for expert_idx in expert_idxs],
            [rows_of[expert_idx].stop for expert_idx in expert_idxs],
            [self.tables[slot_id] for slot_id in slot_ids],
        )


class FusedWork:
    """One MoE layer in one step: rows sorted by expert, each row's output kept in float32."""

    def __init__(
        self,
        backend: FusedBackend,
        x_TD: Tensor,
        routing: Routing,
        path: RowPath = RowPath.FEW,
    ) -> None:
        assert routing.top_k_index_TK is not None, routing
        assert routing.top_k_weights_TK is not None, routing
        num_tokens, top_k = routing.top_k_index_TK.shape
        order_P = routing.top_k_index_TK.ravel().argsort(kind="stable")  # of pairs by expert
        self._backend = backend
        self._dtype = x_TD.dtype
        self.path = path
        self._row_P = np.empty_like(order_P)
        self._row_P[order_P] = np.arange(len(order_P))
        self._row_P[order_P[: routing.num_without]] = NO_ROW
        self.rows_of = rows_of_experts(routing)
        self._weights_TK = routing.top_k_weights_TK.to(torch.float32).contiguous()
        tokens_P = None
        self.input_P = order_P // top_k
        if backend.weighs_input:
            pairs_P = torch.from_numpy(order_P)
            x_TD = x_TD[pairs_P // top_k] * routing.top_k_weights_TK.reshape(-1, 1)[pairs_P]
            self._weights_TK = torch.ones_like(self._weights_TK)
            self.input_P = np.arange(len(order_P))
        elif num_tokens > 1 or not isinstance(routing.counts, int):
            tokens_P = torch.from_numpy(self.input_P)
        self.x_TD = x_TD
        self._rows = backend.experts.begin(x_TD, len(order_P), tokens_P, path=path)

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        self._backend.compute(self._rows, self.rows_of, expert_idxs, slot_ids)

    def put(self, expert_idx: int, out_RD: Tensor) -> None:
        """Keep the output of an expert, not weighted, whatever computed it."""
        self._rows.out_PD[self.rows_of[expert_idx]] = out_RD

    def sum(self) -> Tensor:
        """[T, D]: in the order of k, so the same bits in whatever order experts were run."""
        return self._rows.sum(self._row_P, self._weights_TK).to(self._dtype)
