"""What we read leaves the page cache to other programs."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import sys
from pathlib import Path

import pytest

from moe_infinity.checkpoint import files
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.memory.slots import HostSlots

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it keeps")
FILE_BYTES = 4 << 20
PIECES = [(0, 2 << 20), (2 << 20, 1 << 20), ((3 << 20) + 7, 1000), (FILE_BYTES - 50_001, 50_001)]


def cached_bytes(file: Path) -> int:
    """Of this file in the page cache."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (mapped.size() // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(mapped.size()), pages
        )
        del start
        assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def file(tmp_path) -> Path:
    """On the disk only."""
    path = tmp_path / "shard.safetensors"
    path.write_bytes(random.Random(0).randbytes(FILE_BYTES))
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip("this file system keeps its files in memory")
    return path


def read_pieces(file: Path) -> None:
    """In place, and by way of a bounce buffer."""
    reader, slot = Reader(num_threads=2), HostSlots(1, 2 << 20).bytes_of(0)
    for offset, num_bytes in PIECES:
        reader.read_into(Extent(file, offset, num_bytes), slot[:num_bytes])
    reader.close()


def test_large_files_are_read_past_the_page_cache(file, monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)
    read_pieces(file)
    assert cached_bytes(file) == 0


def test_where_that_is_refused_pages_are_given_back(file, monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)
    os_open = os.open

    def without_direct(path: Path, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os_open(path, flags, *args)

    monkeypatch.setattr(os, "open", without_direct)
    given_back: set[int] = set()
    advise = os.posix_fadvise

    def noted(descriptor: int, offset: int, num_bytes: int, advice: int) -> None:
        """Linux keeps pages that it reads ahead at that moment: what stays is a matter of luck."""
        if advice == os.POSIX_FADV_DONTNEED:
            given_back.update(range(offset, offset + num_bytes))
        advise(descriptor, offset, num_bytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    read_pieces(file)
    for offset, num_bytes in PIECES:
        assert given_back.issuperset(range(offset, offset + num_bytes)), offset
    assert cached_bytes(file) < FILE_BYTES, "Linux has followed some of the advice"


def test_small_files_stay_in_the_page_cache(file):
    read_pieces(file)
    assert cached_bytes(file) >= 3 << 20
