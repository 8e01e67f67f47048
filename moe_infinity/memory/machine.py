"""How much memory this machine, or the container we run in, has and has free."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def machine_memory_bytes() -> int:
    """Physical memory, or the control group's limit where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit_bytes()
    return physical if limit is None else min(physical, limit)


def available_memory_bytes() -> int:
    """What can be allocated without pushing anything out, by the kernel's own estimate; within the
    group's limit.
    """
    available = machine_memory_bytes()
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = min(available, int(line.split()[1]) * 1024)
    limit = _cgroup_limit_bytes()
    if limit is not None:
        available = min(available, limit - _cgroup_used_bytes())
    return max(available, 0)


def _cgroup_limit_bytes() -> int | None:
    """The limit of our control group, v2 or v1; None without one."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(CGROUP / name)
        if text.isdigit() and int(text) < 1 << 60:  # v1 writes a huge number for "no limit"
            return int(text)
    return None


def _cgroup_used_bytes() -> int:
    """What our control group cannot give back: its usage without the page cache it can drop."""
    for folder, name in ((CGROUP, "memory.current"), (CGROUP / "memory", "memory.usage_in_bytes")):
        text = _read(folder / name)
        if text.isdigit():
            fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            droppable = fields.get("inactive_file", fields.get("total_inactive_file", "0"))
            return max(int(text) - int(droppable), 0)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
