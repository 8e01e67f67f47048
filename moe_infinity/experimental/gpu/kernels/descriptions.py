"""What kernels are given beside tensors: where keys and values lie, how queries and keys are made,
how a router chooses. But for the fields of CachedLayer, which come in a tensor, all of it is known
when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

# The three forms of RMSNorm. The normed row is rounded before it is multiplied by the weight, and
# after; or after alone; and that after multiplying by 1 + weight.
FORMS = ("rounded twice", "rounded once", "plus one")


class CachedLayer(NamedTuple):
    """What one layer has in the cache in one step: int64 numbers, which kernels read from a tensor,
    as buffers grow and move. A sequence's tokens lie one after the other: rows of d numbers for
    keys, of v for values. Strides are in numbers of that dtype, addresses multiples of 16.

    Legend: B sequences, G heads of the cache, N tokens.
    """

    keys: int  # address of [B, G, N, d], from the first token that the layer may look at
    values: int  # address of [B, G, N, v]
    key_seq: int  # from one sequence to the next
    key_head: int  # from one head to the next
    value_seq: int
    value_head: int
    num_tokens: int  # N, with the new one, which is the last and not written yet
    mask: int  # address of uint8 [B, N]: 0 for a token that is not looked at; 0: there is none
    mask_seq: int  # bytes from one sequence to the next


# Which two columns of a head are rotated together, and where the results are put.
HALVES = "halves"  # columns i and i + rotated / 2
NEIGHBOURS = "neighbours"  # columns 2i and 2i + 1
APART = "neighbours, put in halves"
PAIRS = (HALVES, NEIGHBOURS, APART)


class Heads(NamedTuple):
    """How queries and keys are made of products: norms of heads and rotary positions."""

    num_heads: int  # of queries
    num_groups: int  # heads of keys
    query_width: int
    key_width: int
    rotated: int  # the last columns of a query and of a key from first_rotated on; others stay
    first_rotated: int  # column of a query
    first_rotated_key: int  # column of a key
    pairs: str
    norm_form: str | None = None  # one of FORMS, of those that have a weight
    query_eps: float = 0.0
    key_eps: float = 0.0
    norms_all: bool = False  # all heads of a token together, not each on its own
    normed_key: int = 0  # so many columns of a key have a norm, the first ones; 0: all


SCORES = ("softmax", "sigmoid", "logits")  # of the logits; softmax: over all experts
# The scores of the chosen as they are, divided by their sum, or their softmax.
WEIGHTS = ("as they are", "divided by their sum", "softmax")
GROUP_SCORES = ("best", "sum of two best")
# What is added to a sum before weights are divided by it. Source: DeepseekV3TopkRouter. Classes
# that add nothing divide sums of at least 1 / (number of experts), which it does not change.
TINY = 1e-20


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """What a router does after its product, whatever its class is called. It chooses the `top_k`
    largest of scores + correction: of all experts, or of the groups of neighbouring experts whose
    group score is largest. Weights are made of the scores of the chosen, without the correction.
    """

    top_k: int
    scores: str = "softmax"
    weights: str = "as they are"
    dtype: torch.dtype = torch.float32  # that weights are rounded to
    factor: float = 1.0  # that weights are multiplied by
    num_groups: int = 1  # 1: there are none
    kept_groups: int = 1
    group_score: str = "best"  # of its scores with the correction

    def __post_init__(self) -> None:
        assert self.scores in SCORES, self.scores
        assert self.weights in WEIGHTS, self.weights
        assert self.group_score in GROUP_SCORES, self.group_score
        assert 1 <= self.kept_groups <= self.num_groups, (self.kept_groups, self.num_groups)

    def fits(self, num_experts: int) -> bool:
        """Return True if it can choose among so many."""
        members = num_experts // self.num_groups
        least = 2 if self.num_groups > 1 and self.group_score == GROUP_SCORES[1] else 1
        return (
            num_experts % self.num_groups == 0
            and members >= least
            and 1 <= self.top_k <= self.kept_groups * members
        )
