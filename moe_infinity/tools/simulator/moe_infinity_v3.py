"""The expert cache of arXiv 2401.14361v3 as printed: Algorithm 1 with PredictEAM (§4.5).

    iEAM of this step --most similar EAM of a past request--> pEAM --* (1 - layer / L)--> scores

The paper leaves open how many past requests to aggregate: here it is the nearest one, as in the
published code. Also open is what prefill does: here it changes no score.
"""

from __future__ import annotations

import numpy as np

from moe_infinity.cache.policies import EvictionPolicy, Experts, Scores
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.predict.eamc import Eamc, EamcMatch, RequestEam

EAMC_CAPACITY = 120  # v3 Fig 9: no gain beyond
EPSILON = 1e-8  # unspecified in the paper; the published code's


class MoeInfinityV3(EvictionPolicy):
    """L MoE layers, E experts. Scores are computed when asked for: most touches evict nothing."""

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
            likelihood = self._eamc.decode_matrix(nearest)
        else:
            likelihood = np.full(self._request_eam.shape, 1 / self._request_eam.shape[1])
        layers_ahead_L1 = np.maximum(self._layers_L1 - self._layer, 0)
        return likelihood * (1 - layers_ahead_L1 / len(likelihood))
