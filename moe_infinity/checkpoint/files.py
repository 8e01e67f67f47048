"""One file of a checkpoint.

OpenFile     for reads past the page cache if its file system allows them. What the page cache
             has already is copied from there, and stays there
MappedFile   as memory that the page cache backs, on systems that do this safely
"""

from __future__ import annotations

import errno
import os
import weakref
from contextlib import ExitStack
from pathlib import Path

from moe_infinity.checkpoint.chunks import BLOCK_BYTES, BounceBuffer, Chunk
from moe_infinity.system import linux
from moe_infinity.system.files import REFUSALS, PositionalFile, open_past_cache, open_to_read
from moe_infinity.system.memory import address_of, make_present, map_file

# What a machine has room for anyway stays in the page cache. Reads through it cost 0.5-1.7 s of CPU
# time per GB when they miss, those past it 0.1 in place and 0.2-0.3 by way of a bounce buffer.
SMALL_FILE_BYTES = 64 << 20
UNASKABLE = (*REFUSALS, errno.ENOSYS, errno.EPERM)  # cannot say what is cached, or may not


class OpenFile:
    """Two descriptors of one file, closed with the last reference to it. Raises OSError."""

    def __init__(self, path: Path) -> None:
        opened = ExitStack()
        weakref.finalize(self, opened.close)
        self._cached = open_to_read(path)
        opened.callback(self._cached.close)
        self._is_small = self._cached.num_bytes < SMALL_FILE_BYTES
        self._direct: PositionalFile | None = None
        self._is_refused = False
        self._may_ask = linux.is_linux()  # what is cached
        if not self._is_small:
            self._direct = open_past_cache(path)
        if self._direct is not None:
            opened.callback(self._direct.close)

    def read_if_cached(self, chunk: Chunk) -> bool:
        """Copy the chunk from the page cache if all of it is there. Reads nothing from the disk.

        Does nothing for files that are read through the cache anyway: what the kernel read ahead
        for us would count as cached there, and stay.
        """
        if not self._may_ask or self._direct is None or self._is_refused:
            return False
        try:
            if not linux.is_cached(self._cached.descriptor, chunk.offset, chunk.num_bytes):
                return False
            return self._cached.read_from_memory(chunk.parts, chunk.offset) == chunk.num_bytes
        except BlockingIOError:  # evicted meanwhile
            return False
        except OSError as error:
            if error.errno not in UNASKABLE:
                raise
            self._may_ask = False
            return False

    def read_direct(self, chunk: Chunk, buffer: BounceBuffer) -> int:
        """Read past the page cache and return how many bytes: all of the chunk but at the end of
        the file, none if the file system refuses.
        """
        if self._direct is None or self._is_refused:
            return 0
        skip = chunk.offset % BLOCK_BYTES
        try:
            if chunk.is_aligned:
                return self._direct.read(chunk.parts, chunk.offset)
            wanted = -(-(skip + chunk.num_bytes) // BLOCK_BYTES) * BLOCK_BYTES
            count = self._direct.read([buffer.first(wanted)], chunk.offset - skip)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._is_refused = True
            return 0
        return buffer.copy_to(chunk, skip, count - skip)

    def read_cached(self, chunk: Chunk, done: int) -> int:
        """Read some of what follows the first `done` bytes and return how many; 0 at the end of the
        file.
        """
        count = self._cached.read([next(chunk.parts_from(done))], chunk.offset + done)
        if not self._is_small:  # leave the cache to other programs
            self.forget(chunk)
        return count

    def forget(self, chunk: Chunk) -> None:
        """Let the page cache drop these bytes."""
        self._cached.forget(chunk.offset, chunk.num_bytes)


class MappedFile:
    """All bytes of a file. What `populate` has made present may be read like any memory; if the
    system needs the memory, it drops the bytes and reads them again at the next look at them. The
    mapping goes with the last reference to a part of `bytes`. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes = memoryview(map_file(path))
        self._address = address_of(self.bytes)

    def has(self, chunk: Chunk) -> bool:
        """True for a chunk of the file that is to be read to where the file is mapped."""
        return address_of(chunk.parts[0]) == self._address + chunk.offset

    def populate(self, offset: int, num_bytes: int) -> None:
        """Make these bytes present, for any thread. Raises OSError, ENODATA if the file has become
        shorter.
        """
        try:
            make_present(self._address + offset, num_bytes)
        except OSError as error:
            code = error.errno or errno.EIO
            if code == errno.EFAULT:  # a look at them would be a bus error
                is_short = os.stat(self._path).st_size < offset + num_bytes
                code = errno.ENODATA if is_short else errno.EIO
            raise OSError(code, os.strerror(code)) from error
