"""Cores, NUMA nodes and memory of this machine, whatever a container may have of them."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil

from moe_infinity.system import features

NODES = Path("/sys/devices/system/node")
CPU_INFO = Path("/proc/cpuinfo")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NVIDIA = Path("/proc/driver/nvidia/version")


class Mount(NamedTuple):
    """What a path is on."""

    device: str
    file_system: str
    options: tuple[str, ...]


def num_cores() -> int:
    """That this process may use."""
    if features.found().affinity:
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """As Linux tells it, else as Python does."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def keep_to_cores(cores: Collection[int]) -> None:
    """Let this process run on these only. Without the feature `affinity`, do nothing."""
    if features.found().affinity:
        os.sched_setaffinity(0, cores)


def numa_nodes() -> list[list[int]]:
    """The cores of each NUMA node; one list of none if nothing is known of nodes."""
    nodes = []
    for folder in sorted(NODES.glob("node[0-9]*")):
        try:
            cores = _cores((folder / "cpulist").read_text().strip())
        except (OSError, ValueError):
            continue
        if cores:
            nodes.append(cores)
    return nodes or [[]]


def _cores(text: str) -> list[int]:
    """Of "0-3,8"."""
    cores: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def physical_bytes() -> int:
    """Of memory."""
    return int(psutil.virtual_memory().total)


def available_bytes() -> int:
    """That can be allocated without swapping, by the system's own estimate."""
    return int(psutil.virtual_memory().available)


def own_bytes() -> int:
    """Memory that this process has for itself, and would leave free."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))  # the second is not known everywhere


def disk_bytes_read() -> int:
    """That this process has read from disks so far; 0 where the system does not tell."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, OSError, psutil.Error):  # macOS has no such counters
        return 0


def swap_bytes() -> tuple[int, int]:
    """Used, and all there is."""
    swap = psutil.swap_memory()
    return int(swap.used), int(swap.total)


def lockable_bytes() -> int | None:
    """Of memory that one process may lock; None: no limit, or none that is known."""
    if find_spec("resource") is None:
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def huge_pages_setting() -> str:
    """ "always", "madvise" or "never"; empty where there is no such setting."""
    return _text(HUGE_PAGES).partition("[")[2].partition("]")[0]


def nvidia_driver() -> str:
    """The first line of what the driver says of itself; empty without one, or elsewhere than on
    Linux.
    """
    return _text(NVIDIA).partition("\n")[0]


def mount_of(path: Path) -> Mount:
    """Of what exists or would be made here."""
    place = path.absolute()
    mounts = {Path(part.mountpoint): part for part in psutil.disk_partitions(all=True)}
    for folder in (place, *place.parents):
        if folder in mounts:
            part = mounts[folder]
            return Mount(part.device, part.fstype, tuple(part.opts.split(",")))
    return Mount("", "", ())


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
