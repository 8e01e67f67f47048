"""The default policy: keep the experts that give most hits for the time they take up a slot.

The L MoE layers run in a fixed order. An expert `d` layers ahead can be used after d layers, and
then every L layers. Let p be the chance of the first use and q that of each later one. An expert
that is kept until its first chance, or until it is used, gives hits per layer of waiting

    p / d      and      1 / (d + (1 - p) L / q)

In a pass over T tokens of a prompt, the chance of a use in a layer still to come is that of any of
them, 1 - (1 - p)^T: a long prompt takes what it has used before what it will use.

The larger of the two is its score. (This is the Gittins index of a slot for two of its stopping
times. The second alone, the expected time to the next use, prefers an expert that is certain to be
used some day to one that is likely to be used now and never again.)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Phase, Step

LEAST_CHANCE = np.float32(1e-5)  # that is divided by
MOST_CHANCE = np.float32(1 - 1e-6)  # whose logarithm is taken, of the chance of no use


class Chances(Protocol):
    """How likely each expert is to be used, as a predictor gives it; [L, E] each."""

    next_use_LE: NDArray[np.float32]  # when its layer comes next
    later_use_LE: NDArray[np.float32]  # at each later time

    def look_ahead(self, moe_layer_idx: int) -> None:
        """Refine the layer after this one, just observed."""


class ActivationAware:
    """Scores from a predictor's chances. The predictor is told of each step and layer first."""

    def __init__(self, chances: Chances, num_layers: int) -> None:
        self._chances = chances
        layers_L = np.arange(num_layers, dtype=np.float32)
        ahead_LL = (layers_L[None, :] - layers_L[:, None]) % num_layers
        ahead_LL[ahead_LL == 0] = num_layers
        self._layers_ahead = ahead_LL[:, :, None]  # [current layer, L, 1]
        self._num_layers = np.float32(num_layers)
        self._layer = num_layers - 1
        self._num_tokens = 1  # of the step, if it is a prompt's
        # A copy: others may ask the predictor to refine its own.
        self._p_LE: NDArray[np.float32] = chances.next_use_LE.copy()
        # Expected layers from the first chance to the use, where the first chance is not the use.
        self._wait_LE = np.zeros_like(chances.next_use_LE)
        self._scores: NDArray[np.float32] | None = None

    def begin_step(self, step: Step) -> None:
        self._layer = -1
        self._scores = None
        self._num_tokens = step.num_tokens if step.phase is Phase.PREFILL else 1
        self._update(slice(None), is_to_come=True)

    def touch(self, moe_layer_idx: int, experts: object, counts: object = 1) -> None:
        self._layer = moe_layer_idx
        self._scores = None
        self._update(moe_layer_idx)

    def _update(self, layers: int | slice, *, is_to_come: bool = False) -> None:
        """The chances of these layers have changed. `is_to_come`: in the step under way."""
        wait_LE = self._wait_LE[layers]
        p_LE = self._chances.next_use_LE[layers]
        if is_to_come and self._num_tokens > 1:
            p_LE = -np.expm1(self._num_tokens * np.log1p(-np.minimum(p_LE, MOST_CHANCE)))
        self._p_LE[layers] = p_LE
        np.multiply(self._p_LE[layers], self._num_layers, out=wait_LE)
        np.subtract(self._num_layers, wait_LE, out=wait_LE)
        wait_LE /= np.maximum(self._chances.later_use_LE[layers], LEAST_CHANCE)

    def chances(self) -> NDArray[np.float32]:
        """[L, E]: the chance that an expert is used when its layer comes next."""
        if 0 <= self._layer < len(self._wait_LE) - 1:
            self._chances.look_ahead(self._layer)
            self._update(self._layer + 1, is_to_come=True)
            self._scores = None
        return self._p_LE

    def scores(self) -> NDArray[np.float32]:
        if self._scores is None:
            self._scores = self.scores_after(self._layer)
        return self._scores

    def scores_after(self, moe_layer_idx: int) -> NDArray[np.float32]:
        """Return the scores after this layer has run, whatever it activates."""
        ahead_L1 = self._layers_ahead[moe_layer_idx]
        once_LE = self._p_LE / ahead_L1
        until_LE = self._wait_LE + ahead_L1
        np.reciprocal(until_LE, out=until_LE)
        scores: NDArray[np.float32] = np.maximum(once_LE, until_LE)
        return scores
