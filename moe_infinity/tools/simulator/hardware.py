"""The modelled machine: one link that carries one expert at a time, and layers that take a fixed
time to compute. Demand loads go first; a prefetch under way waits for them and goes on after.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_infinity.experts import ExpertKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a replay's times are made of."""

    bytes_per_s: float  # of the link
    expert_bytes: int
    layer_s: float  # from one layer's routing to the next one's, everything resident

    @property
    def load_s(self) -> float:
        """Seconds to load one expert."""
        return self.expert_bytes / self.bytes_per_s


class Link:
    """The link, and how far the prefetches on it are."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self._queue: dict[ExpertKey, float] = {}  # seconds left, in order

    @property
    def queued_s(self) -> float:
        """Time to finish what was begun."""
        return sum(self._queue.values())

    def begin(self, keys: Iterable[ExpertKey]) -> None:
        """Queue prefetches."""
        for key in keys:
            self._queue[key] = self._load_s

    def run(self, seconds: float) -> list[ExpertKey]:
        """Time passes without demand; gives the prefetches that arrived."""
        arrived = []
        for key, left in list(self._queue.items()):
            if left > seconds:
                self._queue[key] = left - seconds
                break
            seconds -= left
            del self._queue[key]
            arrived.append(key)
        return arrived

    def demand(self, num_absent: int, late: Iterable[ExpertKey]) -> float:
        """Seconds until so many demand loads and these prefetches, already begun, are there."""
        return num_absent * self._load_s + sum(self._queue.pop(key) for key in late)
