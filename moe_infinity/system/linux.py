"""The test for Linux, and system calls of it that Python has no name for.

Asking what the page cache has reads nothing from the disk, unlike `preadv` with RWF_NOWAIT: where a
page is missing, that makes Linux 6.18 read ahead, through the page cache. A question takes 1 to 10
us for 1 MiB, which the disk reads in 300 us or more.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
from contextlib import suppress
from functools import cache

CACHESTAT = 451  # the number of the system call, of Linux 6.5
HUGE_BYTES = 2 << 20
MADV_COLD = 20  # of Linux 5.4; splits huge pages of which the range has a part
MADV_POPULATE_READ = 22  # of Linux 5.14; makes pages present, and reports a failing disk
MAP_NORESERVE = 0x4000
PAGE_BYTES = mmap.PAGESIZE
READ_AND_WRITE = 0x3
IN_PLACE = 0x12  # private, in place of what is mapped there
ZEROS_IN_PLACE = MAP_NORESERVE | IN_PLACE | 0x20  # anonymous
SA_SIGINFO = 4
AGAIN = (errno.EINTR, errno.EAGAIN)
MOST_TRIES = 1000


class Range(ctypes.Structure):
    """struct cachestat_range: bytes of a file."""

    _fields_ = (("offset", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


class SignalAction(ctypes.Structure):
    """struct sigaction of the C library, on systems of 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Counts(ctypes.Structure):
    """struct cachestat: pages of a range, by state."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "written_back", "evicted", "evicted_lately")
    )


def is_linux() -> bool:
    """True on Linux; everywhere else the package takes the plain path. Tests replace this."""
    return sys.platform == "linux"


@cache
def libc() -> ctypes.CDLL:
    """The C library. Its calls let other threads run."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    return library


def trim() -> None:
    """Give freed pages of all heaps back to the system. Other C libraries than glibc do not know
    it.
    """
    with suppress(AttributeError):
        libc().malloc_trim(0)


def is_cached(descriptor: int, offset: int, num_bytes: int) -> bool:
    """Ask if the page cache has all of these bytes. Raises OSError: ENOSYS before Linux 6.5, EPERM
    for a file that we neither own nor may write.
    """
    counts = Counts()
    wanted = Range(offset, num_bytes)
    if libc().syscall(CACHESTAT, descriptor, ctypes.byref(wanted), ctypes.byref(counts), 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    last_page = (offset + num_bytes - 1) // mmap.PAGESIZE
    num_cached: int = counts.cached
    return num_cached == last_page - offset // mmap.PAGESIZE + 1


def populate(address: int, num_bytes: int) -> None:
    """Make the pages of a mapped file present, for any thread. Raises OSError: EFAULT where a look
    at them would be a bus error.
    """
    code = 0
    for _ in range(MOST_TRIES):
        if libc().madvise(address, num_bytes, MADV_POPULATE_READ) == 0:
            return
        if (code := ctypes.get_errno()) not in AGAIN:
            break
    raise OSError(code, os.strerror(code))


def map_over(address: int, num_bytes: int, descriptor: int) -> None:
    """Map an open file, private, in place of what is mapped there. Raises OSError."""
    flags = MAP_NORESERVE | IN_PLACE
    if libc().mmap(address, num_bytes, READ_AND_WRITE, flags, descriptor, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def drop_pages(address: int, num_bytes: int) -> None:
    """Take the pages of private memory away; they are zeros when they are next looked at. Huge
    pages that lie there in part are split first: Linux frees none of a whole one until memory is
    short.
    """
    end = address + num_bytes
    first_whole = address + -address % HUGE_BYTES
    last_whole = max(end - end % HUGE_BYTES, first_whole)
    for first, stop in ((address, min(first_whole, end)), (last_whole, end)):
        if stop > first:
            libc().madvise(first, stop - first, MADV_COLD)  # an older kernel refuses
    if libc().madvise(address, num_bytes, mmap.MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def handle_bus_errors(address: int, stock: SignalAction) -> None:
    """Let machine code handle SIGBUS: a C function of a signal's number, siginfo_t and context.
    `stock` gets what the signal did before. Raises OSError.
    """
    action = SignalAction(handler=address, flags=SA_SIGINFO)
    if libc().sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(stock)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
