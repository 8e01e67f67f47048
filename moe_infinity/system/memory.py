"""Large blocks of memory, and files as memory. Everything raises OSError."""

from __future__ import annotations

import ctypes
import errno
import mmap
from contextlib import suppress

from moe_infinity.system import linux

# Reading from disk into huge pages takes the operating system 0.01-0.05 s of CPU time per GB, into
# small ones 0.04-0.11: it has fewer pages to look up and fewer segments to hand to the device.
HUGE_PAGE_BYTES = 2 << 20


def huge_pages(num_bytes: int) -> memoryview:
    """Zeroed memory that begins at a huge page, in huge pages if the system has any to give.

    Raises OSError, OverflowError or ValueError if there is not enough memory.
    """
    whole = memoryview(zeroed_memory(num_bytes + HUGE_PAGE_BYTES))  # keeps the mapping alive
    start = -address_of(whole) % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def return_free_memory() -> None:
    """Give what the process has freed back to the system, where the C library can. It takes a few
    milliseconds, in which other threads run.
    """
    if linux.is_linux():
        linux.trim()


def give_back(address: int, num_bytes: int) -> None:
    """Let the system have the whole pages of this memory, which hold zeros from then on."""
    first = address + -address % mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if linux.is_linux() and end > first:
        linux.drop_pages(first, end - first)


def address_of(view: memoryview) -> int:
    """The address of the first byte of a view that may be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def zeroed_memory(num_bytes: int, *, in_huge_pages: bool = True) -> mmap.mmap:
    """New memory, in huge pages if the system has any to give. Otherwise what is not written takes
    none.
    """
    if not linux.is_linux():
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE if in_huge_pages else mmap.MADV_NOHUGEPAGE)
    return memory


def map_file(descriptor: int) -> mmap.mmap:
    """All bytes of an open file; `make_present` comes before a look at them. What is written there
    does not reach the file.
    """
    if not linux.is_linux():
        raise OSError(errno.EOPNOTSUPP, "this system does not map files safely")
    # Nothing is written: the system need not set memory aside. Writable for torch, which has no
    # read-only tensors.
    flags = mmap.MAP_PRIVATE | linux.MAP_NORESERVE
    return mmap.mmap(descriptor, 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)


def make_present(address: int, num_bytes: int) -> None:
    """Make pages of a mapped file present, for any thread. Raises OSError: EFAULT where a look at
    them would be a bus error.
    """
    skip = address % mmap.PAGESIZE
    linux.populate(address - skip, num_bytes + skip)
