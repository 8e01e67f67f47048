"""Prefixes on disk, found again after a restart and when memory has pushed them out.

    FOLDER/KEY/NAME.block   some tokens' keys and values, and the experts that they activated
    FOLDER/KEY/NAME.state   the state behind them

KEY tells models and arithmetics apart, NAME an owner and all tokens up to the end of a block (see
prefix_cache.py). Neither has anything of a text or an API key that could be read. A file is a
safetensors file with a checksum over its name and contents. It is its user's alone, and complete or
not there, so several servers may share a folder.

A thread writes; what it cannot keep up with is dropped. Threads read while the engine waits, for a
limited time. Whatever is wrong with the folder is said once, and costs no more than what the store
would have saved.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Protocol, TypeVar

from torch import Tensor

from moe_infinity.memory import threads
from moe_infinity.memory.threads import ReadThreads
from moe_infinity.prefixes.cache_bytes import CacheBytes
from moe_infinity.prefixes.stored_file import Array, Damaged, Stored, file_bytes, read_file
from moe_infinity.system.files import (
    create_new,
    make_private_folder,
    name_beside,
)
from moe_infinity.system.threads import keep_running

logger = logging.getLogger(__name__)
FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
FILE_NAME = re.compile(r"[0-9a-f]{40}\.(block|state)")
PARTIAL_NAME = re.compile(r"\.[0-9a-f]{40}\.(block|state)\.[0-9a-f]{16}\.partial")
MOST_WAITING = 64  # prompts and answers that are to be written
READ_THREADS = 2
READ_S = 10.0  # for what one prompt begins with: names, and then contents
CLOSE_S = 10.0
FREE_BYTES = 1 << 30  # that others may still write to the disk
EMPTIED = 0.9  # of the size, once it is full
LOOKS = 16  # at what others write there, while one server fills the size
UNFINISHED_S = 3600.0  # after so long a partial file is nobody's
Answer = TypeVar("Answer")


class Kept(Protocol):
    """A block or a state in memory."""

    @property
    def data(self) -> Tensor | None:
        """uint8; None: it was dropped."""

    @property
    def experts(self) -> Array | None:
        """The experts that the tokens of a block activated."""


@dataclass(slots=True)
class StoreCounts:
    """Counts of one store, since it was opened."""

    hits: int = 0  # prompts that began with something of it
    tokens: int = 0  # of these prompts, that came from it
    read_bytes: int = 0
    written_bytes: int = 0


class PromptStore:
    """The files of one model and arithmetic. Threads start with their first work."""

    def __init__(self, folder: Path, key: str, num_bytes: int) -> None:
        """`num_bytes`: what the files of all models in the folder may take."""
        self.key = key
        self.counts = StoreCounts()
        self._root = folder
        self._folder = folder / key
        self._num_bytes = num_bytes
        self._used_bytes = 0  # as far as is known
        self._unseen_bytes = 0  # written since others' files were looked at
        self._is_safe = False  # the folder is there, and its user's alone
        self._is_slow = False
        self._said: set[str] = set()
        self._queue: Queue[tuple[dict[str, Kept], CacheBytes] | None] = Queue(MOST_WAITING)
        self._closing = Event()
        self._writer: Thread | None = None
        self._readers = ReadThreads(READ_THREADS, "moe-infinity-prompts")
        with self._explaining("opened"):
            self._require_safe()
            self._look_around(self._num_bytes)

    # for the engine's thread

    @property
    def is_empty(self) -> bool:
        """True if nothing was kept for this model and arithmetic."""
        if not self._is_safe:
            return True
        with suppress(OSError):
            return not any(FILE_NAME.fullmatch(name) for name in os.listdir(self._folder))
        return True

    def size(self, file: str) -> int | None:
        """The bytes of a file, which may still be of no use; None if there is none. For `ask`."""
        if self._is_slow or not self._is_safe:
            return None
        try:
            return os.stat(self._folder / file, follow_symlinks=False).st_size
        except OSError:
            return None

    def read(self, files: Sequence[str]) -> list[Stored]:
        """Return the contents of these files, up to the first that is missing, damaged or not read
        in time. A damaged one is deleted; what else goes wrong may be right the next time.
        """
        give_up_at = time.monotonic() + READ_S
        tasks = [_Reading(self._folder / file) for file in files]
        found: list[Stored] = []
        is_whole = True
        for task in tasks:
            self._begin(task.run, task.future)
        for task in tasks:
            if not self._is_in_time(task.future, give_up_at, has_part=len(found) > 0):
                break
            stored = self._outcome(task)
            is_whole = is_whole and stored is not None
            if is_whole and stored is not None:
                found.append(stored)
        for task in tasks:
            task.future.cancel()
        self.counts.read_bytes += sum(stored.data.nbytes for stored in found)
        return found

    def _outcome(self, task: _Reading) -> Stored | None:
        """Return what a file has; None if it is of no use now. A damaged one is deleted."""
        try:
            return task.contents()
        except (FileNotFoundError, futures.CancelledError):  # another server has deleted it
            pass
        except Damaged as error:
            self._say("damaged", f"{task.path.name} is not used: {error}")
            with suppress(OSError):
                task.path.unlink()
        except (OSError, MemoryError, RuntimeError) as error:
            self._say("read", f"cannot be read: {error!r}")
        return None

    def ask(self, look: Callable[[], Answer]) -> Answer | None:
        """Return what `look` finds in the folder; None if that is not known in time."""
        if self._is_slow:
            return None
        found: list[Answer] = []
        future: Future[None] = Future()
        self._begin(lambda: found.append(look()), future)
        if self._is_in_time(future, time.monotonic() + READ_S, has_part=False):
            with suppress(futures.CancelledError):
                future.result()
        return found[0] if found else None

    def _begin(self, work: Callable[[], None], future: Future[None]) -> None:
        """Let a thread do what reads; the future is cancelled if there is none."""
        try:
            self._readers.submit(work, future)
        except RuntimeError as error:
            self._say("read", f"cannot be read: {error!r}")
            future.cancel()

    def _is_in_time(self, future: Future[None], give_up_at: float, *, has_part: bool) -> bool:
        """Wait for a thread that reads. A folder that gives nothing in time is not used any
        more.
        """
        left_s = max(give_up_at - time.monotonic(), 0.0)
        if future.cancelled() or futures.wait([future], left_s).done:
            return True
        future.cancel()
        self._is_slow = not has_part
        what = "gives a part" if has_part else "is not used any more"
        self._say("slow", f"reading took more than {READ_S:g} s: it {what}")
        return False

    def keep(self, wanted: dict[str, Kept], parts: CacheBytes) -> None:
        """Write by file name what is not there yet, first to last, in the background. What is there
        counts as used now. What is dropped from memory meanwhile is left out.
        """
        if self._is_slow:
            return
        if self._writer is None:
            turns = (self._write_next, "the prompt store")
            writer = Thread(target=keep_running, args=turns, name="moe-infinity-store", daemon=True)
            try:
                writer.start()
            except RuntimeError as error:
                self._say("written", f"cannot be written: {error}")
                return
            self._writer = writer
        with suppress(Full):  # the next turn offers it again
            self._queue.put_nowait((wanted, parts))

    def close(self) -> None:
        """Wait a limited time for what is to be written."""
        if self._writer is not None:
            with suppress(Full):
                self._queue.put(None, timeout=CLOSE_S)
            self._writer.join(CLOSE_S)
            self._closing.set()
            self._writer.join(1.0)
        threads.close(self._readers)

    # for the thread that writes

    def _write_next(self) -> bool:
        """Write what comes within a second. False at the end."""
        try:
            wanted = self._queue.get(timeout=1.0)
        except Empty:
            return not self._closing.is_set()
        if wanted is None or self._closing.is_set():
            return False
        with self._explaining("written"):
            self._write_those(*wanted)
        return True

    def _write_those(self, wanted: dict[str, Kept], parts: CacheBytes) -> None:
        """The last counts as used first, so that nothing is deleted before what is behind it."""
        self._require_safe()
        now_ns = time.time_ns()
        for number, (file, kept) in enumerate(wanted.items()):
            times = (now_ns - 1000 * number,) * 2
            path = self._folder / file
            data = kept.data
            if data is None or self._closing.is_set():
                return
            try:
                os.utime(path, ns=times, follow_symlinks=False)
            except FileNotFoundError:
                self._write(path, file_bytes(file, Stored(data, kept.experts, parts)), times)

    def _write(self, path: Path, data: bytes, times: tuple[int, int]) -> None:
        self._require_room(len(data))
        partial = name_beside(path)
        try:
            with os.fdopen(create_new(partial, 0o600), "wb") as opened:
                opened.write(data)
            os.utime(partial, ns=times)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        self._used_bytes += len(data)
        self._unseen_bytes += len(data)
        self.counts.written_bytes += len(data)

    def _require_room(self, num_bytes: int) -> None:
        """Delete what was used least recently if there is no room. Raises OSError if there is none
        then. Others write there, too.
        """
        if self._unseen_bytes > self._num_bytes // LOOKS:
            self._look_around(self._num_bytes)
        if self._used_bytes + num_bytes > self._most_bytes():
            self._look_around(int(EMPTIED * self._most_bytes()) - num_bytes)
            if self._used_bytes + num_bytes > self._most_bytes():
                raise OSError(errno.ENOSPC, "no room: the disk is full, or its size is small")

    def _most_bytes(self) -> int:
        """The most that all files may take: the disk may have less left than the size allows."""
        found = os.statvfs(self._folder)
        free = found.f_bavail * found.f_frsize
        return min(self._num_bytes, self._used_bytes + free - FREE_BYTES)

    def _look_around(self, most_bytes: int) -> None:
        """Find out what all files take, and delete what was used least recently beyond that."""
        files = sorted(self._files(), reverse=True)
        self._used_bytes = self._unseen_bytes = 0
        for used_s, num_bytes, path in files:
            is_left = PARTIAL_NAME.fullmatch(path.name) and time.time() - used_s > UNFINISHED_S
            if is_left or self._used_bytes + num_bytes > most_bytes:
                path.unlink(missing_ok=True)
            else:
                self._used_bytes += num_bytes

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When each file was used, its size and its path. Others' files are left alone."""
        for folder in os.scandir(self._root):
            if not FOLDER_NAME.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            with suppress(PermissionError):  # it is somebody else's
                yield from self._files_in(folder.path)

    def _files_in(self, folder: str) -> Iterator[tuple[float, int, Path]]:
        for entry in os.scandir(folder):
            if FILE_NAME.fullmatch(entry.name) or PARTIAL_NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # another server deletes, too
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield found.st_mtime, found.st_size, Path(entry.path)

    # what goes wrong

    def _require_safe(self) -> None:
        """Raise OSError unless the folder is there, or can be made, and is its user's alone."""
        try:
            make_private_folder(self._folder, num_own=1)
        except OSError:
            self._is_safe = False
            raise
        self._is_safe = True

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._say(what, f"cannot be {what}: {error}")

    def _say(self, kind: str, what: str) -> None:
        """Warn once of each kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("the prompt store %s: %s", self._root, what)


class _Reading:
    """A file that is read by a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.future: Future[None] = Future()
        self._stored: Stored | None = None

    def contents(self) -> Stored:
        """Return what was read. Raises what `run` raised."""
        self.future.result()
        assert self._stored is not None
        return self._stored

    def run(self) -> None:
        """Raises OSError, Damaged or MemoryError."""
        self._stored = read_file(self.path)
