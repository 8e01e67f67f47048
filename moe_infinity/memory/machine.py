"""How much memory this machine, or the container we run in, has, and how much is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


def machine_memory_bytes() -> int:
    """Bytes of physical memory, or the control group's limit if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for folder in _groups() if (limit := _limit_bytes(folder)) is not None]
    return min([physical, *limits])


def device_memory_bytes(device: str) -> int | None:
    """Bytes of the CUDA device that "cuda:1", "cuda" or "auto" names; None if there is none."""
    import torch  # takes seconds, and only a config of an older MoE-Infinity needs it

    if device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info(0 if device == "auto" else device)[1])


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping, by the operating system's own estimate and
    within the limits of our control groups.
    """
    available = machine_memory_bytes()
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = min(available, int(line.split()[1]) * 1024)
    for folder in _groups():
        if (limit := _limit_bytes(folder)) is not None:
            available = min(available, limit - _used_bytes(folder))
    return max(available, 0)


def _groups() -> Iterator[Path]:
    """Our memory control group and its parents, v2 or v1. A container may see only the last."""
    for line in [*_read(OWN_GROUPS).splitlines(), "::/", ":memory:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
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
    """Bytes a control group uses and cannot free: all but the page cache that it may drop."""
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
