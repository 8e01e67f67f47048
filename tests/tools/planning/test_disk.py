"""The disk's rate is measured past the page cache, within its time, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections import namedtuple

import pytest

from moe_infinity.checkpoint.files import SMALL_FILE_BYTES, OpenFile
from moe_infinity.errors import CheckpointError
from moe_infinity.memory import threads
from moe_infinity.tools.planning import disk
from moe_infinity.tools.planning.disk import measure_disk
from tests.disk import Disk

SECONDS = 0.05


@pytest.fixture
def weights(tmp_path):
    """A file without content, large enough to be read past the page cache."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(SMALL_FILE_BYTES)
    return path


@pytest.fixture
def small_temporary_file(monkeypatch):
    monkeypatch.setattr(disk, "TEMPORARY_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 18)


def test_a_file_and_its_folder_have_a_rate(weights):
    assert measure_disk(weights, SECONDS) > 0
    assert measure_disk(weights.parent, SECONDS, read_bytes=100_000) > 0


def test_reads_are_spread_over_the_file_as_many_at_once_as_the_engine_has(weights, monkeypatch):
    seen = set()
    at_once = threading.Barrier(4)

    def act(read):
        seen.add(read.offset)
        if len(seen) <= 4:
            at_once.wait(timeout=60)

    Disk(monkeypatch).act = act
    measure_disk(weights, 0.5)
    assert max(seen) - min(seen) > SMALL_FILE_BYTES // 4


def test_a_folder_without_weights_gets_a_temporary_file_that_is_gone_afterwards(
    tmp_path, small_temporary_file
):
    assert measure_disk(tmp_path, SECONDS) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_busy_machine_whose_threads_begin_late_reads_once(weights):
    assert measure_disk(weights, 0.0) > 0


def test_a_folder_without_room_for_the_temporary_file_is_an_error(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(CheckpointError, match=r"1.0 MiB free, .* needs 512.0 MiB\nhint"):
        measure_disk(tmp_path)


def test_a_folder_that_may_not_be_written_is_an_error(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(CheckpointError, match="cannot be measured: Read-only file system"):
        measure_disk(tmp_path)


def test_a_small_file_and_a_path_of_nothing_are_errors(tmp_path):
    small = tmp_path / "config.json"
    small.write_text("{}")
    for path in (small, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=path.name):
            measure_disk(path)


def test_an_error_of_the_disk_names_the_path(weights, monkeypatch):
    Disk(monkeypatch).fail(lambda read: True)
    with pytest.raises(CheckpointError, match=r"model.safetensors.* Input/output error"):
        measure_disk(weights, SECONDS)


def test_a_disk_that_does_not_answer_is_given_up(weights, monkeypatch):
    mended = threading.Event()
    monkeypatch.setattr(disk, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.1)
    Disk(monkeypatch).act = lambda read: mended.wait(60)
    try:
        with pytest.raises(CheckpointError, match="did not answer"):
            measure_disk(weights, SECONDS)
    finally:
        mended.set()


def test_where_reads_past_the_cache_are_refused_the_cache_is_emptied_before_each(
    weights, monkeypatch
):
    order = []

    def read(self, chunk):
        order.append("read")
        return chunk.num_bytes

    monkeypatch.setattr(OpenFile, "read_direct", lambda self, chunk, buffer: 0)
    monkeypatch.setattr(OpenFile, "forget", lambda self, chunk: order.append("forget"))
    monkeypatch.setattr(OpenFile, "read_cached", read)
    monkeypatch.setattr(disk, "NUM_READ_THREADS", 1)
    measure_disk(weights, SECONDS)
    assert order[:4] == ["forget", "read"] * 2
