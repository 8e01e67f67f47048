"""A policy is a score: one float per (MoE row, expert). The victim is the lowest-scored resident
nobody holds.

Scores are numpy arrays [rows, experts] and updates are vectorised: nothing here loops over experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Experts = Sequence[int] | NDArray[np.int64]


class EvictionPolicy(Protocol):
    """What the residency table asks of a policy, and what the engine tells it."""

    def touch(self, moe_row: int, experts: Experts) -> None:
        """These experts (distinct ids) are activated in this row in this step."""

    def scores(self) -> Scores:
        """[rows, experts]; the higher, the longer it stays. The caller only reads it."""


class Lru:
    """Least recently used: the score is the time of the last use."""

    def __init__(self, num_rows: int, num_experts: int) -> None:
        self._last_use = np.zeros((num_rows, num_experts))
        self._clock = 0

    def touch(self, moe_row: int, experts: Experts) -> None:
        self._clock += 1
        self._last_use[moe_row, experts] = self._clock

    def scores(self) -> Scores:
        return self._last_use


class Lfu:
    """Least frequently used since the model was loaded: the score is the number of uses."""

    def __init__(self, num_rows: int, num_experts: int) -> None:
        self._uses = np.zeros((num_rows, num_experts))

    def touch(self, moe_row: int, experts: Experts) -> None:
        self._uses[moe_row, experts] += 1

    def scores(self) -> Scores:
        return self._uses


POLICIES: dict[str, type[Lru] | type[Lfu]] = {"lru": Lru, "lfu": Lfu}


def make_policy(name: str, *, num_rows: int, num_experts: int) -> EvictionPolicy:
    """A fresh policy by its name in `POLICIES`."""
    return POLICIES[name](num_rows, num_experts)
