"""The fused backend: the experts that have arrived compute in one call of our kernels, in float32.

T tokens, K experts per token, P = T * K (token, k) pairs, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_infinity.cluster.share import Share
from moe_infinity.routing import Routing, rows_of_experts

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts, Rows

NO_ROW = -1  # of a pair without an expert


class FusedBackend:
    """For the experts of one MoE layer."""

    def __init__(
        self, experts: FusedExperts, address_of: Callable[[int], int], *, weighs_input: bool
    ) -> None:
        """`address_of(slot_id)` is where a slot begins in memory. The weights of a routing scale
        what comes out of an expert or, with `weighs_input`, what goes in.
        """
        self.experts = experts
        self.address_of = address_of
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
            [self.address_of(slot_id) for slot_id in slot_ids],
        )

    def begin(self, x_TD: Tensor, routing: Routing) -> FusedWork:
        return FusedWork(self, x_TD, routing)

    def begin_share(self, share: Share) -> FusedShare:
        return FusedShare(self, share)


class FusedWork:
    """One MoE layer in one step: rows sorted by expert, each row's output kept in float32."""

    def __init__(self, backend: FusedBackend, x_TD: Tensor, routing: Routing) -> None:
        assert routing.experts_TK is not None, routing
        assert routing.weights_TK is not None, routing
        num_tokens, top_k = routing.experts_TK.shape
        order_P = routing.experts_TK.ravel().argsort(kind="stable")  # of pairs by expert
        self._backend = backend
        self._dtype = x_TD.dtype
        self._row_P = np.empty_like(order_P)
        self._row_P[order_P] = np.arange(len(order_P))
        self._row_P[order_P[: routing.num_without]] = NO_ROW
        self._rows_of = rows_of_experts(routing)
        self._weights_TK = routing.weights_TK.to(torch.float32).contiguous()
        tokens_P = None
        self._input_P = order_P // top_k
        if backend.weighs_input:
            pairs_P = torch.from_numpy(order_P)
            x_TD = x_TD[pairs_P // top_k] * routing.weights_TK.reshape(-1, 1)[pairs_P]
            self._weights_TK = torch.ones_like(self._weights_TK)
            self._input_P = np.arange(len(order_P))
        elif num_tokens > 1 or not isinstance(routing.counts, int):
            tokens_P = torch.from_numpy(self._input_P)
        self._x = x_TD
        self._rows = backend.experts.begin(x_TD, len(order_P), tokens_P)

    def run(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        self._backend.compute(self._rows, self._rows_of, expert_idxs, slot_ids)

    def share(self, expert_idxs: list[int]) -> Share:
        """The part of the work that these experts have, for another host."""
        return Share.of(self._rows_of, expert_idxs, self._x, self._input_P, by_kernels=True)

    def put(self, share: Share, out_PD: Tensor) -> None:
        """Keep what another host has computed."""
        for expert_idx, rows in share.rows_of.items():
            self._rows.out_PD[self._rows_of[expert_idx]] = out_PD[rows]

    def sum(self) -> Tensor:
        """[T, D]: in the order of k, so the same bits in whatever order experts were run."""
        return self._rows.sum(self._row_P, self._weights_TK).to(self._dtype)


class FusedShare:
    """The rows that another host asks for."""

    def __init__(self, backend: FusedBackend, share: Share) -> None:
        self._backend = backend
        self._rows_of = share.rows_of
        self._rows = backend.experts.begin(share.x_ID, len(share.input_P), share.input_P)

    def run(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        self._backend.compute(self._rows, self._rows_of, expert_idxs, slot_ids)

    def outputs(self) -> Tensor:
        """[P, D] in float32, not weighted."""
        return self._rows.out_PD
