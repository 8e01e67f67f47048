"""One of several machines that serve the same model, on a modelled clock.

A replica has its own table, policy and predictor. It decodes some requests together, one token of
each in a step, and lets the others wait. A prompt is a step of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replicas.affinity import Served
from moe_infinity.cache.policies import ACTIVATION_AWARE
from moe_infinity.experts import Phase, Step
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.tables import Floats
from moe_infinity.predict.tracefile import SequenceTrace
from moe_infinity.tools.pictures.figures import matrix_of
from moe_infinity.tools.simulator.baselines import make_policy
from moe_infinity.tools.simulator.replay import Cell, Machine, Setup, keys_of


@dataclass(slots=True)
class SimulatedRequest:
    """One request, and when which part of it was done, in seconds."""

    sequence: SequenceTrace
    prompt_ids: Sequence[int]
    session: str
    arrival_s: float
    first_token_s: float = np.inf
    end_s: float = np.inf


@dataclass(slots=True)
class Decoding:
    """A request in its place of a batch."""

    request: SimulatedRequest
    num_done: int = 0  # tokens


class Replica:
    """One machine that has the whole model."""

    def __init__(self, setup: Setup, num_places: int, *, num_layers: int, num_experts: int) -> None:
        predictor = None
        if setup.policy == ACTIVATION_AWARE:
            predictor = Predictor(num_layers, num_experts)
        policy = make_policy(
            setup.policy,
            num_layers=num_layers,
            num_experts=num_experts,
            num_slots=setup.num_slots,
            chances=predictor,
        )
        self.cell = Cell(setup, policy, keys_of(num_layers, num_experts))
        self.clock_s = 0.0
        self.served = Served(num_layers, num_experts)
        self.ended: list[SimulatedRequest] = []
        self._machine = Machine(
            [self.cell], predictor, num_layers=num_layers, num_experts=num_experts
        )
        self._layers_s = num_layers * setup.hardware.layer_s
        self._places: list[Decoding | None] = [None] * num_places
        self._waiting: deque[SimulatedRequest] = deque()

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + sum(place is not None for place in self._places)

    def submit(self, request: SimulatedRequest) -> None:
        """It has just arrived."""
        if not self.load:
            self.clock_s = max(self.clock_s, request.arrival_s)
        self._waiting.append(request)

    def advance(self, until_s: float) -> None:
        """Work up to this time; a step that has begun ends."""
        while self.load and self.clock_s < until_s:
            self._step()

    def _step(self) -> None:
        for idx, place in enumerate(self._places):
            if place is None and self._waiting:
                self._places[idx] = Decoding(self._waiting.popleft())
        running = {idx: place for idx, place in enumerate(self._places) if place is not None}
        prompt = next((idx for idx, r in running.items() if _prompt_left(r)), None)
        if prompt is not None:
            running = {prompt: running[prompt]}
        tokens = {
            idx: slice(r.num_done, r.num_done + (_prompt_left(r) or 1))
            for idx, r in running.items()
        }
        begins_B = np.zeros(len(self._places), dtype=bool)
        for idx, place in running.items():
            begins_B[idx] = place.num_done == 0
        sequences = [place.request.sequence for place in running.values()]
        counts = [part.stop - part.start for part in tokens.values()]
        step = Step(
            Phase.DECODE if prompt is None else Phase.PREFILL,
            len(self._places),
            0,
            begins_B,
            token_ids_T=np.concatenate(
                [s.token_ids_T[part] for s, part in zip(sequences, tokens.values(), strict=True)]
            ),
            sequence_T=np.repeat(list(running), counts),
        )
        experts_TLK = np.concatenate(
            [s.experts_TLK[part] for s, part in zip(sequences, tokens.values(), strict=True)]
        )
        counters = self.cell.counters.of(step.phase)
        before_s = counters.stall_s
        self._machine.run(step, experts_TLK.astype(np.int64).transpose(1, 0, 2))
        self.clock_s += self._layers_s + counters.stall_s - before_s
        for idx, place in running.items():
            self._note_tokens(idx, place, tokens[idx].stop)

    def _note_tokens(self, idx: int, place: Decoding, num_done: int) -> None:
        request = place.request
        place.num_done = num_done
        request.first_token_s = min(request.first_token_s, self.clock_s)
        if num_done == len(request.sequence.steps_T):
            request.end_s = self.clock_s
            self._places[idx] = None
            self.served.add(decode_matrix(request.sequence, self.served.shape))
            self.ended.append(request)


def _prompt_left(place: Decoding) -> int:
    """Tokens of the prompt, if none of it is done."""
    return 0 if place.num_done else int(place.request.sequence.is_prefill_T.sum())


def decode_matrix(sequence: SequenceTrace, shape: tuple[int, ...]) -> Floats:
    """[L, E]: of the tokens that are decoded."""
    return matrix_of(sequence.experts_TLK[~sequence.is_prefill_T].astype(np.int64), shape)
