"""Feeds a predictor as the runtime does: lanes of (token id, experts of each layer) per step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_infinity.experts import Phase, Step
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder

LAYERS, EXPERTS, K = 4, 16, 2

Token = tuple[int, np.ndarray]  # its id, its experts [L, K]
UNKNOWN = -1


class Feed:
    """A predictor, and the recorder that tells it which requests have ended."""

    def __init__(self, *, without: Sequence[str] = (), num_layers: int = LAYERS) -> None:
        self.model = Predictor(num_layers, EXPERTS, without=without)
        self._recorder = Recorder(num_layers, EXPERTS)
        self._experts_LTK = np.zeros((num_layers, 0, K), dtype=np.int64)

    def begin(
        self, *lanes: Sequence[Token], phase: Phase = Phase.DECODE, begins: bool = False
    ) -> None:
        """A step begins; a lane without a token has ended. Shorter lanes are padded."""
        most = max(map(len, lanes))
        shape = (len(lanes), most)
        counted_BS, ids_BS = np.zeros(shape, dtype=bool), np.full(shape, UNKNOWN)
        experts_LBSK = np.zeros((self.model.num_layers, *shape, K), dtype=np.int64)
        for lane, tokens in enumerate(lanes):
            for at, (token_id, experts_LK) in enumerate(tokens, start=most - len(tokens)):
                counted_BS[lane, at], ids_BS[lane, at] = True, token_id
                experts_LBSK[:, lane, at] = experts_LK
        self._experts_LTK = experts_LBSK.reshape(self.model.num_layers, -1, K)
        counted_T = None if counted_BS.all() else counted_BS.ravel()
        begins_B = np.full(len(lanes), begins)
        step = Step(phase, len(lanes), most, begins_B, counted_T, ids_BS.ravel())
        ended = self._recorder.begin_step(step)
        self.model.begin_step(self._recorder.step, ended)

    def layer(self, layer: int) -> None:
        """The routing of one layer of the step that was begun."""
        self.model.observe(layer, self._recorder.record(layer, self._experts_LTK[layer]))

    def layers(self, *, look_ahead: bool = False) -> None:
        for layer in range(self.model.num_layers):
            self.layer(layer)
            if look_ahead:
                self.model.look_ahead(layer)

    def prompt(self, *lanes: Sequence[Token]) -> None:
        """A whole step that begins a request in every lane."""
        self.begin(*lanes, phase=Phase.PREFILL, begins=True)
        self.layers()

    def decode(self, *tokens: Token | None, look_ahead: bool = False) -> None:
        """A whole step; None for a lane that has ended."""
        self.begin(*([] if token is None else [token] for token in tokens))
        self.layers(look_ahead=look_ahead)


def pair(number: int, num_layers: int = LAYERS) -> np.ndarray:
    """[L, K]: one of 8 disjoint pairs of experts, another one in each layer."""
    first = (number + 3 * np.arange(num_layers)) % 8 * 2
    return np.stack([first, first + 1], axis=1)


def random_experts(rng: np.random.Generator, num_layers: int = LAYERS) -> np.ndarray:
    return np.stack([rng.permutation(EXPERTS)[:K] for _ in range(num_layers)])


def is_used(experts_LK: np.ndarray) -> np.ndarray:
    """[L, E]"""
    used = np.zeros((len(experts_LK), EXPERTS), dtype=bool)
    np.put_along_axis(used, experts_LK, True, axis=1)
    return used
