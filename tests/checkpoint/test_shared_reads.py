"""Reads that threads do together: the bytes of the file, whatever lies where; what goes wrong ends
in the error that a read alone gives; what is stopped is cancelled."""

from __future__ import annotations

import os
import random
import re
import sys
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_infinity import MoE
from moe_infinity.checkpoint import files, shared_reads
from moe_infinity.checkpoint.files import BLOCK_BYTES, cut
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.shared_reads import SharedRead
from moe_infinity.errors import CheckpointError
from moe_infinity.kernels.cpu import chunk_reads
from moe_infinity.memory.slots import HostSlots
from moe_infinity.system import linux
from tests import plain_chunk_reads

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("without_samples"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux reads past the page cache"),
]
CONTENT = random.Random(0).randbytes(100_003)  # ends within a block
CHUNK_BYTES = 8192
NUM_SLOTS = 3
SLOT_BYTES = 1 << 17
SLOTS = HostSlots(NUM_SLOTS, SLOT_BYTES)


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)
    monkeypatch.setattr(files, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(params=["machine code", "reference"], autouse=True)
def way(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(shared_reads, "read_group", plain_chunk_reads.read_group)


@pytest.fixture(params=["cached", "not cached"])
def file(request, tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(CONTENT)
    if request.param == "not cached":
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.fixture
def reader():
    reader = Reader()
    yield reader
    reader.close()


def share(reader, experts):
    """A read of experts, each a list of (extent, place in its slot); None if there can be none."""
    slots = [partial(SLOTS.bytes_of, index) for index in range(len(experts))]
    return reader.shared(list(zip(map(cut, experts), slots, strict=True)))


def work(shared: SharedRead, num_threads: int) -> None:
    threads = [Thread(target=shared.work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


sizes = st.one_of(st.integers(1, 20_000), st.sampled_from([512, 4096, 8192, 12288, 16384]))
places = st.one_of(st.integers(0, 60_000), st.sampled_from([0, 8, 64, 512, 4096, 8192]))
copies = st.lists(st.tuples(places, sizes), min_size=1, max_size=4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    experts=st.lists(copies, min_size=1, max_size=NUM_SLOTS),
    shift=st.sampled_from([0, 1, 512, 4096]),
    num_threads=st.integers(1, 4),
)
def test_every_byte_comes_where_it_goes_and_none_elsewhere(
    reader, file, experts, shift, num_threads
):
    wanted = []
    groups = []
    for index, places_of in enumerate(experts):
        slot = SLOTS.bytes_of(index)
        slot[:] = expected = bytearray(b"\xaa" * SLOT_BYTES)
        at = shift
        group = []
        for offset, num_bytes in places_of:
            group.append((Extent(file, offset, num_bytes), at))
            expected[at : at + num_bytes] = CONTENT[offset : offset + num_bytes]
            at += num_bytes + (offset % 3) * 100  # some follow each other at once
        groups.append(group)
        wanted.append(expected)
    shared = share(reader, groups)
    work(shared, num_threads)
    assert [future.result(0) for future in shared.futures] == [None] * len(groups)
    for index, expected in enumerate(wanted):
        assert SLOTS.bytes_of(index) == expected


@given(copies, st.booleans(), st.randoms())
def test_chunks_are_what_was_asked_for_of_about_one_size(places_of, are_neighbours, rng):
    at = 0
    asked = []
    for offset, num_bytes in places_of:
        offset = at if are_neighbours else offset
        asked.append((Extent(Path("a"), offset, num_bytes), at))
        at += num_bytes
    rng.shuffle(asked)  # a recipe names down_proj last, wherever it is
    chunks = cut(asked)
    assert sorted(byte for extent, to in chunks for byte in bytes_of(extent, to)) == sorted(
        byte for extent, to in asked for byte in bytes_of(extent, to)
    )
    begins = {to for _, to in asked}
    assert all(extent.offset % BLOCK_BYTES == 0 for extent, to in chunks if to not in begins)
    assert max(extent.num_bytes for extent, _ in chunks) <= CHUNK_BYTES + BLOCK_BYTES
    if are_neighbours:
        assert len(chunks) == -(-at // CHUNK_BYTES)
        assert chunks == sorted(chunks, key=lambda chunk: chunk[0].offset)


def bytes_of(extent: Extent, at: int) -> list[tuple[int, int]]:
    return [(extent.offset + k, at + k) for k in range(extent.num_bytes)]


def test_a_truncated_file_is_an_error_that_says_where_and_others_arrive(reader, file):
    shared = share(reader, [[(Extent(file, 90_000, 20_000), 0)], [(Extent(file, 0, 9000), 0)]])
    work(shared, 2)
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: ends before byte 1")):
        shared.futures[0].result(0)
    assert shared.futures[1].result(0) is None
    assert SLOTS.bytes_of(1)[:9000] == CONTENT[:9000]


def test_a_file_that_is_written_to_meanwhile_is_noticed(reader, file):
    shared = share(reader, [[(Extent(file, 5000, 9000), 0)]])
    file.write_bytes(CONTENT + b"more")
    work(shared, 1)
    with pytest.raises(CheckpointError, match="was changed while in use"):
        shared.futures[0].result(0)


def test_what_is_stopped_before_it_begins_is_cancelled(reader, file):
    SLOTS.bytes_of(0)[:4] = b"\xaa" * 4
    shared = share(reader, [[(Extent(file, 0, 9000), 0)]])
    shared.stop()
    work(shared, 3)
    assert isinstance(shared.futures[0].exception(0), CancelledError)
    assert SLOTS.bytes_of(0)[:4] == b"\xaa" * 4


def test_what_is_stopped_midway_ends_in_every_future(reader, file, monkeypatch):
    taken = []
    read_group = chunk_reads.read_group

    def stopping(table: int, scratch: int) -> int:
        taken.append(found := read_group(table, scratch))
        shared.stop()
        return found

    monkeypatch.setattr(shared_reads, "read_group", stopping)
    shared = share(reader, [[(Extent(file, 5000 * k, 4096), 0)] for k in range(NUM_SLOTS)])
    work(shared, 1)
    assert taken == [0, -1]
    assert shared.futures[0].result(0) is None
    assert all(isinstance(f.exception(0), CancelledError) for f in shared.futures[1:])


def test_a_future_that_was_cancelled_stays_so(reader, file):
    shared = share(reader, [[(Extent(file, 0, 9000), 0)]])
    assert shared.futures[0].cancel()
    shared.stop()
    work(shared, 1)
    assert shared.futures[0].cancelled()


def test_a_slot_that_cannot_be_had_is_the_error_of_all(reader, file):
    def none():
        raise RuntimeError("no slot")

    shared = reader.shared([([(Extent(file, 0, 9000), 0)], none)])
    work(shared, 2)
    with pytest.raises(RuntimeError, match="no slot"):
        shared.futures[0].result(0)


def test_a_thread_without_a_buffer_takes_no_part_and_others_stop_as_usual(
    reader, file, monkeypatch
):
    def none():
        raise MemoryError

    experts = [[(Extent(file, 0, 9000), 0)]]
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_bounce_buffer", none)
        without = share(reader, experts)
    with pytest.raises(MemoryError):
        without.work()
    monkeypatch.setattr(without, "_bounce_buffer", reader._bounce_buffer)
    without.stop()
    work(without, 1)
    assert isinstance(without.futures[0].exception(0), CancelledError)


@pytest.mark.parametrize("why", ["another system", "a small file", "no such reads", "no file"])
def test_reads_that_cannot_be_shared_are_left_to_the_reader(reader, file, monkeypatch, why):
    if why == "another system":
        monkeypatch.setattr(linux, "is_linux", lambda: False)
    if why == "a small file":
        monkeypatch.setattr(files, "SMALL_FILE_BYTES", 1 << 20)
    if why == "no such reads":
        monkeypatch.setattr(files, "open_past_cache", lambda path: None)
    if why == "no file":
        file.unlink()
    assert share(reader, [[(Extent(file, 0, 9000), 0)]]) is None


def test_layers_read_together_and_give_the_same_tokens(tiny_checkpoint, monkeypatch):
    def tokens(**options) -> list[int]:
        with MoE(tiny_checkpoint, prefetch=False, preload="off", **options) as moe:
            ids = moe.generate(input_ids, max_new_tokens=12, do_sample=False)
            moe.check_invariants()
        return ids.tolist()

    input_ids = torch.tensor([[5, 6, 9, 11, 3]])
    expected = tokens(host_memory="100%")
    num_shared: list[int] = []
    init = SharedRead.__init__

    def counted(shared, experts, *args, **kwargs):
        num_shared.append(len(experts))
        init(shared, experts, *args, **kwargs)

    monkeypatch.setattr(SharedRead, "__init__", counted)
    assert tokens(host_memory="25%") == expected
    assert max(num_shared) > 1
