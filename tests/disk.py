"""A disk that does what a test says before every read: fail, wait, send a signal."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from moe_infinity.system import linux


class Read(NamedTuple):
    is_ahead: bool  # by the thread that prefetches
    number: int  # of its kind, from 0 on
    offset: int


class Disk:
    """Stands in the place of `os.preadv`; reads as usual until `act` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.act: Callable[[Read], object] = lambda read: None
        self.failed: list[Read] = []
        self._preadv = os.preadv
        self._numbers = {is_ahead: itertools.count() for is_ahead in (False, True)}
        monkeypatch.setattr(os, "preadv", self._read)
        monkeypatch.setattr(linux, "is_cached", lambda *where: False)  # all reads are the disk's

    def fail(self, which: Callable[[Read], bool]) -> None:
        """These reads end in an error of the disk."""
        self._numbers = {is_ahead: itertools.count() for is_ahead in (False, True)}

        def act(read: Read) -> None:
            if which(read):
                self.failed.append(read)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.act = act

    def mend(self) -> None:
        self.act = lambda read: None

    def _read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        is_ahead = threading.current_thread().name.startswith("moe-infinity-prefetch")
        self.act(Read(is_ahead, next(self._numbers[is_ahead]), offset))
        return self._preadv(descriptor, buffers, offset)
