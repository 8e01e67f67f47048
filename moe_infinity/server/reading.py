"""The prompts that are being read, one pass after another. Clients take turns with passes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from torch import Tensor

from moe_infinity.errors import MoEInfinityError
from moe_infinity.memory.needs import USUAL_TOKENS
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.passes import Passes
from moe_infinity.server.sequences import Running
from moe_infinity.server.turns import PromptShares


class Left(MoEInfinityError):
    """A pass over a prompt that nobody waits for any more."""


class Reading:
    """The sequences whose prompts are being read, the oldest first."""

    def __init__(self, passes: Passes, config: ServeConfig) -> None:
        self.current: Running | None = None  # a pass over its prompt is under way
        self._began = 0.0  # when that pass began, by time.monotonic()
        self._share_s = config.gap_share_s
        self._passes = passes
        self._sequences: deque[Running] = deque()
        self._shares = PromptShares(config.prefill_chunk or USUAL_TOKENS)

    def __iter__(self) -> Iterator[Running]:
        return iter(tuple(self._sequences))

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Running) -> None:
        self._sequences.append(sequence)

    def remove(self, sequence: Running) -> None:
        self._sequences.remove(sequence)

    def clear(self) -> None:
        self._sequences.clear()

    def next(self) -> Running:
        """The oldest prompt of the client whose turn it is; there must be one."""
        return self._shares.next_of(self._sequences)

    def next_beside(self) -> Running | None:
        """The same among those that are not under way and that one usual pass reads; None if there
        is none.
        """
        short = [each for each in self if num_left_of(each) <= USUAL_TOKENS]
        short = [each for each in short if each is not self.current]
        return self._shares.next_of(short) if short else None

    def read(self, sequence: Running, others: Callable[[], None], *, is_alone: bool) -> Tensor:
        """Take one pass over a prompt, see `Passes.prefill`. In a pass inside `others` no more
        others run.
        """
        outer = self.current
        before = sequence.num_prefilled
        self.current = sequence
        if outer is None:
            self._began = time.monotonic()
        try:
            own = others if outer is None else nobody
            return self._passes.prefill(sequence, own, is_alone=is_alone)
        finally:
            self.current = outer
            self._shares.note(sequence, sequence.num_prefilled - before)

    def is_time_for_others(self, ran_at: float) -> bool:
        """True if those that decode, last at `ran_at`, should go on before the next layer. Raises
        Left if the sequence of the pass was cancelled or is too late: it is dropped before the next
        step.
        """
        current = self.current
        now = time.monotonic()
        if current is not None and (current.is_cancelled or current.deadline < now):
            raise Left
        return now - max(self._began, ran_at) >= self._share_s


def nobody() -> None:
    """Takes the place of others."""


def num_left_of(sequence: Running) -> int:
    """Tokens of a prompt that are still to be read."""
    return len(sequence.ids) - sequence.num_prefilled
