"""Files that are read and written at offsets, from several threads at once; locks; names that reach
the disk. Everything raises OSError.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from filelock import FileLock, Timeout

from moe_infinity.system import linux

REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system says that it has no direct reads
BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes the ends of lines


class PositionalFile:
    """An open file without a position of its own. The code that opened it closes it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._at_position = Lock()  # elsewhere than on Linux every read moves the position

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, parts: Sequence[memoryview], offset: int) -> int:
        """Fill the parts one after the other, from `offset` on, and return how many bytes were
        read: fewer than they hold at the end of the file, and wherever the system gives fewer.
        """
        if linux.is_linux():
            return os.preadv(self.descriptor, parts, offset)
        done = 0
        with self._at_position:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            for part in parts:
                data = os.read(self.descriptor, part.nbytes)
                part[: len(data)] = data
                done += len(data)
                if len(data) < part.nbytes:
                    break
        return done

    def read_from_memory(self, parts: Sequence[memoryview], offset: int) -> int:
        """Read like `read`, but only what the page cache has: on Linux alone. Raises
        BlockingIOError if the first byte is missing.
        """
        return os.preadv(self.descriptor, parts, offset, os.RWF_NOWAIT)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of the data."""
        while data:
            written = self._write_some(data, offset)
            data = data[written:]
            offset += written

    def _write_some(self, data: memoryview, offset: int) -> int:
        if linux.is_linux():
            return os.pwrite(self.descriptor, data, offset)
        with self._at_position:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return os.write(self.descriptor, data)

    def forget(self, offset: int, num_bytes: int) -> None:
        """Let the page cache drop these bytes: they are not read again soon."""
        if linux.is_linux():
            os.posix_fadvise(self.descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.descriptor)


def open_to_read(path: Path) -> PositionalFile:
    return PositionalFile(os.open(path, os.O_RDONLY | BINARY))


def open_past_cache(path: Path) -> PositionalFile | None:
    """The file for reads that leave nothing in the page cache. They have to begin and end at blocks
    of the file, in memory that begins at one. None: the file, or the system, has no such reads.
    """
    if not linux.is_linux():
        return None
    try:
        return PositionalFile(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return None


def open_no_link(path: Path) -> int:
    """A descriptor of a file to read, which is no link, and no pipe that one waits for. Raises
    OSError.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags)


def create(path: Path) -> PositionalFile:
    """A new file to write, in place of what had this name."""
    return PositionalFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o644))


def create_new(path: Path, mode: int) -> int:
    """A descriptor of a new file to write. Raises OSError for a name that exists or leads
    elsewhere.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | BINARY
    return os.open(path, flags, mode)


def name_beside(path: Path) -> Path:
    """A name in the same folder that nobody can guess, for a file that gets its own at the end."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def make_private_folder(folder: Path, num_own: int) -> None:
    """Make a folder that only its owner may enter. The last `num_own` names of its path are ours.

    Raises PermissionError if somebody else owns one of these, or could have changed what is in it.
    """
    own = [folder, *folder.parents][:num_own][::-1]
    own[0].parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _refuse_shared(own[0].parent, os.stat(own[0].parent), sticky_is_safe=True)
    for each in own:
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = os.lstat(each)
        if not stat.S_ISDIR(found.st_mode):
            raise PermissionError(errno.EPERM, "is no folder", str(each))
        if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(each))
        _refuse_shared(each, found, sticky_is_safe=False)
        if stat.S_IMODE(found.st_mode) != 0o700:
            each.chmod(0o700)


def _refuse_shared(folder: Path, found: os.stat_result, *, sticky_is_safe: bool) -> None:
    """Raise PermissionError for a folder that other users may write to. In a sticky one, such as
    /tmp, they cannot replace what is ours.
    """
    is_sticky = bool(found.st_mode & stat.S_ISVTX)
    if found.st_mode & 0o022 and not (sticky_is_safe and is_sticky):
        raise PermissionError(errno.EPERM, "others may write to it", str(folder))


def nearest_folder(path: Path) -> Path:
    """The folder itself if it exists, or the nearest one above it that does."""
    for folder in (path, *path.absolute().parents):
        with suppress(OSError):  # before Python 3.14 of folders that this user may not enter
            if folder.is_dir():
                return folder
    return Path(path.absolute().anchor)


def sync_names(folder: Path) -> None:
    """Force the names of files in a folder to the disk, on Linux."""
    if not linux.is_linux():
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_folder(folder: Path, name: Path) -> None:
    """Rename a folder. An empty one of the new name is removed first, as Windows demands."""
    if name.is_dir():
        name.rmdir()
    folder.rename(name)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file, which is made and stays. Raises BlockingIOError if another
    process holds it now.
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


def expanded(path: str | Path) -> Path:
    """The path with the folder that "~" names. It stays as it is where there is none."""
    return Path(os.path.expanduser(path))


def is_known(path: Path) -> bool:
    """True unless the path is in the home folder of a user who has none."""
    return not str(expanded(path)).startswith("~")
