"""The knowledge learned from all requests so far: tables, the collection of requests, base rates,
and a weight for each feature; and the features that a prediction is made from.

predictor.py explains what each factor means. L MoE layers, E experts, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from moe_infinity.predict.eamc import Eamc
from moe_infinity.predict.tables import Floats, FollowTable, TokenTable

LEARNING_RATE = 0.004  # of the weights, per token, divided by the number of layers
BASE_RATE = 0.0005  # of the base rate, per token, once some thousands of tokens were seen
EAMC_CAPACITY = 120  # paper §9.6: the plateau
LEAST_BASE = np.float32(1e-4)  # of a base rate
LOWEST_ODDS = np.float32(-30)  # logarithm; below it an expert is as good as never used


class Feature(IntEnum):
    """Index of a feature in an array. All but the first two are factors: they can be left out."""

    BASE = 0
    BIAS = 1
    REQUEST = 2
    TRANSITION = 3
    NEXT_TOKEN = 4
    EAMC = 5
    TOKEN = 6
    LAYER = 7
    ROUTER = 8


FACTORS = tuple(feature.name.lower() for feature in Feature if feature > Feature.BIAS)


class Stage(IntEnum):
    """The token or layer that a prediction is made for."""

    NEXT = 0  # the next token, right after a layer was routed
    NOW = 1  # the token that is beginning
    AHEAD = 2  # the layer after the one that was routed


# What a prototype with weights per layer converged to, on average over the layers, on development
# requests of gpt-oss. The router's weight is a guess, as no trace has one.
START_WEIGHTS = np.array(
    [  # base bias request transition next_token eamc token layer router
        [1.0, -0.2, 0.35, 1.1, 0.6, 0.0, 0.0, 0.0, 0.0],
        [1.0, -0.3, 0.3, 0.9, 0.2, 0.0, 0.8, 0.0, 0.0],
        [1.0, -0.5, 0.3, 0.1, 0.2, 0.0, 0.6, 1.4, 3.0],
    ],
    dtype=np.float32,
)

# 1 for the features that each stage can know.
KNOWN = np.ones_like(START_WEIGHTS)
KNOWN[Stage.NEXT, Feature.TOKEN :] = 0
KNOWN[Stage.NOW, Feature.LAYER :] = 0


class Knowledge:
    """The part of a predictor that all sequences share. FACTORS that `without` names are not
    used.
    """

    def __init__(self, num_layers: int, num_experts: int, *, without: Sequence[str] = ()) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.eamc = Eamc(EAMC_CAPACITY, num_layers, num_experts)
        self.transitions = FollowTable(num_layers, num_experts)
        self.layers = FollowTable(num_layers, num_experts)  # layer 0 follows nothing
        self.tokens = TokenTable(num_layers, num_experts)
        self.factors = frozenset(FACTORS) - set(without)
        self._mask = KNOWN.copy()
        for name in without:
            self._mask[:, Feature[name.upper()]] = 0
        self.weights = START_WEIGHTS * self._mask
        self.base_LE = np.full((num_layers, num_experts), 1 / num_experts, dtype=np.float32)
        self.log_base_LE = np.log(self.base_LE)
        self.num_tokens = 0  # learned from so far

    def restore(self, base_LE: Floats, weights: Floats, num_tokens: int) -> None:
        """Go on with what an earlier predictor learned. No step has begun yet. Raises ValueError
        for arrays of another shape.
        """
        if (base_LE.shape, weights.shape) != (self.base_LE.shape, self.weights.shape):
            raise ValueError(f"base rates {base_LE.shape} and weights {weights.shape}")
        self.base_LE[:] = base_LE
        self.weights[:] = weights
        self.num_tokens = num_tokens

    def add_token_evidence(self, token_id: int, out_LE: Floats, *, after: bool) -> None:
        """Write to `out_LE` [L, E] what a token says of its experts, or of those of the token
        after it; zeros if nothing is known.
        """
        evidence_LE = self.tokens.evidence(
            token_id, after=after, base_LE=self.base_LE, log_base_LE=self.log_base_LE
        )
        out_LE[:] = 0 if evidence_LE is None else evidence_LE

    def learn_weights(
        self, features_FLE: Floats, used_LE: Floats, is_refined_L: NDArray[np.bool_]
    ) -> None:
        """One gradient step of the log loss, for all three stages at once. AHEAD learns from those
        layers only that were predicted at that stage.
        """
        features = features_FLE.reshape(len(features_FLE), -1)
        error = used_LE.reshape(-1) - chances_of(self.weights @ features)
        error.reshape(-1, *used_LE.shape)[Stage.AHEAD, ~is_refined_L] = 0
        step = error @ features.T
        step *= self._mask * np.float32(LEARNING_RATE / self.num_layers)
        self.weights += step

    def learn_base(self, used_LE: Floats) -> None:
        """Count one token's experts in the base rates."""
        self.num_tokens += 1
        rate = max(BASE_RATE, 1 / (self.num_tokens + 4))
        self.base_LE += np.float32(rate) * (used_LE - self.base_LE)
        np.maximum(self.base_LE, LEAST_BASE, out=self.base_LE)


def chances_of(log_odds: Floats) -> Floats:
    """The logistic function, in place."""
    np.maximum(log_odds, LOWEST_ODDS, out=log_odds)
    np.negative(log_odds, out=log_odds)
    np.exp(log_odds, out=log_odds)
    log_odds += 1
    chances: Floats = np.reciprocal(log_odds, out=log_odds)
    return chances
