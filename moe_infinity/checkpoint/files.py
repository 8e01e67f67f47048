"""One file of a checkpoint.

OpenFile     for reads past the page cache if its file system allows them. What the page cache
             has already is copied from there, and stays there
MappedFile   as memory that the page cache backs, on systems that do this safely
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moe_infinity.checkpoint.file_state import FileState, state_of
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.kernels.cpu.bus_errors import bus_errors
from moe_infinity.system import linux
from moe_infinity.system.files import REFUSALS, PositionalFile, open_past_cache, open_to_read
from moe_infinity.system.memory import address_of, huge_pages, make_present, map_file

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
        self.state: FileState = state_of(self._cached.descriptor)  # what it was when it was opened
        self._is_small = self._cached.num_bytes < SMALL_FILE_BYTES
        self._direct: PositionalFile | None = None
        self._is_refused = False
        self._may_ask = linux.is_linux()  # what is cached
        if not self._is_small:
            self._direct = open_past_cache(path)
        if self._direct is not None:
            opened.callback(self._direct.close)

    @property
    def descriptors(self) -> tuple[int, int] | None:
        """The descriptors that read through the page cache and past it; None if all reads of the
        file go through it.
        """
        if self._direct is None or self._is_refused:
            return None
        return self._cached.descriptor, self._direct.descriptor

    def is_unchanged(self) -> bool:
        """Return True if nobody has written to the file since it was opened."""
        return state_of(self._cached.descriptor) == self.state

    def map(self) -> memoryview:
        """Return the file as memory, guarded: bytes that are gone are zeros there."""
        mapped = map_file(self._cached.descriptor)
        view = memoryview(mapped)
        weakref.finalize(mapped, bus_errors.guard(address_of(view), len(view)))
        return view

    def map_over(self, address: int, num_bytes: int) -> None:
        """Map the file in place of one that was mapped by `map`. Raises OSError."""
        linux.map_over(address, num_bytes, self._cached.descriptor)

    def read_if_cached(self, chunk: Chunk) -> bool:
        """Copy the chunk from the page cache if all of it is there. Reads nothing from the disk.

        Does nothing for files that are read through the cache anyway: what the kernel read ahead
        for us would count as cached there, and stay.
        """
        if self._direct is None or self._is_refused:
            return False
        try:
            if not self.is_cached(chunk.offset, chunk.num_bytes):
                return False
            return self._cached.read_from_memory(chunk.parts, chunk.offset) == chunk.num_bytes
        except BlockingIOError:  # evicted meanwhile
            return False

    def is_cached(self, offset: int, num_bytes: int) -> bool:
        """Ask if the page cache has all of these bytes; False where it cannot say."""
        try:
            return self._may_ask and linux.is_cached(self._cached.descriptor, offset, num_bytes)
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

    def read_cached(self, chunk: Chunk) -> int:
        """Read some of what follows the bytes that are there, and return how many; 0 at the end of
        the file.
        """
        count = self._cached.read([next(chunk.missing_parts())], chunk.offset + chunk.num_done)
        if not self._is_small:  # leave the cache to other programs
            self.forget(chunk)
        return count

    def forget(self, chunk: Chunk) -> None:
        """Let the page cache drop these bytes."""
        self._cached.forget(chunk.offset, chunk.num_bytes)


class MappedFile:
    """All bytes of an open file. What `populate` has made present may be read like any memory; if
    the system needs the memory, it drops the bytes and reads them again at the next look at them.
    The mapping goes with the last reference to a part of `bytes`. Raises OSError.
    """

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.bytes = file.map()
        self._num_gone = bus_errors.count
        self._address = address_of(self.bytes)

    def map_again(self, file: OpenFile) -> None:
        """Map the same bytes of a file opened anew to where they were: some were gone, or others.
        Raises OSError.
        """
        num_gone = bus_errors.count  # before: bytes may go meanwhile
        file.map_over(self._address, len(self.bytes))
        self.file = file
        self._num_gone = num_gone

    def is_right(self) -> bool:
        """Return False if the file was changed, or bytes of any mapped file were gone: what was
        computed with them may be wrong.
        """
        return self._num_gone == bus_errors.count and self.file.is_unchanged()

    def has(self, chunk: Chunk) -> bool:
        """True for a chunk of the file that is to be read to where the file is mapped."""
        return address_of(chunk.parts[0]) == self._address + chunk.offset

    def populate(self, offset: int, num_bytes: int) -> None:
        """Make these bytes present, for any thread. Raises OSError, ENODATA if the file was
        changed.
        """
        try:
            make_present(self._address + offset, num_bytes)
        except OSError as error:
            code = error.errno or errno.EIO
            if code == errno.EFAULT:  # a look at them would be a bus error
                code = errno.EIO if self.file.is_unchanged() else errno.ENODATA
            raise OSError(code, os.strerror(code)) from error


BLOCK_BYTES = 4096  # file systems ask O_DIRECT reads for multiples of 512, a few for 4096
# Beside a chunk: its first and last block, and one for kernels/cpu/chunk_reads.py.
SCRATCH_BLOCKS = 3
# How long a demand load may wait for a prefetch: 1 ms. 512 KiB cost a third more CPU time, of
# 2 MiB no gain was seen (9.4 MB experts, 1-8 threads).
CHUNK_BYTES = 1 << 20

Piece = tuple[Extent, memoryview]  # what to read, and where to
Copy = tuple[Extent, int]  # the same, in bytes from the start of a slot


@dataclass(slots=True)
class Chunk:
    """Bytes of a file from `offset` on, and where they go, one part after the other."""

    file: Path
    offset: int
    parts: list[memoryview] = field(default_factory=list)
    num_bytes: int = 0
    num_done: int = 0  # read so far

    def append(self, part: memoryview) -> None:
        self.parts.append(part)
        self.num_bytes += part.nbytes

    def missing_parts(self) -> Iterator[memoryview]:
        """The parts without the bytes that were read."""
        done = self.num_done
        for part in self.parts:
            if done < part.nbytes:
                yield part[done:]
            done = max(done - part.nbytes, 0)

    @property
    def is_aligned(self) -> bool:
        """True if the system can put the bytes where they belong without a copy."""
        return self.offset % BLOCK_BYTES == 0 and all(
            part.nbytes % BLOCK_BYTES == 0 and address_of(part) % BLOCK_BYTES == 0
            for part in self.parts
        )


def chunks_of(pieces: Sequence[Piece]) -> list[Chunk]:
    """Cut reads into chunks, in the order of their files."""
    chunks: list[Chunk] = []
    end_of_last: tuple[Path, int] | None = None
    for extent, destination in sorted(pieces, key=lambda piece: (piece[0].file, piece[0].offset)):
        assert destination.nbytes == extent.num_bytes, (destination.nbytes, extent)
        done = 0
        while done < extent.num_bytes:
            at = extent.offset + done
            if end_of_last != (extent.file, at) or at % CHUNK_BYTES == 0:
                chunks.append(Chunk(extent.file, at))
            end = min(extent.num_bytes, done + CHUNK_BYTES - at % CHUNK_BYTES)
            chunks[-1].append(destination[done:end])
            end_of_last = extent.file, extent.offset + end
            done = end
    return chunks


def joined(copies: Sequence[Copy]) -> list[Copy]:
    """The copies in the order of their files; those that are neighbours in file and slot as one."""
    found: list[Copy] = []
    for extent, at in sorted(copies, key=lambda copy: (copy[0].file, copy[0].offset)):
        if found:
            last, last_at = found[-1]
            if (extent.file, extent.offset, at) == (last.file, last.end, last_at + last.num_bytes):
                num_bytes = last.num_bytes + extent.num_bytes
                found[-1] = Extent(last.file, last.offset, num_bytes), last_at
                continue
        found.append((extent, at))
    return found


def cut(copies: Sequence[Copy]) -> list[Copy]:
    """Join copies, and cut them into chunks of about one size. All but the first chunk of a copy
    begin at a block of the file.
    """
    return [chunk for copy in joined(copies) for chunk in _chunks_of(*copy)]


def in_whole_blocks(copies: Sequence[Copy], ends: Mapping[Path, int]) -> list[Copy]:
    """Copies that begin in a block of a slot where they begin in one of their file, with the rest
    of their first and last block: reads past the page cache put these where they belong without a
    copy. They do not go beyond these ends of files.
    """
    found = []
    for extent, at in joined(copies):
        skip = extent.offset % BLOCK_BYTES
        num_bytes = min(extent.end + -extent.end % BLOCK_BYTES, ends[extent.file]) - extent.offset
        found.append((Extent(extent.file, extent.offset - skip, num_bytes + skip), at - skip))
    return found


def _chunks_of(extent: Extent, at: int) -> Iterator[Copy]:
    count = -(-extent.num_bytes // CHUNK_BYTES)
    first = extent.offset
    for k in range(1, count + 1):
        end = extent.offset + extent.num_bytes * k // count
        end -= end % BLOCK_BYTES if k < count else 0
        yield Extent(extent.file, first, end - first), at + first - extent.offset
        first = end


class BounceBuffer:
    """Aligned memory of one thread, for a chunk whose destination is not aligned."""

    def __init__(self) -> None:
        memory = huge_pages(CHUNK_BYTES + SCRATCH_BLOCKS * BLOCK_BYTES)
        self.address = address_of(memory)
        self._bytes = np.frombuffer(memory, np.uint8)

    def first(self, num_bytes: int) -> memoryview:
        return self._bytes[:num_bytes].data

    def copy_to(self, chunk: Chunk, skip: int, count: int) -> int:
        """Copy `count` bytes from `skip` on to the parts of the chunk, and return how many belonged
        there.
        """
        done = 0
        for part in chunk.parts:
            wanted = max(min(part.nbytes, count - done), 0)
            start = skip + done
            # numpy lets other threads run meanwhile, an assignment to the memoryview does not
            np.frombuffer(part, np.uint8)[:wanted] = self._bytes[start : start + wanted]
            done += wanted
        return done
