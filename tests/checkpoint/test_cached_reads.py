"""Chunks that the page cache has are copied from there and stay there; others are read past it."""

from __future__ import annotations

import errno
import os
import random
import sys
from pathlib import Path

import pytest

from moe_infinity.checkpoint import files
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.errors import CheckpointError
from moe_infinity.memory.slots import HostSlots
from moe_infinity.system import linux
from tests.checkpoint.test_page_cache import cached_bytes

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.usefixtures("without_samples"),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it keeps"),
]
FILE_BYTES = (4 << 20) + 1234
CONTENT = random.Random(0).randbytes(FILE_BYTES)


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)


@pytest.fixture
def file(tmp_path) -> Path:
    """On the disk only."""
    path = tmp_path / "shard.safetensors"
    path.write_bytes(CONTENT)
    drop(path, 0, 0)
    with path.open("rb") as opened:
        try:
            linux.is_cached(opened.fileno(), 0, 1)
        except OSError as error:
            pytest.skip(f"this kernel does not say what is cached: {error}")
    if cached_bytes(path):
        pytest.skip("this file system keeps its files in memory")
    return path


def drop(path: Path, offset: int, num_bytes: int) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    assert path.read_bytes() == CONTENT


class Disk:
    """Counts bytes that come from the page cache, and those that do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached = self.read = self.asked = 0
        self.refusal: int | None = None  # to say what is cached
        self._preadv = os.preadv
        self._is_cached = linux.is_cached
        monkeypatch.setattr(os, "preadv", self._count)
        monkeypatch.setattr(linux, "is_cached", self._ask)

    def _count(self, descriptor, buffers, offset, flags=0) -> int:
        count = self._preadv(descriptor, buffers, offset, flags)
        if flags:
            self.cached += count
        else:
            self.read += count
        return count

    def _ask(self, descriptor, offset, num_bytes) -> bool:
        self.asked += 1
        if self.refusal is not None:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return self._is_cached(descriptor, offset, num_bytes)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


SLOT = HostSlots(1, 8 << 20).bytes_of(0)


def read(reader: Reader, file: Path, offset: int, num_bytes: int, shift: int = 0) -> None:
    """Into memory that begins `shift` bytes after a page, and compare."""
    destination = SLOT[shift : shift + num_bytes]
    destination[:] = bytes(num_bytes)
    reader.read_into(Extent(file, offset, num_bytes), destination)
    assert destination == CONTENT[offset : offset + num_bytes]


def test_what_is_cached_is_not_read_from_the_disk_and_stays_cached(reader, file, disk):
    fill_cache(file)
    before = cached_bytes(file)
    read(reader, file, 0, FILE_BYTES)
    read(reader, file, 777, 3 << 20, shift=5)
    assert disk.read == 0
    assert cached_bytes(file) == before


def test_what_is_not_cached_is_read_past_the_cache(reader, file, disk):
    read(reader, file, 0, 4 << 20)
    assert (disk.cached, disk.read) == (0, 4 << 20)
    assert cached_bytes(file) == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_gives_the_bytes_of_the_file(reader, file, seed):
    draw = random.Random(seed)
    fill_cache(file)
    for _ in range(draw.randint(1, 6)):
        drop(file, draw.randrange(0, FILE_BYTES), draw.randrange(4096, 1 << 20))
    kept = cached_bytes(file)
    assert 0 < kept < FILE_BYTES
    for _ in range(20):
        offset = draw.choice([draw.randrange(FILE_BYTES), draw.randrange(1024) * 4096])
        num_bytes = draw.randrange(1, FILE_BYTES - offset + 1)
        read(reader, file, offset, num_bytes, shift=draw.choice([0, 0, 8, 4096]))
    assert cached_bytes(file) == kept


def test_a_chunk_that_is_cached_is_copied_and_its_neighbour_read(reader, file, disk):
    fill_cache(file)
    drop(file, 1536 << 10, 0)
    read(reader, file, 0, 3 << 20)
    assert (disk.cached, disk.read) == (1 << 20, 2 << 20)


def test_a_chunk_evicted_meanwhile_is_read(reader, file, disk, monkeypatch):
    monkeypatch.setattr(linux, "is_cached", lambda *args: True)
    read(reader, file, 0, 1 << 20)
    assert disk.read == 1 << 20


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
def test_a_kernel_or_file_system_that_does_not_say_is_asked_once(file, disk, refusal):
    disk.refusal = refusal
    with_one_thread = Reader(num_threads=1)
    fill_cache(file)
    for _ in range(2):
        read(with_one_thread, file, 0, 4 << 20)
    assert (disk.asked, disk.cached, disk.read) == (1, 0, 8 << 20)
    with_one_thread.close()


def test_an_error_of_the_question_names_the_file(reader, file, disk):
    disk.refusal = errno.EIO
    with pytest.raises(CheckpointError, match="shard.safetensors.*Input/output"):
        read(reader, file, 0, 4 << 20)
    disk.refusal = None
    read(reader, file, 0, 4 << 20)


def test_a_small_file_is_not_asked_for(reader, file, disk, monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", FILE_BYTES + 1)
    read(reader, file, 0, 4 << 20)
    assert disk.asked == 0


def test_two_readers_of_one_file_share_what_is_cached(file, disk):
    fill_cache(file)
    for reader in (Reader(num_threads=2), Reader(num_threads=2)):
        read(reader, file, 0, FILE_BYTES)
        reader.close()
    assert disk.read == 0
