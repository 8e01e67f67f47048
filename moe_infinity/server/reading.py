"""The prompts that are being read, one pass after another. Clients take turns with passes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from torch import Tensor

from moe_infinity.errors import MoEInfinityError
from moe_infinity.memory.needs import USUAL_TOKENS
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.sequences import Running
from moe_infinity.server.turns import PromptShares


class Left(MoEInfinityError):
    """A pass over a prompt that nobody waits for any more."""


class Reading:
    """The sequences whose prompts are being read, the oldest first."""

    def __init__(self, config: ServeConfig, num_to_compute: Callable[[Running], int]) -> None:
        """`num_to_compute`: how many tokens of a prompt passes have to read."""
        self.under_way: list[Running] = []  # passes over their prompts, each inside the one before
        self._began = 0.0  # when the first of them began, by time.monotonic()
        self._beside_s = 0.0  # that others took inside it
        self._num_to_compute = num_to_compute
        self._share_s = config.gap_share_s
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
        """The same among those that one usual pass reads, inside the only pass under way; None if
        there is none, or others have had half of its time.
        """
        if len(self.under_way) > 1 or self._beside_s > (time.monotonic() - self._began) / 2:
            return None
        others = [each for each in self if each not in self.under_way]
        short = [each for each in others if self._num_to_compute(each) <= USUAL_TOKENS]
        return self._shares.next_of(short) if short else None

    def read(self, sequence: Running, take_pass: Callable[[], Tensor]) -> Tensor:
        """Take one pass over a prompt."""
        before = sequence.num_prefilled
        began = time.monotonic()
        if not self.under_way:
            self._began = began
            self._beside_s = 0.0
        self.under_way.append(sequence)
        try:
            return take_pass()
        finally:
            self.under_way.pop()
            if self.under_way:
                self._beside_s += time.monotonic() - began
            self._shares.note(sequence, sequence.num_prefilled - before)

    def is_time_for_others(self, ran_at: float) -> bool:
        """True if those that decode, last at `ran_at`, should go on before the next layer. Raises
        Left if the sequence of the pass was cancelled or is too late: it is dropped before the next
        step.
        """
        current = self.under_way[-1]
        now = time.monotonic()
        if current.is_cancelled or current.deadline < now:
            raise Left
        return now - max(self._began, ran_at) >= self._share_s
