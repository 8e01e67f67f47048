"""One file of a checkpoint, open for reads past the page cache if its file system allows them. What
the page cache has already is copied from there, and stays there.
"""

from __future__ import annotations

import errno
import os
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path

from moe_infinity.checkpoint.chunks import BLOCK_BYTES, BounceBuffer, Chunk
from moe_infinity.checkpoint.page_cache import is_cached

# What a machine has room for anyway stays in the page cache. Reads through it cost 0.5-1.7 s of CPU
# time per GB when they miss, those past it 0.1 in place and 0.2-0.3 by way of a bounce buffer.
SMALL_FILE_BYTES = 64 << 20
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system says that it has no O_DIRECT
UNASKABLE = (*REFUSALS, errno.ENOSYS, errno.EPERM)  # or cannot say what is cached, or may not


class OpenFile:
    """Two descriptors of one file, closed when nobody has it any more. Raises OSError."""

    def __init__(self, path: Path) -> None:
        opened = ExitStack()
        weakref.finalize(self, opened.close)
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, self._cached)
        self._is_small = os.fstat(self._cached).st_size < SMALL_FILE_BYTES
        self._direct: int | None = None
        self._is_refused = False
        self._may_ask = True  # what is cached
        if sys.platform == "linux" and not self._is_small:
            try:
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                opened.callback(os.close, self._direct)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise

    def read_if_cached(self, chunk: Chunk) -> bool:
        """Copy the chunk from the page cache if all of it is there. Reads nothing from the disk.

        Only of files that are read past the cache else: where we read through it ourselves, what
        the kernel read ahead for us would count as cached, and stay.
        """
        if not self._may_ask or self._direct is None or self._is_refused:
            return False
        try:
            if not is_cached(self._cached, chunk.offset, chunk.num_bytes):
                return False
            count = os.preadv(self._cached, chunk.parts, chunk.offset, os.RWF_NOWAIT)
            return count == chunk.num_bytes
        except BlockingIOError:  # evicted meanwhile
            return False
        except OSError as error:
            if error.errno not in UNASKABLE:
                raise
            self._may_ask = False
            return False

    def read_direct(self, chunk: Chunk, buffer: BounceBuffer) -> int:
        """Bytes read, from the first on: all but at the end of the file, none if refused."""
        if self._direct is None or self._is_refused:
            return 0
        skip = chunk.offset % BLOCK_BYTES
        try:
            if chunk.is_aligned:
                return os.preadv(self._direct, chunk.parts, chunk.offset)
            wanted = -(-(skip + chunk.num_bytes) // BLOCK_BYTES) * BLOCK_BYTES
            count = os.preadv(self._direct, [buffer.first(wanted)], chunk.offset - skip)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._is_refused = True
            return 0
        return buffer.copy_to(chunk, skip, count - skip)

    def read_cached(self, chunk: Chunk, done: int) -> int:
        """Bytes read of those after the first `done`; 0 at the end of the file."""
        count = os.preadv(self._cached, [next(chunk.parts_from(done))], chunk.offset + done)
        if not self._is_small:  # leave others their part of the cache
            self.forget(chunk)
        return count

    def forget(self, chunk: Chunk) -> None:
        """Let the page cache drop these bytes."""
        if sys.platform == "linux":
            os.posix_fadvise(self._cached, chunk.offset, chunk.num_bytes, os.POSIX_FADV_DONTNEED)
