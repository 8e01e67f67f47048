"""Counts learned from earlier tokens: the experts that follow each expert, and the experts of each
token id. Learned online; old evidence fades because full counters are halved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Ints
from moe_infinity.predict.eamc import Eamc

Floats = NDArray[np.float32]

# A probability is (count + PRIOR * base rate) / (number + PRIOR). Halved or doubled it moves the
# hit rate by 0.06 points at most (docs/experiments.md, four requests).
PRIOR = 2.0
FULL = 512  # uses of an expert after which its counts are halved
TOKEN_FULL = 254  # the same for a token id: its counts are bytes
TOKEN_TABLE_BYTES = 64 << 20  # of each of the two tables
MAX_TOKENS = 1 << 16  # token ids kept at most, however small the model


class FollowTable:
    """Counts, for an expert of one layer, how often each expert of a layer followed it."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = np.zeros((num_layers, num_experts, num_experts), dtype=np.float32)
        self.uses = np.zeros((num_layers, num_experts), dtype=np.float32)
        self._ones = np.ones(num_experts, dtype=np.float32)

    def learn(self, before_LK: Ints, after_LK: Ints, *, first_layer: int = 0) -> None:
        """Learn one pair of routings for each layer from `first_layer` on: distinct experts, and
        those that followed.
        """
        layers_L = np.arange(first_layer, first_layer + len(before_LK))
        self.counts[layers_L[:, None, None], before_LK[:, :, None], after_LK[:, None, :]] += 1
        self.uses[layers_L[:, None], before_LK] += 1

    def restore(self, counts: NDArray[Any], uses: NDArray[Any]) -> None:
        """Take up what another table had. Raises ValueError for arrays of another shape."""
        if (counts.shape, uses.shape) != (self.counts.shape, self.uses.shape):
            raise ValueError(f"counts {counts.shape} and uses {uses.shape}")
        self.counts[:] = counts
        self.uses[:] = uses

    def forget(self) -> None:
        """Halve what is full."""
        full = self.uses > FULL
        if full.any():
            self.counts[full] /= 2
            self.uses[full] /= 2

    def probabilities(
        self, moe_layer_idx: int, experts_K: Ints, base_E: Floats, out_E: Floats
    ) -> None:
        """The mean over the K experts of what followed each, mixed with the base rate."""
        num = len(experts_K)
        uses_K = self.uses[moe_layer_idx].take(experts_K)
        trust_K = 1 / (uses_K + np.float32(PRIOR))  # what one count is worth
        np.multiply(base_E, PRIOR / num * float(trust_K.dot(self._ones[:num])), out=out_E)
        trust_K /= num
        out_E += trust_K.dot(self.counts[moe_layer_idx].take(experts_K, axis=0))


class TokenTable:
    """Counts, for a token id, how often each expert served it, and how often each served the token
    after it. Keeps the ids used last.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        capacity = min(max(TOKEN_TABLE_BYTES // (num_layers * num_experts), 1), MAX_TOKENS)
        shape = (2, capacity, num_layers, num_experts)  # 0: the token itself, 1: the one after it
        self.counts = np.zeros(shape, dtype=np.uint8)  # touched pages only: zeros are lazy
        self.uses = np.zeros((2, capacity), dtype=np.uint8)
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._layers_L1 = np.arange(num_layers)[:, None]

    def learn(self, token_id: int, experts_LK: Ints, *, after: bool) -> None:
        """The token, or the token after it, went to these experts."""
        if token_id < 0:
            return
        slot = self._slot_of(token_id)
        if self.uses[int(after), slot] >= TOKEN_FULL:
            self.counts[int(after), slot] //= 2
            self.uses[int(after), slot] //= 2
        self.counts[int(after), slot, self._layers_L1, experts_LK] += 1
        self.uses[int(after), slot] += 1

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the table, the id used longest ago first."""
        slots = list(self._slots.values())
        return {
            "token_ids": np.array(list(self._slots), dtype=np.int64),
            "token_counts": self.counts[:, slots],
            "token_uses": self.uses[:, slots],
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take up what `arrays()` gave, as much of the newest as there is room for. Raises
        ValueError for arrays of another shape.
        """
        ids, counts, uses = (arrays[f"token_{name}"] for name in ("ids", "counts", "uses"))
        num = len(ids) if ids.ndim == 1 else -1
        if (counts.shape, uses.shape) != ((2, num, *self.counts.shape[2:]), (2, num)):
            raise ValueError(f"token tables of shapes {ids.shape}, {counts.shape}, {uses.shape}")
        first = max(num - self.uses.shape[1], 0)
        self._slots = OrderedDict((int(t), slot) for slot, t in enumerate(ids[first:]))
        self.counts[:, : num - first] = counts[:, first:]
        self.uses[:, : num - first] = uses[:, first:]

    def evidence(
        self, token_id: int, *, after: bool, base_LE: Floats, log_base_LE: Floats
    ) -> Floats | None:
        """[L, E]: log of how much likelier than its base rate each expert is; None if unknown."""
        slot = self._slots.get(token_id)
        if slot is None or self.uses[int(after), slot] == 0:
            return None
        seen_LE: Floats = base_LE * np.float32(PRIOR)
        seen_LE += self.counts[int(after), slot]
        np.log(seen_LE, out=seen_LE)
        seen_LE -= log_base_LE
        seen_LE -= np.log(self.uses[int(after), slot] + np.float32(PRIOR))
        return seen_LE

    def _slot_of(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            if len(self._slots) < self.uses.shape[1]:
                slot = len(self._slots)
            else:
                _, slot = self._slots.popitem(last=False)
                self.counts[:, slot] = self.uses[:, slot] = 0
            self._slots[token_id] = slot
        else:
            self._slots.move_to_end(token_id)
        return slot


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
        self.weights: Floats = START_WEIGHTS * self._mask
        self.base_LE: Floats = np.full((num_layers, num_experts), 1 / num_experts, dtype=np.float32)
        self.log_base_LE: Floats = np.log(self.base_LE)
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
