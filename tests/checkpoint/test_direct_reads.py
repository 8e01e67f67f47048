"""Reads past the page cache: the bytes plain reads give, for any alignment; where they are refused,
fail or end early, what plain reads do."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_infinity.checkpoint import files
from moe_infinity.checkpoint.files import chunks_of
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.errors import CheckpointError
from moe_infinity.memory.slots import HostSlots
from tests.checkpoint.reading import read

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.usefixtures("without_samples"),
    pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT is Linux's"),
]
CONTENT = random.Random(0).randbytes(100_003)  # ends within a block
CHUNK_BYTES = 8192
MEMORY = HostSlots(1, 1 << 17).bytes_of(0)  # begins at a page


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)
    monkeypatch.setattr(files, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(autouse=True)
def nothing_is_cached(monkeypatch):
    """The files were just written; test_cached_reads.py is about what is cached."""
    monkeypatch.setattr(files.OpenFile, "read_if_cached", lambda file, chunk: False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(CONTENT)
    return path


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def of_direct(monkeypatch, act):
    """`act(buffers, offset)` in the place of every direct read; None means: as usual."""
    preadv = os.preadv

    def patched(descriptor, buffers, offset, *flags):
        found = act(buffers, offset) if is_direct(descriptor) else None
        return preadv(descriptor, buffers, offset, *flags) if found is None else found

    monkeypatch.setattr(os, "preadv", patched)


sizes = st.one_of(st.integers(0, 20_000), st.sampled_from([512, 4096, 8192, 12288, 16384]))
places = st.one_of(st.integers(0, 9000), st.sampled_from([0, 8, 64, 512, 4096, 8192]))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(places, sizes, places), min_size=1, max_size=4), st.randoms())
def test_every_alignment_gives_the_bytes_of_a_plain_read(reader, file, wanted, rng):
    """(gap in the file, size, gap in memory) of each; neighbours where the gap is 0."""
    memory = MEMORY
    memory[:] = bytes(len(memory))
    pieces, expected, offset, start = [], bytearray(len(memory)), 0, 0
    for gap, size, shift in wanted:
        offset, start = offset + gap, start + shift
        size = min(size, len(CONTENT) - offset)
        pieces.append((Extent(file, offset, size), memory[start : start + size]))
        expected[start : start + size] = CONTENT[offset : offset + size]
        offset, start = offset + size, start + size
    rng.shuffle(pieces)
    reader.read(pieces)
    assert memory == expected


def test_neighbours_are_read_together_wherever_they_go(file):
    first, second, third = memoryview(bytearray(100)), memoryview(bytearray(50)), bytearray(10)
    found = chunks_of(
        [
            (Extent(file, 500, 10), memoryview(third)),
            (Extent(file, 300, 50), second),
            (Extent(file, 200, 100), first),
        ]
    )
    assert [(chunk.offset, chunk.parts) for chunk in found] == [
        (200, [first, second]),
        (500, [third]),
    ]


def test_what_is_aligned_is_read_in_place_and_past_the_page_cache(reader, file, monkeypatch):
    slot = HostSlots(1, CHUNK_BYTES * 2).bytes_of(0)
    in_place = []
    of_direct(monkeypatch, lambda buffers, offset: in_place.append(buffers[0].obj is slot.obj))
    reader.read_into(Extent(file, CHUNK_BYTES, CHUNK_BYTES * 2), slot)
    assert in_place == [True, True]
    reader.read_into(Extent(file, 8, CHUNK_BYTES), slot[:CHUNK_BYTES])
    assert in_place[2:] == [False, False]


def test_a_disk_error_names_file_and_byte_and_is_not_for_ever(reader, file, monkeypatch):
    def fail(buffers, offset):
        if offset <= 50_000 < offset + CHUNK_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        of_direct(patch, fail)
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))}.*49152.*Input/output"):
            read(reader, file, 100, 90_000)
    assert reader.bytes_read == 0
    assert read(reader, file, 100, 90_000) == CONTENT[100:90_100]


@pytest.mark.parametrize("num_bytes", [0, 7, 512, 4096])
def test_a_direct_read_that_gives_few_bytes_is_completed(reader, file, monkeypatch, num_bytes):
    preadv = os.preadv

    def patched(descriptor, buffers, offset, *flags):
        if not is_direct(descriptor):
            return preadv(descriptor, buffers, offset, *flags)
        few = CONTENT[offset : offset + num_bytes]
        buffers[0][: len(few)] = few
        return len(few)

    monkeypatch.setattr(os, "preadv", patched)
    assert read(reader, file, 10, 30_000) == CONTENT[10:30_010]
    assert read(reader, file, 8192, 8192) == CONTENT[8192:16384]


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    reader, file, monkeypatch, refused
):
    original, refusals = getattr(os, refused), []

    def patched(first, *args, **kwargs):
        if args[0] & os.O_DIRECT if refused == "open" else is_direct(first):
            refusals.append(first)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(first, *args, **kwargs)

    monkeypatch.setattr(os, refused, patched)
    assert read(reader, file, 5, 70_000) == CONTENT[5:70_005]
    seen = len(refusals)
    assert seen
    assert read(reader, file, 0, 70_000) == CONTENT[:70_000]
    assert len(refusals) == seen, "asked once"


@pytest.mark.parametrize("length", [0, 100, 4096, 50_000])
def test_a_file_truncated_while_in_use_is_named_with_its_size(reader, file, length):
    read(reader, file, 0, 4)
    os.truncate(file, length)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))}: was changed .* {length} "):
        read(reader, file, max(length - 50, 0), 100)
    file.write_bytes(CONTENT)
    assert read(reader, file, 60_000, 40_003) == CONTENT[60_000:]


def test_a_file_that_vanished_is_named_and_reads_once_it_is_back(reader, file):
    moved = file.rename(file.with_suffix(".away"))
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        read(reader, file, 0, 50_000)
    moved.rename(file)
    assert read(reader, file, 0, 50_000) == CONTENT[:50_000]


def test_after_an_error_nothing_is_written_any_more(file, monkeypatch):
    """The slot belongs to another expert as soon as the read has failed."""
    reader, begun, go_on = Reader(num_threads=4), threading.Event(), threading.Event()

    def act(buffers, offset):
        if offset == 0:
            assert begun.wait(10)
            threading.Timer(0.1, go_on.set).start()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        begun.set()
        assert go_on.wait(10)

    of_direct(monkeypatch, act)
    memory = bytearray(80_000)
    with pytest.raises(CheckpointError):
        reader.read_into(Extent(file, 0, len(memory)), memoryview(memory))
    assert go_on.is_set(), "the reads that had begun were waited for"
    after = bytes(memory)
    reader.close()
    assert memory == after
    assert CONTENT[70_000:80_000] not in after, "what had not begun was dropped"


def test_threads_reading_and_a_close_in_between_do_not_disturb_each_other(file):
    reader, is_over = Reader(num_threads=2), threading.Event()

    def some_reads(seed: int) -> bool:
        rng = random.Random(seed)
        for _ in range(100):
            offset = rng.randrange(60_000)
            size = rng.randrange(40_000)
            if read(reader, file, offset, size) != CONTENT[offset : offset + size]:
                return False
        return True

    def close_again_and_again() -> None:
        while not is_over.is_set():
            reader.close()

    closing = threading.Thread(target=close_again_and_again)
    closing.start()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(some_reads, range(3)))
    is_over.set()
    closing.join()
    reader.close()
    assert found == [True] * 3
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert str(file) not in [os.readlink(path) for path in paths if os.path.exists(path)]


def test_no_thread_to_be_had_is_no_reason_to_fail(reader, file, monkeypatch):
    def no_thread(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", no_thread)
    assert read(reader, file, 3, 70_000) == CONTENT[3:70_003]


def test_a_read_that_gives_way_goes_on_when_the_others_are_done(reader, file, monkeypatch):
    order = []
    ahead_begun, urgent_begun, go_on = (threading.Event() for _ in range(3))

    def act(buffers, offset):
        order.append(offset)
        if offset == 81920:
            urgent_begun.set()
            assert go_on.wait(10)
        elif offset == 0:
            ahead_begun.set()
            assert urgent_begun.wait(10)
            threading.Timer(0.1, go_on.set).start()

    of_direct(monkeypatch, act)

    def ahead() -> bytes:
        with reader.giving_way():
            return read(reader, file, 0, 3 * CHUNK_BYTES)

    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(ahead)
        assert ahead_begun.wait(10)
        urgent = pool.submit(read, reader, file, 10 * CHUNK_BYTES, 2 * CHUNK_BYTES)
        assert urgent.result() == CONTENT[81920 : 81920 + 2 * CHUNK_BYTES]
        assert late.result() == CONTENT[: 3 * CHUNK_BYTES]
    assert order.index(8192) > order.index(90112), "one chunk had begun, the next one waited"


def test_a_read_that_gives_way_goes_first_once_somebody_waits_for_it(reader, file, monkeypatch):
    """The others may go on for as long as a prompt."""
    is_wanted, others_may_end = threading.Event(), threading.Event()

    def act(buffers, offset):
        if offset == 81920:
            assert others_may_end.wait(10)

    of_direct(monkeypatch, act)

    def ahead() -> bytes:
        with reader.giving_way(until=is_wanted.is_set):
            return read(reader, file, 0, 3 * CHUNK_BYTES)

    with ThreadPoolExecutor(2) as pool:
        urgent = pool.submit(read, reader, file, 10 * CHUNK_BYTES, 100)
        late = pool.submit(ahead)
        while not reader._num_urgent:
            pass
        threading.Timer(0.1, is_wanted.set).start()
        assert late.result(10) == CONTENT[: 3 * CHUNK_BYTES]
        assert not urgent.done()
        others_may_end.set()
        assert urgent.result() == CONTENT[81920:82020]
