"""Counts of lookups, and of the time and bytes that they cost. Each activated expert counts once
per layer and step, by phase.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from moe_infinity.experts import Phase


@dataclass(slots=True)
class PhaseCounters:
    """Lookups of one phase."""

    hits: int = 0  # resident when asked for
    late_hits: int = 0  # already loading when asked for
    misses: int = 0  # absent when asked for
    steps: int = 0  # forward passes
    tokens: int = 0  # tokens in them, padding left out
    bytes_read: int = 0  # expert bytes read from disk for this phase
    stall_s: float = 0.0  # time compute waited for experts

    def add_lookups(self, hits: int, late_hits: int, misses: int) -> None:
        """Charge the lookups of one layer."""
        self.hits += hits
        self.late_hits += late_hits
        self.misses += misses

    @property
    def lookups(self) -> int:
        return self.hits + self.late_hits + self.misses

    @property
    def hit_rate(self) -> float | None:
        """hits / (hits + late hits + misses), or None before the first lookup."""
        return self.hits / self.lookups if self.lookups else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "hits": self.hits,
            "late_hits": self.late_hits,
            "misses": self.misses,
            "hit_rate": self.hit_rate,
            "steps": self.steps,
            "tokens": self.tokens,
            "bytes_read": self.bytes_read,
            "stall_s": self.stall_s,
        }


@dataclass(slots=True)
class PrefetchCounters:
    """Loads begun before their layer, by what became of them."""

    begun: int = 0
    useful: int = 0  # resident when first asked for
    late: int = 0  # still in flight then
    wasted: int = 0  # evicted unused

    def add_use(self, *, is_late: bool) -> None:
        """The layer of a prefetched expert asks for it for the first time."""
        self.late += is_late
        self.useful += not is_late

    @property
    def precision(self) -> float | None:
        """Share of the prefetches with a verdict that were used, or None before the first one."""
        judged = self.useful + self.late + self.wasted
        return (self.useful + self.late) / judged if judged else None

    def coverage(self, misses: int) -> float | None:
        """Share of would-be misses that prefetch removed, given those that were left over."""
        would_be = self.useful + self.late + misses
        return self.useful / would_be if would_be else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"precision": self.precision}


@dataclass(slots=True)
class PreloadCounters:
    """Loads into free slots, begun before any layer asked for the expert."""

    experts: int = 0
    bytes_read: int = 0


@dataclass(slots=True)
class Counters:
    """Since the model was loaded: lookups of both phases, and preloads."""

    prefill: PhaseCounters = field(default_factory=PhaseCounters)
    decode: PhaseCounters = field(default_factory=PhaseCounters)
    preload: PreloadCounters = field(default_factory=PreloadCounters)

    def of(self, phase: Phase) -> PhaseCounters:
        return self.prefill if phase is Phase.PREFILL else self.decode
