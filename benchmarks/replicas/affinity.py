"""Which replica has the experts that a request will activate. No torch, no Ray.

A request's activation matrix is predicted from the ids of its prompt's tokens: by what earlier
requests activated whose prompts had these tokens. Replicas tell what they served lately, as a
moving average of the matrices of their requests. Both are compared after the base rates are taken
away, because all requests share these. L MoE layers, E experts.

Simulations only: on recorded traces it saves too little (docs/experiments.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from moe_infinity.predict.tables import PRIOR, Floats

RECENT = 0.1  # weight of the newest request in what a replica served lately
BAND = 0.1  # replicas whose similarity is less than this below the best one are as good
BASE_RATE = 0.01  # weight of the newest request in the base rates
TABLE_BYTES = 64 << 20  # of all tokens
SLACK = 1  # a replica that has more requests above the fewest than this gets none
MOST_PROMPT_TOKENS = 512  # of a prompt, the last ones, that predict


class RequestForecast:
    """Predicts the activation matrix of a request, from what earlier requests with tokens of its
    prompt activated.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._base_LE = np.full((num_layers, num_experts), 1 / num_experts, dtype=np.float32)
        self._num_requests = 0
        self._most_tokens = max(TABLE_BYTES // self._base_LE.nbytes, 1)
        # Of each token id the mean of such matrices, and of how many; the one used last comes last.
        self._of_token: OrderedDict[int, tuple[Floats, int]] = OrderedDict()

    @property
    def base_LE(self) -> Floats:
        """How often each expert is activated, as a share of its layer's activations."""
        return self._base_LE

    def learn(self, prompt_ids: Sequence[int], eam_LE: Floats) -> None:
        """A request has ended."""
        share_LE = eam_LE / np.maximum(eam_LE.sum(axis=1, keepdims=True), 1)
        self._num_requests += 1
        rate = max(BASE_RATE, 1 / self._num_requests)
        self._base_LE = self._base_LE + np.float32(rate) * (share_LE - self._base_LE)
        for token_id in set(prompt_ids[-MOST_PROMPT_TOKENS:]):
            mean_LE, num = self._of_token.pop(token_id, (np.zeros_like(self._base_LE), 0))
            rate = max(RECENT, 1 / (num + 1))
            mean_LE += np.float32(rate) * (share_LE - mean_LE)
            self._of_token[token_id] = mean_LE, num + 1
            if len(self._of_token) > self._most_tokens:
                self._of_token.popitem(last=False)

    def predict(self, prompt_ids: Sequence[int]) -> Floats:
        """[L, E]: what is above the base rate, and what below; zeros if nothing is known. A token
        that many requests have tells little, as its mean is near the base rate.
        """
        total_LE = np.zeros_like(self._base_LE)
        for token_id in set(prompt_ids[-MOST_PROMPT_TOKENS:]):
            if token_id in self._of_token:
                mean_LE, num = self._of_token[token_id]
                total_LE += (mean_LE - self._base_LE) * np.float32(num / (num + PRIOR))
        return total_LE


class Served:
    """What a replica served lately."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._share_LE = np.zeros((num_layers, num_experts), dtype=np.float32)
        self._num_requests = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self._share_LE.shape

    def add(self, eam_LE: Floats) -> None:
        """A request has ended."""
        self._num_requests += 1
        rows_L1 = eam_LE.sum(axis=1, keepdims=True)
        rate = max(RECENT, 1 / self._num_requests)
        self._share_LE += rate * (eam_LE / np.maximum(rows_L1, 1) - self._share_LE)

    def beyond(self, base_LE: Floats) -> Floats:
        """[L, E]: what is above the base rate, and what below; zeros if it has served nothing."""
        return self._share_LE - base_LE if self._num_requests else np.zeros_like(base_LE)


def similarity(one_LE: Floats, other_LE: Floats) -> float:
    """The cosine; 0 if one of them has no direction."""
    norms = float(np.linalg.norm(one_LE) * np.linalg.norm(other_LE))
    return float(np.vdot(one_LE, other_LE)) / norms if norms > 0 else 0.0


def choose(loads: Sequence[int], similarities: Sequence[float]) -> int:
    """The least loaded of the replicas that are about as similar as the most similar one; none that
    has more to do than the least loaded one, but for a request.
    """
    able = [idx for idx, load in enumerate(loads) if load <= min(loads) + SLACK]
    best = max(similarities[idx] for idx in able)
    near = [idx for idx in able if similarities[idx] >= best - BAND]
    return min(near, key=lambda idx: (loads[idx], -similarities[idx]))
