"""Policies that the simulator replays and no engine runs: those that the paper compares with, the
paper's own (arXiv 2401.14361v3), and Belady's, which knows the future.

All but Belady's treat a batch as one request, as the engine's own policies other than the default
do. L MoE layers, E experts per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache import policies
from moe_infinity.cache.activation_aware import Chances
from moe_infinity.cache.policies import EvictionPolicy, Experts, Lru, Scores
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.predict.eamc import Eamc, EamcMatch, RequestEam

NEIGHBOR_LAYERS = 3  # as in the published code's lru_ds
PROTECTED = 2.0**40  # added to a time, outranks every time; the sum is still exact in float64
EAMC_CAPACITY = 120  # v3 Fig 9: no gain beyond
EPSILON = 1e-8  # unspecified in the paper; the published code's

Touch = tuple[int, Experts]  # MoE layer, distinct experts activated in it
Times = NDArray[np.int64]  # numbers of touches, counted from 0

NEVER = np.iinfo(np.int64).max


class Neighbor(Lru):
    """LRU that keeps the experts of the running layer and the two after it, which are needed next:
    lru_ds of the published code, the paper's "dependency" class (DeepSpeed).
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        super().__init__(num_layers, num_experts, num_slots=num_slots)
        self._layers_ahead = np.arange(NEIGHBOR_LAYERS)
        self._layer = 0

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        super().touch(moe_layer_idx, experts)
        self._layer = moe_layer_idx

    def scores(self) -> Scores:
        """Protect the layers ahead. After the last layer comes layer 0 of the next step."""
        scores: Scores = self._last_use.copy()
        scores[(self._layer + self._layers_ahead) % len(scores)] += PROTECTED
        return scores


class PerLayerLru(Lru):
    """Every layer owns an equal share of the slots and evicts its own least recently used expert
    (Mixtral-Offloading, arXiv 2312.17238).

    As a score: the most recently used experts of a layer, as many as its share, are protected, and
    the others leave first. A layer that activates more experts than its share borrows slots.
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        super().__init__(num_layers, num_experts, num_slots=num_slots)
        share, remainder = divmod(num_slots, num_layers)
        self._shares = [share + (moe_layer_idx < remainder) for moe_layer_idx in range(num_layers)]
        self._scores = np.zeros((num_layers, num_experts))

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        super().touch(moe_layer_idx, experts)
        last_use = self._last_use[moe_layer_idx]
        newest = np.argsort(-last_use, kind="stable")[: self._shares[moe_layer_idx]]
        self._scores[moe_layer_idx] = last_use
        self._scores[moe_layer_idx, newest] += PROTECTED * (last_use[newest] > 0)

    def scores(self) -> Scores:
        return self._scores


class TokenCounts(EvictionPolicy):
    """The share of a layer's tokens that an expert served since the model was loaded, prefill
    included: the paper's "counts" class (BrainStorm).
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        self._counts = np.zeros((num_layers, num_experts))
        self._scores = np.zeros((num_layers, num_experts))

    def begin_step(self, step: Step) -> None:
        """Nothing changes: this policy counts no steps and no requests."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        self._counts[moe_layer_idx, experts] += counts
        self._scores[moe_layer_idx] = self._counts[moe_layer_idx] / max(
            self._counts[moe_layer_idx].sum(), 1
        )

    def scores(self) -> Scores:
        return self._scores


class MoeInfinityV3(EvictionPolicy):
    """The expert cache of the paper as printed: Algorithm 1 with PredictEAM (section 4.5).

        iEAM of this step --most similar EAM of a past request--> pEAM --* (1 - layer / L)--> scores

    The paper leaves open how many past requests to aggregate: here it is the nearest one, as in the
    published code. It also leaves open what prefill does: here it changes no score. Scores are
    computed when asked for, as most touches evict nothing.
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        self._eamc = Eamc(EAMC_CAPACITY, num_layers, num_experts)
        self._match = EamcMatch(self._eamc)
        self._request_eam = np.zeros((num_layers, num_experts), dtype=np.int64)  # decode only
        self._layers_L1 = np.arange(num_layers)[:, None]
        self._layer = 0
        self._top_k = 1
        self._is_decode = False
        self._scores = self._score()
        self._is_stale = False

    def begin_step(self, step: Step) -> None:
        if step.begins_B.any():
            self.scores()  # what prefill will keep, before the collection changes
            self._eamc.add(RequestEam(np.zeros_like(self._request_eam), self._request_eam))
            self._request_eam = np.zeros_like(self._request_eam)
        self._is_decode = step.phase is Phase.DECODE
        if self._is_decode:
            self._match.begin()

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        if self._is_decode:
            self._request_eam[moe_layer_idx, experts] += counts
            self._match.observe(moe_layer_idx, np.asarray(experts), counts)
            self._layer = moe_layer_idx
            self._top_k = len(experts)
            self._is_stale = True

    def scores(self) -> Scores:
        """[L, E]. Algorithm 1: (pEAM[r][e] + eps) * (1 - r / L) / sum(pEAM[r])."""
        if self._is_stale:
            self._scores = self._score()
            self._is_stale = False
        return self._scores

    def chances(self) -> Scores:
        """[L, E]: the multi-layer prefetch order of v1 and v2, likelihood x proximity, as a share
        of the experts a token takes; nothing beyond the last layer.
        """
        predicted = self._predict()
        predicted[: self._layer + 1] = 0
        return np.minimum(predicted * self._top_k, 1)

    def _score(self) -> Scores:
        predicted = self._predict()
        row_sums = predicted.sum(axis=1, keepdims=True)
        row_sums[row_sums == 0] = 1  # a request cut short in its first step has empty rows
        decay_L1 = 1 - self._layers_L1 / len(predicted)
        scores: Scores = (predicted + EPSILON) * decay_L1 / row_sums
        return scores

    def _predict(self) -> Scores:
        """PredictEAM: pEAM [L, E]; uniform rows while nothing is collected.

        Stored rows sum to 1 already: that changes no cosine (rows of a whole EAM have equal sums)
        and makes the normalised aggregate of one match the match itself. The norm of the query is
        the same for all, so it is left out.
        """
        if self._eamc.num_stored:
            nearest = int((self._match.dots / self._eamc.norms).argmax())
            likelihood: Scores = self._eamc.decode_matrix(nearest)
        else:
            likelihood = np.full(self._request_eam.shape, 1 / self._request_eam.shape[1])
        layers_ahead_L1 = np.maximum(self._layers_L1 - self._layer, 0)
        scores: Scores = likelihood * (1 - layers_ahead_L1 / len(likelihood))
        return scores


