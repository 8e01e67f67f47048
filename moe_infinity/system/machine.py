"""Cores, NUMA nodes and memory of this machine, and the limits that a container sets to them.

Linux limits groups of processes (control groups, version 2 and 1). Where there are none, there is
nothing to read, and the machine is the limit.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import platform
import signal
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import main_thread
from typing import NamedTuple

import psutil

from moe_infinity.system import linux

NODES = Path("/sys/devices/system/node")
CPU_INFO = Path("/proc/cpuinfo")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NVIDIA = Path("/proc/driver/nvidia/version")
CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class MemoryLimit(NamedTuple):
    """The limit of one control group that this process is in."""

    num_bytes: int
    used_bytes: int  # and cannot be freed


class NotTold(OSError):
    """The system does not say how much memory there is."""


def num_cores() -> int:
    """The number of cores that this process may use."""
    if linux.is_linux():
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """The name of the processor, from Linux or else from Python."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def keep_to_cores(cores: Collection[int]) -> None:
    """Let this process run on these cores only. Does nothing elsewhere than on Linux."""
    if linux.is_linux():
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
    """The cores of a list such as "0-3,8"."""
    cores: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Raises NotTold where the system does not tell."""
    try:
        yield
    except (OSError, psutil.Error) as error:
        raise NotTold(
            f"the system does not say {what}: {error}\nhint: on Linux, mount /proc"
        ) from error


def machine_memory_bytes() -> int:
    """Bytes of physical memory, or the control group's limit if that is less. Raises
    NotTold.
    """
    limits = [limit.num_bytes for limit in memory_limits()]
    with _asking("how much memory there is"):
        return min([int(psutil.virtual_memory().total), *limits])


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping, by the operating system's own estimate and
    within the limits of our control groups. Raises NotTold.
    """
    left = [limit.num_bytes - limit.used_bytes for limit in memory_limits()]
    with _asking("how much memory is free"):
        return max(min([int(psutil.virtual_memory().available), *left]), 0)


def own_bytes() -> int:
    """Memory that this process has for itself, and would leave free. Raises NotTold."""
    with _asking("how much memory this process has"):
        memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))  # the second is not known everywhere


def memory_limits() -> list[MemoryLimit]:
    """The limits of our memory control group and its parents. A container may see only the last."""
    limits = []
    for folder in _groups("memory"):
        limit = _limit_bytes(folder)
        if limit is not None:
            limits.append(MemoryLimit(limit, _used_bytes(folder)))
    return limits


def core_limit() -> float | None:
    """The cores whose time our control groups may use together; None: no limit."""
    limits = []
    for folder in _groups("cpu"):
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        if not quota:
            quota = text_of(folder / "cpu.cfs_quota_us")
            period = text_of(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # else "max", or -1 in version 1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _groups(controller: str) -> Iterator[Path]:
    for line in [*text_of(OWN_GROUPS).splitlines(), "::/", f":{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = CGROUP / controllers
            group = top / path.strip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _limit_bytes(folder: Path) -> int | None:
    """Above `memory.high` a program is not ended, but hardly goes on."""
    texts = [
        text_of(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
    ]
    limits = [int(text) for text in texts if text.isdigit()]
    # Version 1 writes a huge number for "no limit".
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def _used_bytes(folder: Path) -> int:
    """The bytes that the group uses, without the page cache: the kernel drops it before the group
    is short of memory, also what is active, files that were read twice.
    """
    for name in ("memory.current", "memory.usage_in_bytes"):
        text = text_of(folder / name)
        if text.isdigit():
            fields = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
            kinds = "inactive_file", "active_file"  # in v1 without those of the groups inside
            droppable = sum(int(fields.get(f"total_{kind}", fields.get(kind, 0))) for kind in kinds)
            return max(int(text) - droppable, 0)
    return 0


def text_of(path: Path) -> str:
    """The text of a file of the system; empty without one."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def interrupt_main() -> None:
    """Interrupt the main thread as Ctrl-C does, from any thread. On Linux this also ends a wait for
    the system.
    """
    thread = main_thread().ident
    if linux.is_linux() and thread is not None:
        signal.pthread_kill(thread, signal.SIGINT)
    else:
        _thread.interrupt_main()


@cache
def yield_address() -> int:
    """The address of the C function that yields a core to other threads; 0: none is known."""
    if not linux.is_linux():
        return 0
    return ctypes.cast(linux.libc().sched_yield, ctypes.c_void_p).value or 0


def socket_timeout(seconds: float) -> bytes:
    """The value of the options SO_RCVTIMEO and SO_SNDTIMEO. 0: none."""
    if os.name == "nt":
        return struct.pack("L", round(seconds * 1e3))  # milliseconds
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))
