"""Cores, NUMA nodes and memory of this machine, whatever a container may have of them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import psutil

from moe_infinity.system import features

NODES = Path("/sys/devices/system/node")


def num_cores() -> int:
    """That this process may use."""
    if features.found().affinity:
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
