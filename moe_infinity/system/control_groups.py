"""The limits that Linux sets to a group of processes, such as a container; version 2 and 1. Where
there are none, there is nothing to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class MemoryLimit(NamedTuple):
    """Of one group that we are in."""

    num_bytes: int
    used_bytes: int  # and cannot be freed


def memory_limits() -> list[MemoryLimit]:
    """Of our memory control group and its parents. A container may see only the last."""
    limits = []
    for folder in _groups("memory"):
        limit = _limit_bytes(folder)
        if limit is not None:
            limits.append(MemoryLimit(limit, _used_bytes(folder)))
    return limits


def core_limit() -> float | None:
    """How many cores' time our groups may use; None: no limit."""
    shares = []
    for folder in _groups("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # else "max", or -1 in version 1
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _groups(controller: str) -> Iterator[Path]:
    for line in [*_read(OWN_GROUPS).splitlines(), "::/", f":{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = CGROUP / controllers
            own = top / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _limit_bytes(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name)
        if text.isdigit() and int(text) < 1 << 60:  # v1 writes a huge number for "no limit"
            return int(text)
    return None


def _used_bytes(folder: Path) -> int:
    """All but the page cache that the group may drop."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        text = _read(folder / name)
        if text.isdigit():
            fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            own = fields.get("inactive_file", "0")  # in v1 without that of the groups inside
            droppable = fields.get("total_inactive_file", own)
            return max(int(text) - int(droppable), 0)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
