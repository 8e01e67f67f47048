"""The report of what a model did so far: lookups, bytes, waiting, how full each tier is, and which
modules kernels compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from moe_infinity.cache.counters import PhaseCounters, PrefetchCounters, PreloadCounters
from moe_infinity.memory.needs import KvBytes
from moe_infinity.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class TierOccupancy:
    """How full one tier is."""

    tier: str
    experts: int  # experts there now
    capacity: int  # experts it can hold
    capacity_bytes: int


class PathTaken(NamedTuple):
    """Which code computes one module of a model."""

    kind: str  # "experts", "layer", "router" or "block"
    class_name: str
    reason: str | None  # why the module's own code computes it; None: a kernel does


@dataclass(frozen=True, slots=True)
class PathCount:
    """The number of modules that are computed in the same way."""

    taken: PathTaken
    count: int

    def as_dict(self) -> dict[str, Any]:
        path = "kernel" if self.taken.reason is None else "own code"
        return {"count": self.count, "path": path} | self.taken._asdict()

    def __str__(self) -> str:
        reason = self.taken.reason
        path = "kernel" if reason is None else f"the module's own code ({reason})"
        return f"{self.count:,} x {self.taken.class_name}: {path}"


def count_paths(*paths: Iterable[PathTaken]) -> tuple[PathCount, ...]:
    """Count the modules of each kind, class and path, in the order in which they first come."""
    counts = Counter(path for each in paths for path in each)
    return tuple(PathCount(taken, count) for taken, count in counts.items())


@dataclass(frozen=True, slots=True)
class Report:
    """A snapshot. `as_dict()` is for programs, `print()` for people."""

    policy: str
    experts: str  # how they are stored in slots, and computed
    prefill: PhaseCounters
    decode: PhaseCounters
    startup_bytes_read: int  # headers and dense weights
    dense_types: dict[str, int]  # bytes in memory of all other weights, by type
    row_types: dict[str, int]  # bytes of embeddings that are read by row from their files, by type
    kv: KvBytes  # of a sequence
    prefetches: PrefetchCounters
    preload: PreloadCounters
    evictions: int
    tiers: tuple[TierOccupancy, ...]
    paths: tuple[PathCount, ...]

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
            "row_types": self.row_types,
            "kv": asdict(self.kv),
            "stall_s": self.stall_s,
            "prefetch": self.prefetches.as_dict()
            | {"coverage": self.prefetches.coverage(self.decode.misses)},
            "preload": asdict(self.preload),
            "evictions": self.evictions,
            "tiers": {
                t.tier: {name: number for name, number in asdict(t).items() if name != "tier"}
                for t in self.tiers
            },
            "paths": [path.as_dict() for path in self.paths],
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
        if self.row_types:
            sizes = [f"{kind} {format_bytes(size)}" for kind, size in self.row_types.items()]
            lines.append(f"read by row from the disk: embeddings of {', '.join(sizes)}")
        lines.append(f"kv        {self.kv}")
        for i, path in enumerate(self.paths):
            lines.append(f"{'' if i else 'paths':8}  {path}")
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
