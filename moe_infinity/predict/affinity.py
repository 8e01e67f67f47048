"""Which replica has the experts that a request will activate. No torch, no Ray.

A request's activation matrix is predicted from the ids of its prompt's tokens, by a token table of
the same kind as the predictor's. Replicas tell what they served lately, as a moving average of the
matrices of their requests. Both are compared after the base rates are taken away, because all
requests share these. L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_infinity.experts import Ints
from moe_infinity.predict.tables import Floats, TokenTable

RECENT = 0.1  # weight of the newest request in what a replica served lately
BAND = 0.1  # replicas whose similarity is less than this below the best one are as good
SLACK = 1  # a replica that has more requests above the fewest than this gets none
MOST_PROMPT_TOKENS = 512  # of a prompt, the last ones, that predict


class RequestForecast:
    """Predicts the activation matrix of a request, from what earlier requests activated."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._tokens = TokenTable(num_layers, num_experts)
        self._counts_LE = np.ones((num_layers, num_experts), dtype=np.float32)

    @property
    def base_LE(self) -> Floats:
        """How often each expert is activated, as a share of its layer's activations."""
        base_LE: Floats = self._counts_LE / self._counts_LE.sum(axis=1, keepdims=True)
        return base_LE

    def learn(self, token_ids_T: Ints, experts_TLK: Ints) -> None:
        """A request has ended."""
        for token_id, experts_LK in zip(token_ids_T.tolist(), experts_TLK, strict=True):
            self._tokens.learn(token_id, experts_LK, after=False)
        self._counts_LE += matrix_of(experts_TLK, self._counts_LE.shape)

    def predict(self, prompt_ids: Sequence[int]) -> Floats:
        """[L, E]: what is above the base rate, and what below; zeros if nothing is known."""
        base_LE = self.base_LE
        log_base_LE = np.log(base_LE)
        total_LE = np.zeros_like(base_LE)
        for token_id in prompt_ids[-MOST_PROMPT_TOKENS:]:
            evidence_LE = self._tokens.evidence(
                token_id, after=False, base_LE=base_LE, log_base_LE=log_base_LE
            )
            if evidence_LE is not None:
                total_LE += evidence_LE
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


def matrix_of(experts_TLK: Ints, shape: tuple[int, ...]) -> Floats:
    """[L, E]: how many tokens each expert served."""
    eam_LE = np.zeros(shape, dtype=np.float32)
    for moe_layer_idx, experts_TK in enumerate(experts_TLK.transpose(1, 0, 2)):
        eam_LE[moe_layer_idx] = np.bincount(experts_TK.ravel(), minlength=shape[1])
    return eam_LE


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
