"""How routers choose experts, as a few values that kernels are given. routing_reference.py computes
it.

    scores    of the logits: their softmax, their sigmoids, or they themselves
    chosen    the top_k largest of scores + correction: of all experts, or of some groups of them
    shares    made of the scores of the chosen, without the correction; times the factor

Neighbouring experts are a group. Those groups are kept whose group score is largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCORES = ("softmax", "sigmoid", "logits")  # softmax: over all experts
# The scores of the chosen as they are, divided by their sum, or their softmax.
SHARES = ("as they are", "divided by their sum", "softmax")
GROUP_SCORES = ("best", "sum of two best")
# What is added to a sum before shares are divided by it. Source: DeepseekV3TopkRouter. Classes that
# add nothing divide sums of at least 1 / (number of experts), which it does not change.
TINY = 1e-20


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """What a router does after its product, whatever its class is called."""

    top_k: int
    scores: str = "softmax"
    shares: str = "as they are"
    dtype: torch.dtype = torch.float32  # that shares are rounded to
    factor: float = 1.0
    num_groups: int = 1  # 1: there are none
    kept_groups: int = 1
    group_score: str = "best"  # of its scores with the correction

    def __post_init__(self) -> None:
        assert self.scores in SCORES, self.scores
        assert self.shares in SHARES, self.shares
        assert self.group_score in GROUP_SCORES, self.group_score
        assert 1 <= self.kept_groups <= self.num_groups, (self.kept_groups, self.num_groups)

    def fits(self, num_experts: int) -> bool:
        """Whether it can choose among so many."""
        members = num_experts // self.num_groups
        least = 2 if self.num_groups > 1 and self.group_score == GROUP_SCORES[1] else 1
        return (
            num_experts % self.num_groups == 0
            and members >= least
            and 1 <= self.top_k <= self.kept_groups * members
        )
