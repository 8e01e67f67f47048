"""The experts that the router of one MoE layer chose in one step. A Routing is made once, and
passed on.

T tokens, K experts per token, P = T * K (token, k) pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from moe_infinity.experts import Ints

NO_EXPERT = -1  # in place of an expert id: the pair has none


class Routing(NamedTuple):
    """Expert ids and weights of every token, and which experts that activates."""

    num_tokens: int  # T
    activated: list[int]  # distinct expert ids, ascending
    counts: Ints | int  # pairs of each activated expert; 1 if that is one each
    num_without: int  # pairs that have no expert
    top_k_index_TK: Ints | None  # on the host; NO_EXPERT: no expert; None: not known by token
    top_k_weights_TK: (
        Tensor | None
    )  # where the model computes; None: the caller of the experts weighs

    @classmethod
    def of(cls, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Routing:
        """Make a Routing of the results of a router. The CPU waits here for the device."""
        return cls.of_experts(top_k_index_TK.cpu().numpy(), top_k_weights_TK)

    @classmethod
    def of_experts(cls, top_k_index_TK: Ints, top_k_weights_TK: Tensor | None) -> Routing:
        """Make a Routing of expert ids that are on the host already."""
        num_tokens = len(top_k_index_TK)
        if num_tokens == 1:  # a decode step: numpy would take longer
            chosen = top_k_index_TK[0].tolist()
            if NO_EXPERT in chosen:
                chosen = [expert_idx for expert_idx in chosen if expert_idx != NO_EXPERT]
            activated = sorted(set(chosen))
            if len(activated) == len(chosen):
                num_without = top_k_index_TK.size - len(chosen)
                return cls(1, activated, 1, num_without, top_k_index_TK, top_k_weights_TK)
        found, counts = np.unique(top_k_index_TK[top_k_index_TK != NO_EXPERT], return_counts=True)
        num_without = top_k_index_TK.size - int(counts.sum())
        return cls(
            num_tokens, found.tolist(), counts, num_without, top_k_index_TK, top_k_weights_TK
        )


def rows_of_experts(routing: Routing) -> dict[int, slice]:
    """The pairs of each activated expert among all pairs sorted by expert. Pairs without one come
    first.
    """
    first = routing.num_without
    if isinstance(routing.counts, int):
        stops = [*range(first + 1, first + len(routing.activated) + 1)]
    else:
        stops = (routing.counts.cumsum() + first).tolist()
    return dict(zip(routing.activated, map(slice, [first, *stops], stops), strict=False))


def without_gaps(top_k_index_TK: Ints) -> Ints:
    """Expert ids for the recorder and the predictor, which do not know NO_EXPERT: it is replaced by
    another expert of the token, or by 0 if the token has none.
    """
    another_T1 = top_k_index_TK.max(axis=1, keepdims=True).clip(0)
    return np.where(top_k_index_TK == NO_EXPERT, another_T1, top_k_index_TK)
