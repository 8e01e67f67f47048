"""Facts that the system tells, and only this command shows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from moe_infinity.system.machine import HUGE_PAGES, NVIDIA, text_of


class Mount(NamedTuple):
    """A mounted file system."""

    device: str
    file_system: str
    options: tuple[str, ...]


def huge_pages_setting() -> str:
    """The setting: always, madvise or never; empty where there is none."""
    return text_of(HUGE_PAGES).partition("[")[2].partition("]")[0]


def nvidia_driver() -> str:
    """The first line of the driver's own description; empty without one."""
    return text_of(NVIDIA).partition("\n")[0]


def mount_of(path: Path) -> Mount:
    """The mount of what exists or would be made here."""
    here = path.absolute()
    mounts = {Path(mount.mountpoint): mount for mount in psutil.disk_partitions(all=True)}
    for folder in (here, *here.parents):
        if folder in mounts:
            mount = mounts[folder]
            return Mount(mount.device, mount.fstype, tuple(mount.opts.split(",")))
    return Mount("", "", ())