BASELINES: dict[str, Callable[..., EvictionPolicy]] = {
    "neighbor": Neighbor,
    "per-layer-lru": PerLayerLru,
    "counts": TokenCounts,
    "moe-infinity-v3": MoeInfinityV3,
}
SIMULATED_POLICIES = (*policies.POLICIES, *BASELINES)


def make_policy(
    name: str, *, num_layers: int, num_experts: int, num_slots: int, chances: Chances | None = None
) -> EvictionPolicy:
    """A fresh policy by its name in `SIMULATED_POLICIES`."""
    if name in BASELINES:
        return BASELINES[name](num_layers, num_experts, num_slots=num_slots)
    return policies.make_policy(
        name, num_layers=num_layers, num_experts=num_experts, num_slots=num_slots, chances=chances
    )


def next_uses(touches: Sequence[Touch], *, num_layers: int, num_experts: int) -> list[Times]:
    """For each touch, when each of its experts is touched next, or NEVER. One pass, backwards."""
    next_use = np.full((num_layers, num_experts), NEVER)
    of_touch: list[Times] = []
    for time in reversed(range(len(touches))):
        moe_layer_idx, experts = touches[time]
        of_touch.append(next_use[moe_layer_idx, experts])
        next_use[moe_layer_idx, experts] = time
    return of_touch[::-1]


class Belady(EvictionPolicy):
    """The best any policy can do without prefetch: evict what is needed again last (Belady, 1966).

    `future` is what `next_uses` says of the touches that follow, so it exists in replays only.
    Optimal for decode steps if the experts of each layer fit into the slots at once, but not with
    prefill: the table first evicts what prefill brought in.
    """

    def __init__(self, future: Sequence[Times], *, num_layers: int, num_experts: int) -> None:
        self._future = iter(future)
        self._scores = np.full((num_layers, num_experts), -float(NEVER))
        self._now = 0  # number of the next touch

    def begin_step(self, step: Step) -> None:
        """Steps and requests make no difference here."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        self._scores[moe_layer_idx, experts] = -next(self._future)
        self._now += 1

    def chances(self) -> Scores:
        """[L, E]: 1 for what its layer will activate when it comes next, else 0. Layers take turns,
        one touch each.
        """
        return (-self._scores < self._now + len(self._scores)).astype(np.float64)

    def scores(self) -> Scores:
        return self._scores
