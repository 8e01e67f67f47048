"""A file of a checkpoint as memory that the page cache backs. Linux 5.14 or newer."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

from moe_infinity.checkpoint.chunks import Chunk
from moe_infinity.memory.pages import address_of

MADV_POPULATE_READ = 22  # makes pages present, and reports a failing disk instead of a SIGBUS
MAP_NORESERVE = 0x4000  # nothing is written here: the system need not set memory aside
AGAIN = (errno.EINTR, errno.EAGAIN)
MOST_TRIES = 1000
LIBC = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """All bytes of a file. What `populate` has made present may be read like any memory; if the
    system needs the memory, it drops the bytes and reads them again when somebody looks at them.
    The mapping goes when nobody has a part of `bytes` any more. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        if sys.platform != "linux":
            raise OSError(errno.EOPNOTSUPP, "files are mapped on Linux only")
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        with path.open("rb") as file:  # writable for torch, which has no read-only tensors
            memory = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        self._path = path
        self.bytes = memoryview(memory)
        self._address = address_of(self.bytes)

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk of the file is to be read to where the file is mapped."""
        return address_of(chunk.parts[0]) == self._address + chunk.offset

    def populate(self, offset: int, num_bytes: int) -> None:
        """Make these bytes present, for any thread. Raises OSError, ENODATA if the file has become
        shorter.
        """
        skip = offset % mmap.PAGESIZE
        at = self._address + offset - skip
        length = num_bytes + skip
        for _ in range(MOST_TRIES):
            if LIBC.madvise(at, length, MADV_POPULATE_READ) == 0:
                return
            if (code := ctypes.get_errno()) not in AGAIN:
                break
        if code == errno.EFAULT:  # for all that would be a SIGBUS
            is_short = os.stat(self._path).st_size < offset + num_bytes
            code = errno.ENODATA if is_short else errno.EIO
        raise OSError(code, os.strerror(code))
