"""Reads from checkpoint files into the memory that wants the bytes: positional, past the page cache
where the file system allows it, many at a time.

    pieces --files.py---> chunks --read threads--> page cache        bytes that it has stay there
                                                   in place          memory and file aligned alike
                                                   bounce buffer     everything else
                                                   page cache        small files, O_DIRECT refused

Reads past the page cache neither push out other programs' memory nor, inside a memory limit, our
own code. Safe to call from several threads: no file position is shared. A short read, an I/O error
or a file that vanished is a CheckpointError that names file and offset; the reader stays usable.
So is a file that was changed while in use, until it is again what it was (file_state.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moe_infinity.checkpoint.file_state import Fingerprint, fingerprint_of
from moe_infinity.checkpoint.files import (
    BounceBuffer,
    Chunk,
    Copy,
    MappedFile,
    OpenFile,
    Piece,
    chunks_of,
)
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.errors import CheckpointError, LoadTimeout
from moe_infinity.memory import threads
from moe_infinity.memory.threads import ReadThreads
from moe_infinity.system import linux

if TYPE_CHECKING:
    from moe_infinity.checkpoint.shared_reads import SharedFile, SharedRead

# In random reads of 9.4 MB experts through bounce buffers, 1, 2, 4 and 8 threads reached 0.5, 0.8,
# 0.9 and 1.0 GB/s, of 2.5 MB ones 0.7, 0.8, 0.9 and 0.9 (2 cores, a virtual disk of 1.0-1.7 GB/s).
NUM_READ_THREADS = 4
MOST_TRIES = 3  # reads of a chunk, if each time somebody has written to its file meanwhile
GLANCE_S = 0.02  # between two looks of a read that gives way whether a layer waits for it by now

logger = logging.getLogger(__name__)


class Reader:
    """Keeps files open from their first read until `close`. Its threads start with the first read
    of more than one chunk.
    """

    def __init__(self, *, num_threads: int = NUM_READ_THREADS) -> None:
        self._num_threads = num_threads
        self._threads: ReadThreads | None = None
        self._apart = ReadThreads(1, "moe-infinity-rows")
        self._files: dict[Path, OpenFile] = {}
        self._mapped: dict[Path, MappedFile] = {}
        self._doubtful: set[Path] = set()  # of mapped files: those of which a read failed
        self._mapped_again: list[Path] = []  # the file of each change that was noticed
        self._first: dict[Path, Fingerprint] = {}  # of files when they were first opened
        self._lock = threading.Lock()
        self._thread = threading.local()  # a bounce buffer, and whether its reads give way
        self._num_urgent = 0  # reads going on that do not give way
        self._no_urgent = threading.Condition(self._lock)
        self.bytes_read = 0

    def read_into(self, extent: Extent, destination: memoryview) -> None:
        """Fill `destination` (bytes, as long as the extent). Raises CheckpointError."""
        self.read([(extent, destination)])

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill every destination (bytes, as long as its extent); extents that are neighbours in
        their file are read as one. Raises CheckpointError.
        """
        chunks = chunks_of(pieces)
        num_read = 0
        while num_read < len(chunks) and self._gives_way():
            self._read_chunk(chunks[num_read])
            num_read += 1
        if num_read < len(chunks):
            with self._urgently():
                self._read_all(chunks[num_read:])
        with self._lock:
            self.bytes_read += sum(chunk.num_bytes for chunk in chunks)

    def read_in_time(self, pieces: Sequence[Piece], seconds: float) -> None:
        """The same in a thread, which is left alone if it takes longer. Raises LoadTimeout then."""
        read: Future[None] = Future()
        try:
            self._apart.submit(partial(self.read, pieces), read)
        except RuntimeError:  # no thread can be started, or `close` came between
            self.read(pieces)
            return
        if not wait([read], seconds).done:
            raise LoadTimeout(f"{pieces[0][0].file}: no bytes of it came for {seconds:.0f} s")
        read.result()

    def shared(
        self, experts: Sequence[tuple[Sequence[Copy], Callable[[], memoryview]]]
    ) -> SharedRead | None:
        """A read of the chunks of several experts, which threads do together. The slot of each is
        asked for when it is about to be filled. None for files that have to be read by `read`: on
        other systems than Linux, small ones, those of some file systems.
        """
        if not linux.is_linux():
            return None
        paths = {extent.file for chunks, _ in experts for extent, _ in chunks}
        files: dict[Path, SharedFile] = {}
        for path in paths:
            try:
                with self._lock:
                    file = self._opened(path)
            except OSError:  # `read` says what is wrong
                return None
            if (descriptors := file.descriptors) is None:
                return None
            files[path] = file, descriptors
        from moe_infinity.checkpoint.shared_reads import SharedRead

        return SharedRead(
            experts,
            files,
            read=self.read,
            urgently=self._urgently,
            bounce_buffer=self._bounce_buffer,
        )

    def mapped(self, extent: Extent) -> memoryview:
        """An extent where the page cache has it. It is present once it was read into these bytes.
        Raises OSError where files cannot be mapped, CheckpointError for a file that was changed.
        """
        with self._lock:
            file = self._mapped.get(extent.file)
            if file is None:
                file = self._mapped[extent.file] = MappedFile(self._opened(extent.file))
        return file.bytes[extent.offset : extent.offset + extent.num_bytes]

    def can_map(self, extent: Extent) -> bool:
        """Return True if the system can map the file of an extent, and read into the page cache."""
        first = Extent(extent.file, extent.offset, 1)
        try:
            self.read_into(first, self.mapped(first))
        except OSError as error:
            logger.info("weights are copied, as files cannot be mapped: %s", error)
            return False
        return True

    def is_cached(self, extent: Extent) -> bool:
        """Ask if the page cache has an extent. Raises OSError, CheckpointError."""
        with self._lock:
            return self._opened(extent.file).is_cached(extent.offset, extent.num_bytes)

    def changed_file(self, num_known: int | None = None) -> Path | None:
        """Return a file that was changed, or of which bytes are gone, and whose bytes are used
        where the page cache has them: what was computed with them meanwhile may be wrong. That
        holds for one that is right again, too, if it is not among the changes that are known.
        """
        if num_known is not None and len(self._mapped_again) > num_known:
            return self._mapped_again[-1]
        for path, mapped in list(self._mapped.items()):
            if not mapped.is_right():
                return path
        return None

    def map_changed(self) -> int:
        """Map the files anew that were changed, or of which a read failed, to where their bytes are
        used. Between two passes, or in one that began inside another: each sees at its end that a
        file was changed. Returns the number of changes that are known by now. Raises OSError,
        CheckpointError for one that is not what it was.
        """
        with self._lock:
            for path, mapped in self._mapped.items():
                if path in self._doubtful or not mapped.is_right():
                    mapped.map_again(self._opened(path))
                    self._mapped_again.append(path)
                self._doubtful.discard(path)
            return len(self._mapped_again)

    @contextmanager
    def giving_way(self, until: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Let the reads of other threads go first, before every chunk of this thread, until `until`
        says that a layer waits for them.
        """
        self._thread.until = until
        try:
            yield
        finally:
            self._thread.until = None

    def _gives_way(self) -> bool:
        """Return True while this thread has to give way, after its turn has come; False once it
        need not.
        """
        until: Callable[[], bool] | None = getattr(self._thread, "until", None)
        while until is not None and not until():
            with self._no_urgent:
                if self._no_urgent.wait_for(lambda: self._num_urgent == 0, timeout=GLANCE_S):
                    return True
        return False

    @contextmanager
    def _urgently(self) -> Iterator[None]:
        """Inside, reads of other threads that give way wait."""
        with self._lock:
            self._num_urgent += 1
        try:
            yield
        finally:
            with self._no_urgent:
                self._num_urgent -= 1
                if self._num_urgent == 0:
                    self._no_urgent.notify_all()

    def _read_all(self, chunks: list[Chunk]) -> None:
        """Read with all read threads together, which take the chunks one by one, in the order of
        calls.
        """
        waiting = iter(chunks)  # gives each chunk to one thread

        def work() -> None:
            for chunk in waiting:
                self._read_chunk(chunk)

        if len(chunks) < 2:
            work()
            return
        helpers: list[Future[None]] = [Future() for _ in chunks[: self._num_threads]]
        try:
            for helper in helpers:
                self._started().submit(work, helper)
            wait(helpers, return_when=FIRST_COMPLETED)  # none is before all chunks are taken
        except RuntimeError:  # no thread can be started, or `close` came between
            work()
        finally:
            list(waiting)  # after an error or Ctrl-C the rest is not read
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()

    def _started(self) -> ReadThreads:
        with self._lock:
            if self._threads is None:
                self._threads = ReadThreads(self._num_threads, "moe-infinity-disk")
            return self._threads

    def _read_chunk(self, chunk: Chunk) -> None:
        try:
            for _ in range(MOST_TRIES):
                with self._lock:
                    file = self._opened(chunk.file)
                    mapped = self._mapped.get(chunk.file)
                if mapped is not None and mapped.has(chunk):
                    mapped.populate(chunk.offset, chunk.num_bytes)
                else:
                    self._fill(chunk, file)
                if file.is_unchanged():
                    return
            raise CheckpointError(f"{chunk.file}: is being written while it is in use")
        except OSError as error:
            with self._lock:  # the next read opens it anew: it may be replaced by a whole one
                self._files.pop(chunk.file, None)
                if chunk.file in self._mapped:
                    self._doubtful.add(chunk.file)
            if isinstance(error, CheckpointError):
                raise
            where = f"{chunk.file}: cannot be read at byte {chunk.offset + chunk.num_done}"
            raise CheckpointError(f"{where}: {error.strerror or error}") from error

    def _fill(self, chunk: Chunk, file: OpenFile) -> None:
        """Copy the bytes of a chunk to where they go. Raises CheckpointError, OSError."""
        if file.read_if_cached(chunk):
            return
        chunk.num_done = file.read_direct(chunk, self._bounce_buffer())
        while chunk.num_done < chunk.num_bytes:  # the rest of a short read, or all of it
            count = file.read_cached(chunk)
            if count == 0:
                raise CheckpointError(
                    f"{chunk.file}: ends before byte {chunk.offset + chunk.num_done}, "
                    f"{chunk.num_bytes - chunk.num_done} more expected"
                )
            chunk.num_done += count

    def _bounce_buffer(self) -> BounceBuffer:
        """The bounce buffer of this thread."""
        if not hasattr(self._thread, "bounce_buffer"):
            self._thread.bounce_buffer = BounceBuffer()
        buffer: BounceBuffer = self._thread.bounce_buffer
        return buffer

    def _opened(self, path: Path) -> OpenFile:
        """Return the file, opened anew if it was changed. The caller has the lock. Raises OSError,
        CheckpointError for one that is not what it was at first.
        """
        file = self._files.get(path)
        if file is None or not file.is_unchanged():
            file = self._files[path] = self._recognized(path)
        return file

    def _recognized(self, path: Path) -> OpenFile:
        file = OpenFile(path)
        found = fingerprint_of(
            file.state.num_bytes,
            lambda offset, to: self._fill(Chunk(path, offset, [to], to.nbytes), file),
        )
        difference = found.difference_from(self._first.setdefault(path, found))
        if difference is not None:
            raise CheckpointError(
                f"{path}: was changed while in use: {difference}\n"
                "hint: it is read again once it holds what it held; another model needs a new start"
            )
        return file

    def close(self) -> None:
        """Wait a limited time for reads to end, and close all files; those still being read are
        closed when they are done. A later read opens its file again.
        """
        with self._lock:
            ended, self._threads = self._threads, None
        threads.close(self._apart, *filter(None, [ended]))
        with self._lock:
            self._files.clear()
            self._mapped.clear()
            self._doubtful.clear()
