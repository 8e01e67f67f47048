"""The steps of a recorded run: which tokens of which sequences went through the model together.

Sequences that overlap in time share a batch. A sequence takes the lowest free place in it. A step
has the tokens of some places; none of places that are free, or whose sequence has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.predict.tracefile import SequenceTrace


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One forward pass and what its routers chose."""

    step: Step
    experts_LTK: Ints
    num_begun: int  # requests begun with this step or before


def interleave(sequences: Sequence[SequenceTrace], num_users: int) -> list[SequenceTrace]:
    """The same requests as if so many users sent them, each the next one when the last is answered.
    A prompt is a step of its own; tokens of all users decode in one step.
    """
    waiting = deque(sequences)
    step = 0
    running: list[tuple[SequenceTrace, int]] = []  # and how many of its tokens have a step
    result: list[SequenceTrace] = []
    while waiting or running:
        while waiting and len(running) < num_users:
            sequence = waiting.popleft()
            sequence = sequence._replace(steps_T=np.full(len(sequence.steps_T), step))
            running.append((sequence, int(sequence.is_prefill_T.sum())))
            step += int(sequence.is_prefill_T.any())
            result.append(sequence)
        for sequence, num_tokens in running:
            sequence.steps_T[num_tokens:] = step
        running = [(s, n + 1) for s, n in running if n + 1 < len(s.steps_T)]
        step += 1
    return result


def steps_of(sequences: Sequence[SequenceTrace]) -> Iterator[RecordedStep]:
    """The run, step by step."""
    num_begun = 0
    for places in _batches(sequences):
        members = [
            (place, sequence, sequence.experts_TLK.astype(np.int64).transpose(1, 0, 2))
            for place, in_turn in enumerate(places)
            for sequence in in_turn
        ]
        for step_idx in np.unique(np.concatenate([s.steps_T for _, s, _ in members])):
            parts = []
            for place, sequence, experts_LTK in members:
                start, stop = sequence.steps_T.searchsorted([step_idx, step_idx + 1]).tolist()
                if start < stop:
                    parts.append((place, sequence, experts_LTK, slice(start, stop)))
                    num_begun += sequence.steps_T[0] == step_idx
            yield _step(len(places), parts, num_begun)


Part = tuple[int, SequenceTrace, Ints, slice]  # place, sequence, its experts_LTK, its tokens


def _step(num_places: int, parts: list[Part], num_begun: int) -> RecordedStep:
    """The tokens of the parts, one part after the other."""
    _, sequence, _, tokens = parts[0]
    phase = Phase.PREFILL if sequence.is_prefill_T[tokens.start] else Phase.DECODE
    begins_B = np.zeros(num_places, dtype=bool)
    for place, _, _, tokens in parts:
        begins_B[place] = tokens.start == 0
    places = [place for place, _, _, _ in parts]
    sequence_T = np.repeat(places, [tokens.stop - tokens.start for _, _, _, tokens in parts])
    ids_T = np.concatenate([sequence.token_ids_T[tokens] for _, sequence, _, tokens in parts])
    step = Step(phase, num_places, 0, begins_B, token_ids_T=ids_T, sequence_T=sequence_T)
    experts_LTK = np.concatenate([experts[:, tokens] for _, _, experts, tokens in parts], axis=1)
    return RecordedStep(step, experts_LTK, num_begun)


def _batches(sequences: Sequence[SequenceTrace]) -> Iterator[list[list[SequenceTrace]]]:
    """Sequences that overlap in time, directly or by others between them, as lists by place."""
    places: list[list[SequenceTrace]] = []
    for sequence in sorted((s for s in sequences if len(s.steps_T)), key=lambda s: s.steps_T[0]):
        begin = sequence.steps_T[0]
        free = [i for i, in_turn in enumerate(places) if in_turn[-1].steps_T[-1] < begin]
        if len(free) == len(places):
            if places:
                yield places
            places = [[sequence]]
        elif free:
            places[free[0]].append(sequence)
        else:
            places.append([sequence])
    if places:
        yield places
