"""Without what only Linux has, everything gives the same bits."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moe_infinity import CheckpointError, ConfigError
from moe_infinity.checkpoint import expert_loader, files
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.system import process_limits
from moe_infinity.system.files import locked, open_to_read
from moe_infinity.system.machine import (
    interrupt_main,
    keep_to_cores,
    num_cores,
    socket_timeout,
    yield_address,
)
from moe_infinity.system.memory import HUGE_PAGE_BYTES, address_of, huge_pages, map_file
from tests.checkpoint.reading import read
from tests.quantize.packed_checkpoints import everything_in, make_source, pack
from tests.system.other_systems import leave_linux

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
CONTENT = random.Random(0).randbytes(100_003)  # ends within a block


@pytest.fixture(autouse=True)
def small_files_are_treated_as_large_ones(monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 0)


@pytest.fixture
def plain(monkeypatch) -> None:
    leave_linux(monkeypatch)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(CONTENT)
    return path


def random_reads(reader: Reader, file: Path, seed: int, count: int = 50) -> bool:
    draw = random.Random(seed)
    for _ in range(count):
        offset = draw.randrange(len(CONTENT))
        size = draw.randrange(len(CONTENT) - offset + 1)
        if read(reader, file, offset, size) != CONTENT[offset : offset + size]:
            return False
    return True


# Reading


@pytest.mark.usefixtures("plain")
def test_reads_give_the_bytes_of_the_file_on_other_systems(file, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 8192)
    reader = Reader(num_threads=2)
    assert random_reads(reader, file, seed=2)
    reader.close()


@pytest.mark.parametrize("is_plain", [False, True])
def test_several_parts_are_filled_one_after_the_other(file, is_plain, monkeypatch):
    if is_plain:
        leave_linux(monkeypatch)
    opened = open_to_read(file)
    parts = [memoryview(bytearray(size)) for size in (5, 7, 11)]
    assert opened.read(parts, 13) == 23
    assert b"".join(parts) == CONTENT[13:36]
    assert opened.read(parts, len(CONTENT) - 8) == 8
    assert b"".join(parts)[:8] == CONTENT[-8:]
    opened.close()


@pytest.mark.usefixtures("plain")
def test_threads_do_not_move_each_others_position(file, monkeypatch):
    """Between the move and the read of one thread, another one has time for its own."""
    lseek = os.lseek
    pause = threading.Event()

    def slow(descriptor: int, offset: int, whence: int) -> int:
        found = lseek(descriptor, offset, whence)
        pause.wait(0.002)
        return found

    monkeypatch.setattr(os, "lseek", slow)
    reader = Reader(num_threads=1)
    with ThreadPoolExecutor(4) as pool:
        right = list(pool.map(lambda seed: random_reads(reader, file, seed, 10), range(4)))
    reader.close()
    assert right == [True] * 4


@pytest.mark.usefixtures("plain")
def test_a_file_is_not_mapped_where_a_failing_disk_would_be_a_bus_error(file):
    with file.open("rb") as opened, pytest.raises(OSError, match="does not map files"):
        map_file(opened.fileno())


# Models


def run(command: Callable[..., Any], *options: str) -> dict[str, Any]:
    outcome = command(
        "run", DEMO, "-p", "The old house", "--max-new-tokens", 12, "--json", *options
    )
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


@pytest.mark.parametrize("host_memory", ["25%", "100%"])
def test_the_demo_model_writes_the_same_on_other_systems(command, host_memory, monkeypatch):
    options = ("--host-memory", host_memory)
    here = run(command, *options)
    leave_linux(monkeypatch)
    there = run(command, *options)
    assert there["token_ids"] == here["token_ids"]
    assert "page cache" not in there["report"]["experts"]


# Memory


@pytest.mark.usefixtures("plain")
def test_memory_without_huge_pages_begins_at_one_and_is_zeroed():
    memory = huge_pages(3 * HUGE_PAGE_BYTES + 5)
    assert address_of(memory) % HUGE_PAGE_BYTES == 0
    assert len(memory) == 3 * HUGE_PAGE_BYTES + 5
    assert not any(memory[:: 4096 - 1])


# Writing


def test_packing_writes_the_same_bytes_on_other_systems(tmp_path, monkeypatch):
    source = make_source(tmp_path / "source")
    pack(source, tmp_path / "here")
    (tmp_path / "there").mkdir()  # an empty folder, which takes the name of what was written
    leave_linux(monkeypatch)
    pack(source, tmp_path / "there")
    assert everything_in(tmp_path / "there") == everything_in(tmp_path / "here")


def test_a_folder_that_somebody_else_writes_is_left_alone(tmp_path, monkeypatch):
    def no_room(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = make_source(tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", no_room)
        with pytest.raises(CheckpointError, match="disk is full"):
            pack(source, tmp_path / "out")
    left = everything_in(tmp_path)
    with (
        locked(tmp_path / "out.partial" / ".lock"),
        pytest.raises(ConfigError, match="out.partial: another process is writing it"),
    ):
        pack(source, tmp_path / "out")
    assert everything_in(tmp_path) == left
    pack(source, tmp_path / "out")
    assert not (tmp_path / "out" / ".lock").exists()


def test_a_lock_is_free_again_after_an_error(tmp_path):
    lock = tmp_path / "lock"
    with pytest.raises(KeyError), locked(lock):
        raise KeyError
    with locked(lock), pytest.raises(BlockingIOError), locked(lock):
        pass
    with locked(lock):
        pass


# Processes


@pytest.mark.parametrize("is_plain", [False, True])
def test_ctrl_c_reaches_the_main_thread_from_any_other(is_plain, monkeypatch):
    if is_plain:
        leave_linux(monkeypatch)
    thread = threading.Thread(target=interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        start_and_wait(thread)
    thread.join()


def start_and_wait(thread: threading.Thread) -> None:
    thread.start()
    for _ in range(1000):
        threading.Event().wait(0.01)


def test_a_timeout_of_a_socket_is_whole_milliseconds_on_windows(monkeypatch):
    assert len(socket_timeout(1.5)) == 16
    monkeypatch.setattr("moe_infinity.system.machine.os.name", "nt")
    assert int.from_bytes(socket_timeout(1.5)[:4], sys.byteorder) == 1500


@pytest.mark.usefixtures("plain")
def test_on_other_systems_all_cores_are_ours_and_none_is_chosen_or_yielded():
    keep_to_cores([])  # which Linux refuses
    assert num_cores() == os.cpu_count()
    assert yield_address.__wrapped__() == 0


# The seam


@pytest.mark.usefixtures("plain")
def test_on_other_systems_a_process_has_no_limits_that_are_known_and_gets_none():
    import resource

    assert process_limits.openable_files() is process_limits.lockable_bytes() is None
    before = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    process_limits.limit_memory(1 << 40)
    process_limits.limit_time(1e6)
    after = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    assert after == before


def test_no_other_module_asks_which_system_runs_it():
    asked = re.compile(
        r"sys\.platform|os\.name\b|platform\.system|os\.(preadv?|pwritev?|sched_\w+|posix_\w+"
        r"|sysconf|fork|uname|O_\w+)\b|^\s*(import|from) (fcntl|mmap|resource|msvcrt)\b"
        r"|[\"']/(proc|sys)/"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "moe_infinity").rglob("*.py"))
        if path.parent.name != "system"
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if asked.search(line)
    ]
    assert found == []
