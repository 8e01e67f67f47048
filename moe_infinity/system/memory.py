"""Large blocks of memory, and files as memory. Everything raises OSError."""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress
from pathlib import Path

from moe_infinity.system import features, linux


def zeroed_memory(num_bytes: int) -> mmap.mmap:
    """New memory, in huge pages if the system has any to give."""
    has = features.found()
    if not has.private_maps:
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if has.huge_pages:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def map_file(path: Path) -> mmap.mmap:
    """All bytes of a file; `make_present` comes before a look at them. What is written there does
    not reach the file.
    """
    if not features.found().populate:
        raise OSError(errno.EOPNOTSUPP, "this system does not map files safely")
    # Nothing is written: the system need not set memory aside. Writable for torch, which has no
    # read-only tensors.
    flags = mmap.MAP_PRIVATE | linux.MAP_NORESERVE
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)


def make_present(address: int, num_bytes: int) -> None:
    """Pages of a mapped file, for any thread. Raises OSError: EFAULT for all that would be a bus
    error.
    """
    skip = address % mmap.PAGESIZE
    linux.populate(address - skip, num_bytes + skip)
