"""What a model did so far: lookups, bytes, waiting, and how full each tier is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moe_infinity.cache.counters import PhaseCounters, PrefetchCounters, PreloadCounters
from moe_infinity.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class TierOccupancy:
    """How full one tier is."""

    tier: str
    experts: int  # experts there now
    capacity: int  # experts it can hold
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """A snapshot; `as_dict()` for programs, `print()` for people."""

    policy: str
    experts: str  # how they are stored in slots, and computed
    prefill: PhaseCounters
    decode: PhaseCounters
    startup_bytes_read: int  # headers and dense weights
    dense_types: dict[str, int]  # bytes in memory of all other weights, by type
    prefetches: PrefetchCounters
    preload: PreloadCounters
    evictions: int
    tiers: tuple[TierOccupancy, ...]

    @property
    def bytes_read(self) -> int:
        """Expert bytes read from disk."""
        return self.prefill.bytes_read + self.decode.bytes_read + self.preload.bytes_read

    @property
    def stall_s(self) -> float:
        """Seconds compute waited for experts."""
        return self.prefill.stall_s + self.decode.stall_s

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "experts": self.experts,
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
            "bytes_read": self.bytes_read,
            "startup_bytes_read": self.startup_bytes_read,
            "dense_types": self.dense_types,
            "stall_s": self.stall_s,
            "prefetch": self.prefetches.as_dict()
            | {"coverage": self.prefetches.coverage(self.decode.misses)},
            "preload": asdict(self.preload),
            "evictions": self.evictions,
            "tiers": {
                t.tier: {
                    "experts": t.experts,
                    "capacity": t.capacity,
                    "capacity_bytes": t.capacity_bytes,
                }
                for t in self.tiers
            },
        }

    def __str__(self) -> str:
        lines = [
            f"{'':8}  {'hit rate':>8}  {'hits':>9}  {'late':>6}  {'misses':>8}  "
            f"{'read':>10}  {'stall':>8}"
        ]
        for name, c in (("prefill", self.prefill), ("decode", self.decode)):
            rate = "-" if c.hit_rate is None else f"{c.hit_rate:.1%}"
            lines.append(
                f"{name:8}  {rate:>8}  {c.hits:>9,}  {c.late_hits:>6,}  {c.misses:>8,}  "
                f"{format_bytes(c.bytes_read):>10}  {c.stall_s:>6.2f} s"
            )
        for t in self.tiers:
            share = t.experts / t.capacity
            lines.append(
                f"{t.tier:8}  {t.experts:,} of {t.capacity:,} experts ({share:.0%}), "
                f"{format_bytes(t.capacity_bytes)}"
            )
        sizes = [f"{kind} {format_bytes(size)}" for kind, size in self.dense_types.items()]
        lines.append(f"dense     {', '.join(sizes)}")
        ahead = self.prefetches
        if ahead.begun:
            lines.append(
                f"prefetch  {ahead.begun:,} loads: {ahead.useful:,} useful, {ahead.late:,} late, "
                f"{ahead.wasted:,} wasted"
            )
        if self.preload.experts:
            lines.append(
                f"preload   {self.preload.experts:,} experts, "
                f"{format_bytes(self.preload.bytes_read)}, into free memory"
            )
        lines.append(
            f"experts {self.experts}; policy {self.policy}, {self.evictions:,} evictions, "
            f"start-up read {format_bytes(self.startup_bytes_read)}"
        )
        return "\n".join(lines)
