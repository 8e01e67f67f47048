"""The fused backend: the experts that have arrived compute in one call of our kernels, in float32.

The weights of a layer evict everything else from the processor's caches, so that code runs slowly
after each. Short plain lists need less of it than arrays do.

T tokens, K experts per token, P = T * K (token, k) pairs, D model width.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_infinity.engine.routing import Routing

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts

FUSED_ROWS = 8  # of one expert; for more torch's matrix product is faster
PACKED_ROWS = 16  # of a packed expert; for more it is faster to unpack it once


class FusedBackend:
    """For the experts of one MoE layer."""

    def __init__(
        self,
        experts: FusedExperts,
        address_of: Callable[[int], int],
        *,
        most_rows: int,
        weighs_input: bool,
    ) -> None:
        """`address_of(slot_id)` is where a slot begins in memory. `most_rows` is how many rows of
        one expert this backend takes. The weights of a routing scale what comes out of an expert
        or, with `weighs_input`, what goes in.
        """
        self.experts = experts
        self.address_of = address_of
        self.most_rows = most_rows
        self.weighs_input = weighs_input

    def takes(self, routing: Routing) -> bool:
        """Whether no expert has more than `most_rows` rows, and every pair has an expert."""
        if routing.experts_TK is None or not routing.activated or routing.num_without:
            return False
        is_short = routing.num_tokens <= self.most_rows
        return is_short or int(np.max(routing.counts)) <= self.most_rows

    def begin(self, x_TD: Tensor, routing: Routing) -> FusedWork:
        return FusedWork(self, x_TD, routing)


class FusedWork:
    """One MoE layer in one step: rows sorted by expert, each row's output kept in float32."""

    def __init__(self, backend: FusedBackend, x_TD: Tensor, routing: Routing) -> None:
        assert routing.experts_TK is not None, routing
        assert routing.weights_TK is not None, routing
        experts_P = routing.experts_TK.ravel().tolist()
        order_P = sorted(range(len(experts_P)), key=experts_P.__getitem__)  # of pairs by expert
        self._backend = backend
        self._dtype = x_TD.dtype
        self._place_P = array("q", bytes(8 * len(experts_P)))  # the row of each pair
        self._starts: dict[int, int] = {}
        self._stops: dict[int, int] = {}
        for place, pair in enumerate(order_P):
            self._place_P[pair] = place
            self._starts.setdefault(experts_P[pair], place)
            self._stops[experts_P[pair]] = place + 1
        self._weights_TK = routing.weights_TK.to(torch.float32).contiguous()
        if len(x_TD) > 1 or backend.weighs_input:
            x_TD = x_TD[[pair * len(x_TD) // len(experts_P) for pair in order_P]]
        if backend.weighs_input:
            x_TD = x_TD * routing.weights_TK.reshape(-1, 1)[order_P]
            self._weights_TK = torch.ones_like(self._weights_TK)
        self._rows = backend.experts.begin(x_TD, len(experts_P))

    def run(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        self._rows.compute(
            [self._starts[expert_idx] for expert_idx in expert_idxs],
            [self._stops[expert_idx] for expert_idx in expert_idxs],
            [self._backend.address_of(slot_id) for slot_id in slot_ids],
        )

    def sum(self) -> Tensor:
        """[T, D]: in the order of k, so the same bits in whatever order experts were run."""
        return self._rows.sum(self._place_P, self._weights_TK).to(self._dtype)
