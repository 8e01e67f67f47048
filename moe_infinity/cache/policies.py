"""A policy gives every expert a score. The victim is the lowest-scored resident that is not held.

Scores are numpy arrays [layers, experts], and nothing here loops over experts. The engine calls a
policy in the order of the steps: `begin_step`, then `touch` for each MoE layer. All but
"activation-aware" treat a batch as one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.activation_aware import ActivationAware, Chances
from moe_infinity.experts import Ints, Phase, Step

Scores = NDArray[np.floating[Any]]
Experts = Sequence[int] | Ints


class EvictionPolicy(Protocol):
    """The interface that the residency table and the engine use."""

    def begin_step(self, step: Step) -> None:
        """A forward pass begins."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        """These experts (distinct ids) are activated in this layer in this step. `counts` are the
        tokens routed to each.
        """

    def scores(self) -> Scores:
        """[layers, experts]; the higher, the longer it stays. The caller only reads it."""


class Lru(EvictionPolicy):
    """Least recently used: the score is the time of the last use."""

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        self._last_use = np.zeros((num_layers, num_experts))
        self._clock = 0

    def begin_step(self, step: Step) -> None:
        """Nothing changes: this policy counts no steps and no requests."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        self._clock += 1
        self._last_use[moe_layer_idx, experts] = self._clock

    def scores(self) -> Scores:
        return self._last_use


class Lfu(EvictionPolicy):
    """Least frequently used since the model was loaded: the score is the number of uses."""

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        self._uses = np.zeros((num_layers, num_experts))

    def begin_step(self, step: Step) -> None:
        """Nothing changes: this policy counts no steps and no requests."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        self._uses[moe_layer_idx, experts] += 1

    def scores(self) -> Scores:
        return self._uses


class RequestLfu(Lru):
    """Least frequently used by the running request, the least recently used first among equals.

    Prefill does not count as use: it activates nearly every expert (v3 §4.3 traces it apart).
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        super().__init__(num_layers, num_experts, num_slots=num_slots)
        self._uses = np.zeros((num_layers, num_experts))
        self._is_decode = False

    def begin_step(self, step: Step) -> None:
        self._is_decode = step.phase is Phase.DECODE
        if step.begins_B.any():
            self._uses[:] = 0

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        super().touch(moe_layer_idx, experts)
        if self._is_decode:
            self._uses[moe_layer_idx, experts] += 1

    def scores(self) -> Scores:
        """Uses, plus recency as a fraction in [0, 1) that decides between equal uses."""
        scores: Scores = self._uses + self._last_use / (self._clock + 1)
        return scores


ACTIVATION_AWARE = "activation-aware"  # ours, and the default
POLICY_CLASSES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "request-lfu": RequestLfu,
}
POLICIES = (ACTIVATION_AWARE, *POLICY_CLASSES)  # what an engine can run; the simulator has more


def make_policy(
    name: str, *, num_layers: int, num_experts: int, num_slots: int, chances: Chances | None = None
) -> EvictionPolicy:
    """A new policy by its name in `POLICIES`. `chances` are needed by "activation-aware" only."""
    if name == ACTIVATION_AWARE:
        assert chances is not None, "activation-aware needs a predictor"
        return ActivationAware(chances, num_layers)
    return POLICY_CLASSES[name](num_layers, num_experts, num_slots=num_slots)
