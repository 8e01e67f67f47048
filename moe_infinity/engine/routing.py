"""What the router of one MoE layer chose in one step. Made once, and handed on.

T tokens, K experts per token, P = T * K (token, k) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moe_infinity.experts import Ints

NO_EXPERT = -1  # in place of an expert id: the pair has none


@dataclass(frozen=True, slots=True)
class Routing:
    """Expert ids and weights of every token, and which experts that activates."""

    num_tokens: int  # T
    activated: list[int]  # distinct expert ids, ascending
    counts: Ints | int  # tokens routed to each activated expert; 1 if it is one each
    experts_TK: Ints | None  # on the host; NO_EXPERT: no expert; None: not known by token
    weights_TK: Tensor | None  # where the model computes; None: whoever calls the experts weighs

    @classmethod
    def of(cls, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Routing:
        """From what a router returns. The CPU waits here for the device."""
        experts_TK: Ints = top_k_index_TK.cpu().numpy()
        activated, counts = count_tokens(experts_TK)
        return cls(len(experts_TK), activated, counts, experts_TK, top_k_weights_TK)

    @property
    def num_without(self) -> int:
        """Pairs without an expert."""
        if self.experts_TK is None:
            return 0
        return int((self.experts_TK == NO_EXPERT).sum())


def count_tokens(experts_TK: Ints) -> tuple[list[int], Ints | int]:
    """The distinct experts, ascending, and the tokens of each."""
    if len(experts_TK) == 1:  # a decode step: numpy would take longer
        chosen = [expert_idx for expert_idx in experts_TK[0].tolist() if expert_idx != NO_EXPERT]
        distinct = sorted(set(chosen))
        if len(distinct) == len(chosen):
            return distinct, 1
    activated, counts = np.unique(experts_TK[experts_TK != NO_EXPERT], return_counts=True)
    return activated.tolist(), counts


def without_gaps(experts_TK: Ints) -> Ints:
    """For the recorder and the predictor, which know no NO_EXPERT: in its place another expert of
    the token, or 0 if it has none at all.
    """
    another_T1 = experts_TK.max(axis=1, keepdims=True).clip(0)
    return np.where(experts_TK == NO_EXPERT, another_T1, experts_TK)
