"""Files that are read and written at offsets, from several threads at once; locks; names that reach
the disk. Everything raises OSError.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from filelock import FileLock, Timeout

from moe_infinity.system import features

REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system says that it has no direct reads
BINARY = getattr(os, "O_BINARY", 0)  # Windows changes the ends of lines else


class PositionalFile:
    """An open file without a position of its own. Who opened it closes it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._at_position = Lock()  # for systems where every read moves the position

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, parts: Sequence[memoryview], offset: int) -> int:
        """Bytes read from `offset` on into the parts, one after the other; fewer than they hold at
        the end of the file, and wherever the system gives fewer.
        """
        if features.found().preadv:
            return os.preadv(self.descriptor, parts, offset)
        done = 0
        for part in parts:
            data = self._read_one(part.nbytes, offset + done)
            part[: len(data)] = data
            done += len(data)
            if len(data) < part.nbytes:
                break
        return done

    def _read_one(self, num_bytes: int, offset: int) -> bytes:
        if features.found().pread:
            return os.pread(self.descriptor, num_bytes, offset)
        with self._at_position:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return os.read(self.descriptor, num_bytes)

    def read_from_memory(self, parts: Sequence[memoryview], offset: int) -> int:
        """As `read`, but only what the page cache has. Needs the feature `page_cache`. Raises
        BlockingIOError if the first byte is missing.
        """
        return os.preadv(self.descriptor, parts, offset, os.RWF_NOWAIT)

    def write(self, data: memoryview, offset: int) -> None:
        """All of it."""
        while data:
            written = self._write_some(data, offset)
            data = data[written:]
            offset += written

    def _write_some(self, data: memoryview, offset: int) -> int:
        if features.found().pread:
            return os.pwrite(self.descriptor, data, offset)
        with self._at_position:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return os.write(self.descriptor, data)

    def forget(self, offset: int, num_bytes: int) -> None:
        """Leave the page cache to others: these bytes are not read again soon."""
        if features.found().fadvise:
            os.posix_fadvise(self.descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.descriptor)


def open_to_read(path: Path) -> PositionalFile:
    return PositionalFile(os.open(path, os.O_RDONLY | BINARY))


def open_past_cache(path: Path) -> PositionalFile | None:
    """The file for reads that leave nothing in the page cache. With some systems such reads have to
    begin and end at blocks of the file, in memory that begins at one. None: not of this file.
    """
    has = features.found()
    if has.o_direct and has.preadv:  # `read` has no memory that begins at a block else
        try:
            return PositionalFile(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return None
    if has.f_nocache:
        return _without_cache(open_to_read(path))
    return None


def _without_cache(file: PositionalFile) -> PositionalFile | None:
    """macOS; its `fcntl` is looked up by name as other systems' has no such constant."""
    fcntl = importlib.import_module("fcntl")
    try:
        fcntl.fcntl(file.descriptor, fcntl.F_NOCACHE, 1)
    except OSError:
        file.close()
        return None
    return file


def create(path: Path) -> PositionalFile:
    """A new file to write, in place of what had this name."""
    return PositionalFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o644))


def nearest_folder(path: Path) -> Path:
    """The folder, or of those above it the first that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


def sync_names(folder: Path) -> None:
    """Force the names of files in a folder to the disk, where the system can be told to."""
    if not features.found().folder_sync:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_folder(folder: Path, name: Path) -> None:
    """There may be an empty folder of the new name, which goes: Windows refuses it else."""
    if name.is_dir():
        name.rmdir()
    folder.rename(name)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process has the lock of this file, which is made and stays. Raises
    BlockingIOError if one has it now.
    """
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, "another process has the lock", str(path)) from error
    try:
        yield
    finally:
        lock.release()
