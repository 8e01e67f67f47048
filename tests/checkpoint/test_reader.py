"""Positional reads: all bytes or an error that names the file; usable again after an error."""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_infinity.checkpoint.file_state import NUM_SAMPLES, SAMPLE_BYTES, fingerprint_of
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.errors import CheckpointError, LoadTimeout
from tests.checkpoint.reading import read

CONTENT = bytes(range(256)) * 16


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(CONTENT)
    return path


def open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def test_a_read_gives_the_bytes_of_its_extent(reader, file):
    assert read(reader, file, 300, 1000) == CONTENT[300:1300]
    assert read(reader, file, len(CONTENT) - 1, 1) == CONTENT[-1:]
    assert read(reader, file, 7, 0) == b""


def test_bytes_read_counts_what_was_asked_for(reader, file):
    read(reader, file, 0, 100)
    read(reader, file, 50, 100)
    assert reader.bytes_read == 200


def test_a_kernel_that_gives_few_bytes_at_a_time_is_asked_again(reader, file, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset)
    )
    assert read(reader, file, 10, 100) == CONTENT[10:110]


def test_threads_reading_one_file_do_not_disturb_each_other(reader, file):
    extents = [(start, 97) for start in range(0, 3900, 13)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda extent: read(reader, file, *extent), extents))
    assert found == [CONTENT[start : start + size] for start, size in extents]
    assert reader.bytes_read == 97 * len(extents)


def test_a_file_that_ends_too_early_is_named_and_reads_again_once_restored(reader, file):
    read(reader, file, 0, 4)
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))}.*100"):
        read(reader, file, 90, 20)
    file.write_bytes(CONTENT)
    assert read(reader, file, 90, 20) == CONTENT[90:110]


def test_a_file_restored_by_another_of_its_name_reads_again(reader, file):
    """As a download or `cp --remove-destination` restores it: the name has a new inode."""
    read(reader, file, 0, 4)
    os.truncate(file, 100)
    with pytest.raises(CheckpointError):
        read(reader, file, 90, 20)
    restored = file.with_suffix(".new")
    restored.write_bytes(CONTENT)
    restored.replace(file)
    assert read(reader, file, 90, 20) == CONTENT[90:110]


def test_an_error_of_the_disk_names_file_and_byte_and_is_not_for_ever(reader, file, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))}.*50.*Input/output"):
            read(reader, file, 50, 10)
    assert read(reader, file, 50, 10) == CONTENT[50:60]


def test_a_file_that_vanished_is_named_and_reads_once_it_is_back(reader, file):
    moved = file.rename(file.with_suffix(".away"))
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        read(reader, file, 0, 10)
    moved.rename(file)
    assert read(reader, file, 0, 10) == CONTENT[:10]


def test_a_failed_read_is_not_counted(reader, file):
    with pytest.raises(CheckpointError):
        read(reader, file, len(CONTENT) - 5, 10)
    assert reader.bytes_read == 0


def test_close_leaves_no_file_open_and_may_come_twice(reader, file):
    read(reader, file, 0, 4)
    assert str(file) in open_files()
    reader.close()
    reader.close()
    assert str(file) not in open_files()


# Files that were changed


def rewrite(file: Path, data: bytes) -> None:
    """At another time, as the file system counts it, than ever before."""
    changed_ns = file.stat().st_mtime_ns + 10**9
    file.write_bytes(data)
    os.utime(file, ns=(changed_ns, changed_ns))


def test_garbage_between_the_samples_of_a_small_file_is_noticed_until_it_is_right(reader, tmp_path):
    """An earlier version accepted it: the file had its size, and its samples were right."""
    file, num_bytes = tmp_path / "file", 1 << 20
    whole = random.Random(0).randbytes(num_bytes)
    file.write_bytes(whole)
    read(reader, file, 0, 4)
    garbage = bytearray(whole)
    start = 5 * num_bytes // NUM_SAMPLES + SAMPLE_BYTES
    garbage[start : start + SAMPLE_BYTES] = bytes(SAMPLE_BYTES)
    rewrite(file, bytes(garbage))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="changed while in use: it holds other bytes"):
            read(reader, file, 0, 4)
    rewrite(file, whole)
    assert read(reader, file, 0, num_bytes) == whole


@pytest.mark.parametrize("num_bytes", [600_000, 1_000_001, 3 << 20])
def test_no_byte_of_a_small_file_is_left_out(num_bytes):
    data = bytearray(random.Random(0).randbytes(num_bytes))

    def samples() -> str:
        def copy(offset: int, to: memoryview) -> None:
            to[:] = data[offset : offset + to.nbytes]

        return fingerprint_of(num_bytes, copy).samples

    whole = samples()
    for place in (5000, num_bytes // 2 + 7000, num_bytes - 1):
        data[place] ^= 1
        assert samples() != whole
        data[place] ^= 1
    assert samples() == whole


def test_a_change_that_was_not_known_counts_even_if_the_file_is_right_again(reader, file):
    try:
        reader.mapped(Extent(file, 0, 10))
    except OSError as error:
        pytest.skip(f"this system cannot map files: {error}")
    num_known = reader.map_changed()
    assert reader.changed_file(num_known) is None
    rewrite(file, CONTENT)
    assert reader.changed_file() == reader.changed_file(num_known) == file
    num_now = reader.map_changed()
    assert reader.changed_file() is None
    assert reader.changed_file(num_known) == file
    assert reader.changed_file(num_now) is None


def test_bytes_that_do_not_come_in_time_are_an_error(reader, file, monkeypatch):
    """The thread that waits for them is left alone."""
    extent = Extent(file, 0, 4)
    found = bytearray(4)
    reader.read_in_time([(extent, memoryview(found))], 30)
    assert bytes(found) == CONTENT[:4]
    with pytest.raises(CheckpointError, match="cannot be read"):
        reader.read_in_time([(Extent(file / "x", 0, 4), memoryview(found))], 30)
    hangs = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(reader, "read", lambda pieces: hangs.wait(30))
        with pytest.raises(LoadTimeout, match=f"{file.name}: no bytes of it came"):
            reader.read_in_time([(extent, memoryview(found))], 0.1)
        hangs.set()
    reader.close()
    reader.read_in_time([(extent, memoryview(found))], 30)  # as `read` does
