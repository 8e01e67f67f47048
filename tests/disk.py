"""A disk that does what a test says before every read: fail, wait, send a signal."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from moe_infinity.checkpoint import shared_reads
from moe_infinity.system import linux
from tests import plain_chunk_reads

KINDS = ("demand", "prefetch", "preload")


class Read(NamedTuple):
    kind: str  # what it is for, one of KINDS: a layer waits for it, or may later
    number: int  # of its kind, from 0 on
    offset: int


class Disk:
    """Stands in the place of `os.preadv`; reads as usual until `act` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.act: Callable[[Read], object] = lambda read: None
        self.after: Callable[[], object] = lambda: None  # called after every read
        self.failed: list[Read] = []
        self._preadv = os.preadv
        self._count_anew()
        monkeypatch.setattr(os, "preadv", self._read)
        monkeypatch.setattr(linux, "is_cached", lambda *where: False)  # all reads are the disk's
        monkeypatch.setattr(shared_reads, "read_group", plain_chunk_reads.read_group)

    def fail(self, which: Callable[[Read], bool]) -> None:
        """These reads end in an error of the disk."""
        self._count_anew()

        def act(read: Read) -> None:
            if which(read):
                self.failed.append(read)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.act = act

    def mend(self) -> None:
        self.act = lambda read: None

    def _count_anew(self) -> None:
        self._numbers = {kind: itertools.count() for kind in KINDS}

    def _read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        thread = threading.current_thread().name
        kind = next((kind for kind in KINDS if f"moe-infinity-{kind}" in thread), "demand")
        self.act(Read(kind, next(self._numbers[kind]), offset))
        count = self._preadv(descriptor, buffers, offset)
        self.after()
        return count
