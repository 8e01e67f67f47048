"""The default policy: keep the experts that give most hits for the time they take up a slot.

Layers come round in a fixed order, so an expert of the row `d` rows ahead has its next chance of
use after d rows, then every R rows. Let p be the chance of the first and q that of each later one.
Kept until its first chance, or until it is used, it gives hits per row of waiting

    p / d      and      1 / (d + (1 - p) R / q)

and the better of the two is its score. (This is the Gittins index of a slot, for two of its
stopping times. The second alone, the expected time to next use, keeps what will surely come some
day over what comes now or never.)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Step

LEAST = np.float32(1e-5)  # of a chance that is divided by


class Chances(Protocol):
    """Who knows how likely each expert is to be used; [R, E] each."""

    next_use_RE: NDArray[np.float32]  # when its row comes next
    later_use_RE: NDArray[np.float32]  # at each later time

    def look_ahead(self, moe_layer_idx: int) -> None:
        """Refine the row after this one, just observed."""


class ActivationAware:
    """Scores from a predictor's chances. The predictor hears of every step and row first."""

    def __init__(self, chances: Chances, num_rows: int) -> None:
        self._chances = chances
        rows = np.arange(num_rows, dtype=np.float32)
        ahead = (rows[None, :] - rows[:, None]) % num_rows
        ahead[ahead == 0] = num_rows
        self._rows_ahead = ahead[:, :, None]  # [current row, R, 1]
        self._num_rows = np.float32(num_rows)
        self._row = num_rows - 1
        # Its own: others may have them refined.
        self._p_RE: NDArray[np.float32] = chances.next_use_RE.copy()
        # Expected rows from the first chance to the use, if it is not the use.
        self._wait_RE = np.zeros_like(chances.next_use_RE)
        self._scores: NDArray[np.float32] | None = None

    def begin_step(self, step: Step) -> None:
        self._row, self._scores = -1, None
        self._update(slice(None))

    def touch(self, moe_layer_idx: int, experts: object, counts: object = 1) -> None:
        self._row, self._scores = moe_layer_idx, None
        self._update(moe_layer_idx)

    def _update(self, rows: int | slice) -> None:
        """The chances of these rows have changed."""
        wait_RE = self._wait_RE[rows]
        self._p_RE[rows] = self._chances.next_use_RE[rows]
        np.multiply(self._p_RE[rows], self._num_rows, out=wait_RE)
        np.subtract(self._num_rows, wait_RE, out=wait_RE)
        wait_RE /= np.maximum(self._chances.later_use_RE[rows], LEAST)

    def chances(self) -> NDArray[np.float32]:
        """[R, E] of being used when its row comes next."""
        if 0 <= self._row < len(self._wait_RE) - 1:
            self._chances.look_ahead(self._row)
            self._update(self._row + 1)
            self._scores = None
        return self._p_RE

    def scores(self) -> NDArray[np.float32]:
        if self._scores is None:
            self._scores = self.scores_after(self._row)
        return self._scores

    def scores_after(self, moe_layer_idx: int) -> NDArray[np.float32]:
        """See EvictionPolicy."""
        ahead_R1 = self._rows_ahead[moe_layer_idx]
        once_RE = self._p_RE / ahead_R1
        until_RE = self._wait_RE + ahead_R1
        np.reciprocal(until_RE, out=until_RE)
        scores: NDArray[np.float32] = np.maximum(once_RE, until_RE)
        return scores
