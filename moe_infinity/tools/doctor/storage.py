"""The disk that checkpoints are read from, and where compiled kernels are kept."""

from __future__ import annotations

from pathlib import Path

from moe_infinity.sizes import format_bytes
from moe_infinity.system.machine import Mount
from moe_infinity.tools.doctor.line import Line, ok, warning

NETWORK = ("nfs", "nfs4", "9p", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "afs")
IN_MEMORY = ("tmpfs", "ramfs")
LITTLE_ROOM = 20 << 30  # less than most models take
SLOW_DISK = 0.5e9  # bytes per second


def file_system_line(check: str, folder: Path, mount: Mount) -> Line:
    kind = mount.file_system
    found = f"{folder} on {mount.device or '?'} ({kind or 'unknown'})"
    if kind in NETWORK or kind.startswith("fuse.") or kind == "fuse":
        hint = "keep checkpoints on a local SSD: experts are read at random all the time"
        return warning(check, f"{found}, a network or user file system", hint)
    if kind in IN_MEMORY:
        hint = "keep checkpoints on a disk: their files take memory here, and experts take it again"
        return warning(check, f"{found}, which is memory", hint)
    return ok(check, found)


def room_line(free: int) -> Line:
    found = f"{format_bytes(free)} free"
    if free < LITTLE_ROOM:
        hint = "set HF_HOME to a folder on a larger disk before you download a model"
        return warning("disk space", found, hint)
    return ok("disk space", found)


def direct_line(is_there: bool | None) -> Line:
    """Whether a file was read past the page cache; None: none could be written to try it."""
    if is_there is None:
        return warning("direct reads", "not tried", "make the cache folder writable")
    if not is_there:
        hint = "keep checkpoints on ext4, xfs or btrfs: reads through the page cache cost more CPU"
        return warning("direct reads", "refused here, the page cache is used", hint)
    return ok("direct reads", "past the page cache")


def page_cache_line(is_told: bool | None) -> Line:
    """Whether the system says what it has of a file; None: none could be written to try it."""
    if is_told is None:
        return warning("page cache", "not tried", "make the cache folder writable")
    if not is_told:
        hint = (
            "Linux 6.5 or newer tells it, of files that you own: what is cached is read again else"
        )
        return warning("page cache", "the system does not tell what it has of a file", hint)
    return ok("page cache", "the system tells what it has of a file")


def rate_line(rate: float) -> Line:
    found = f"{rate / 1e9:.2f} GB/s in random reads"
    if rate < SLOW_DISK:
        hint = "set HF_HOME to a folder on a local SSD: each missed expert waits for this disk"
        return warning("disk rate", found, hint)
    return ok("disk rate", found)


def kernels_line(folder: Path, num_kernels: int, num_bytes: int, *, is_writable: bool) -> Line:
    """Of the kernels that this state of the package has compiled on this processor."""
    if not is_writable:
        return warning(
            "kernels", f"{folder} cannot be written, {num_kernels} are there: the others are "
            "compiled at each start",
            "make it writable, or name another cache folder in XDG_CACHE_HOME",
        )  # fmt: skip
    if not num_kernels:
        return ok("kernels", f"none compiled yet: the first start takes seconds longer ({folder})")
    return ok("kernels", f"{num_kernels} compiled, {format_bytes(num_bytes)} in {folder}")
