"""One file of a checkpoint, open for reads past the page cache if its file system allows them. What
the page cache has already is copied from there, and stays there.
"""

from __future__ import annotations

import errno
import weakref
from contextlib import ExitStack
from pathlib import Path

from moe_infinity.checkpoint.chunks import BLOCK_BYTES, BounceBuffer, Chunk
from moe_infinity.system import linux
from moe_infinity.system.files import REFUSALS, PositionalFile, open_past_cache, open_to_read

# What a machine has room for anyway stays in the page cache. Reads through it cost 0.5-1.7 s of CPU
# time per GB when they miss, those past it 0.1 in place and 0.2-0.3 by way of a bounce buffer.
SMALL_FILE_BYTES = 64 << 20
UNASKABLE = (*REFUSALS, errno.ENOSYS, errno.EPERM)  # cannot say what is cached, or may not


class OpenFile:
    """Two descriptors of one file, closed when nobody has it any more. Raises OSError."""

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

        Only of files that are read past the cache else: where we read through it ourselves, what
        the kernel read ahead for us would count as cached, and stay.
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
        """Bytes read, from the first on: all but at the end of the file, none if refused."""
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
        """Bytes read of those after the first `done`; 0 at the end of the file."""
        count = self._cached.read([next(chunk.parts_from(done))], chunk.offset + done)
        if not self._is_small:  # leave others their part of the cache
            self.forget(chunk)
        return count

    def forget(self, chunk: Chunk) -> None:
        """Let the page cache drop these bytes."""
        self._cached.forget(chunk.offset, chunk.num_bytes)
