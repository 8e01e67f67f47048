"""Reads that fail during generation, demand loads and prefetches, through the page cache and past
it: an error that names file and byte, and afterwards the same model gives the tokens of a run that
nothing disturbed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_infinity import CheckpointError, LoadTimeout, MoE
from moe_infinity.checkpoint import files
from moe_infinity.checkpoint.files import BLOCK_BYTES
from moe_infinity.memory import mover as mover_module
from moe_infinity.memory import threads as threads_module
from tests.disk import Disk, Read

pytestmark = [pytest.mark.timeout(60), pytest.mark.sample(3)]
INPUTS = {"input_ids": torch.tensor([[5, 6, 9]]), "attention_mask": torch.ones(1, 3).long()}


def tokens_of(moe: MoE) -> list[int]:
    ids: list[int] = moe.generate(**INPUTS, do_sample=False, max_new_tokens=24)[0].tolist()
    return ids


@pytest.fixture(scope="module")
def expected(tiny_checkpoint) -> list[int]:
    with MoE(tiny_checkpoint, host_memory="100%") as moe:
        return tokens_of(moe)


@pytest.fixture(params=["through the page cache", "past the page cache"], autouse=True)
def way(request, monkeypatch) -> None:
    if request.param == "past the page cache":
        monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(params=[False, True], ids=["", "prefetch"])
def moe(request, copy_of, tiny_checkpoint) -> Iterator[MoE]:
    """Of a copy that the test may break. Whatever happened to it must have left it in order."""
    with MoE(copy_of(tiny_checkpoint), host_memory="25%", prefetch=request.param) as moe:
        yield moe
        moe.check_invariants()
        table, mover = moe.engine.tiers[0].table, moe.engine.tiers[0].mover
        with moe.engine.deciding:
            assert set(table.loading_keys()) == set(mover._loading)


def weights(moe: MoE) -> Path:
    return Path(moe.checkpoint) / "model.safetensors"


def byte_named_in(error: CheckpointError, file: Path, reason: str) -> int:
    said = re.fullmatch(
        rf"{re.escape(str(file))}: cannot be read at byte (\d+): {reason}", str(error)
    )
    assert said, str(error)
    return int(said[1])


@pytest.mark.parametrize("number", [0, 7, 30])
def test_an_error_of_the_disk_in_a_demand_load_names_file_and_byte(moe, disk, expected, number):
    num_tries = 1 + (files.SMALL_FILE_BYTES == 0)  # together, and then alone

    def is_bad(read: Read) -> bool:
        if disk.failed:
            is_again = read.offset == disk.failed[0].offset
            return is_again and len(disk.failed) < num_tries
        return read.kind == "demand" and read.number >= number

    disk.fail(is_bad)
    with pytest.raises(CheckpointError) as raised:
        tokens_of(moe)
    byte = byte_named_in(raised.value, weights(moe), "Input/output error")
    assert disk.failed[0].offset <= byte < disk.failed[0].offset + BLOCK_BYTES
    disk.mend()
    assert tokens_of(moe) == expected


@pytest.mark.parametrize("is_bad", [lambda number: True, lambda number: number % 7 == 3])
def test_prefetches_that_fail_never_give_wrong_tokens(
    tiny_checkpoint, disk, expected, caplog, is_bad
):
    """A layer that asks for such an expert meanwhile gets the error."""
    file = tiny_checkpoint / "model.safetensors"
    with MoE(tiny_checkpoint, host_memory="25%", prefetch=True) as moe:
        disk.fail(lambda read: read.kind == "prefetch" and is_bad(read.number))
        for _ in range(2):
            try:
                assert tokens_of(moe) == expected
            except CheckpointError as error:
                byte_named_in(error, file, "Input/output error")
            moe.check_invariants()
        disk.mend()
        assert disk.failed
        assert f"failed: {file}: cannot be read at byte" in caplog.text
        begun = moe.report().prefetches.begun
        assert tokens_of(moe) == expected
        assert moe.report().prefetches.begun > begun


def test_a_file_truncated_after_loading_is_named_and_works_again_once_restored(moe, expected):
    file, whole = weights(moe), weights(moe).read_bytes()
    os.truncate(file, 20_000)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))}: was changed .* 20000"):
            tokens_of(moe)
        moe.check_invariants()
    file.write_bytes(whole)
    assert tokens_of(moe) == expected


@pytest.mark.parametrize("way", ["past the page cache"], indirect=True)
def test_bytes_that_were_read_while_the_file_was_written_are_not_accepted(moe, disk, expected):
    """One read begins before the file is truncated. It ends after the request that it was for, when
    the file has its size again but not yet its bytes.
    """
    file, whole = weights(moe), weights(moe).read_bytes()
    late: list[Read] = []
    changing = threading.Lock()
    goes_on, ended = threading.Event(), threading.Event()

    def num_awaited() -> int:
        mover = moe.engine.tiers[0].mover
        loading = list(mover._loading.items())
        return sum(key not in mover._ahead and not future.done() for key, future in loading)

    def act(read: Read) -> None:
        if read.kind != "demand" or read.offset < 20_000:
            return
        with changing:
            if late or num_awaited() < 2:  # nobody else would notice
                return
            late.append(read)
            os.truncate(file, 20_000)
        if not goes_on.wait(3):  # the others' bytes had been read before: the next request tries
            with changing:
                file.write_bytes(whole)

    disk.act = act
    disk.after = lambda: ended.set() if goes_on.is_set() else None
    for _ in range(10):
        with contextlib.suppress(CheckpointError):
            tokens_of(moe)
        with changing:
            if file.stat().st_size == 20_000:
                os.truncate(file, len(whole))  # zeros
                goes_on.set()
                break
            late.clear()
    assert ended.wait(20)
    file.write_bytes(whole)
    assert tokens_of(moe) == expected


def test_a_file_of_other_bytes_is_refused_until_it_is_what_it_was(moe, expected):
    file, whole = weights(moe), weights(moe).read_bytes()
    file.write_bytes(bytes(len(whole)))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="was changed while in use: it holds other bytes"):
            tokens_of(moe)
    file.write_bytes(whole)
    assert tokens_of(moe) == expected


def test_a_file_that_was_written_anew_with_the_same_bytes_is_read_on(moe, expected):
    file = weights(moe)
    file.write_bytes(file.read_bytes())
    assert tokens_of(moe) == expected


def test_a_file_removed_after_loading_is_still_read(moe, expected):
    """It was opened for the dense weights: the bytes are there until it is closed."""
    weights(moe).unlink()
    assert tokens_of(moe) == expected


def test_a_file_that_vanished_is_named_and_works_again_once_it_is_back(moe, disk, expected):
    """After an error the file is opened anew: it may have been replaced."""
    file = weights(moe)
    away = file.rename(file.with_suffix(".away"))
    disk.fail(lambda read: read.kind == "demand" and read.number >= 12)
    with pytest.raises(CheckpointError, match="cannot be read at byte"):
        tokens_of(moe)
    disk.mend()
    for _ in range(2):
        with pytest.raises(CheckpointError) as raised:
            tokens_of(moe)
        byte_named_in(raised.value, file, "No such file or directory")
    shutil.copyfile(away, file)
    assert tokens_of(moe) == expected


def test_a_disk_that_hangs_ends_in_a_timeout_and_may_come_back(moe, disk, expected, monkeypatch):
    awake = threading.Event()

    def hang(read: Read) -> None:
        if read.kind != "demand" or read.number >= 20:
            assert awake.wait(50)

    disk.act = hang
    with monkeypatch.context() as patch:
        patch.setattr(mover_module, "LOAD_TIMEOUT_S", 0.1)
        for _ in range(2):  # the second finds the hanging reads of the first
            with pytest.raises(LoadTimeout):
                tokens_of(moe)
    awake.set()
    assert tokens_of(moe) == expected


def test_nobody_waits_long_for_a_disk_that_hangs(tiny_checkpoint, disk, monkeypatch, caplog):
    """Not even who closes: what is read at last goes to memory that is still there."""
    awake, began = threading.Event(), time.monotonic()
    others = threading.enumerate()
    monkeypatch.setattr(mover_module, "LOAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(threads_module, "CLOSE_TIMEOUT_S", 0.1)

    def generate() -> None:
        with MoE(tiny_checkpoint, host_memory="25%") as moe:
            disk.act = lambda read: awake.wait(50)
            tokens_of(moe)

    with pytest.raises(LoadTimeout):
        generate()
    assert time.monotonic() - began < 20
    assert "are left behind" in caplog.text
    late = [each for each in threading.enumerate() if each not in others]
    assert late
    awake.set()
    for thread in late:
        thread.join(20)
        assert not thread.is_alive()


HANGING = """
import os, sys, threading
from moe_infinity import __main__ as cli
from moe_infinity.memory import mover, threads

def hang(*args, preadv=os.preadv):
    if threading.current_thread().name.startswith("moe-infinity-read"):
        threading.Event().wait()
    return preadv(*args)

mover.LOAD_TIMEOUT_S = threads.CLOSE_TIMEOUT_S = 0.5
os.preadv = hang
sys.argv = ["moe-infinity", "run", sys.argv[1], "--prompt", "Once", "--host-memory", "50%"]
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["through the page cache"], indirect=True)
def test_a_command_ends_where_the_disk_hangs(tiny_checkpoint):
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tiny_checkpoint)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "did not arrive" in done.stderr
    assert "Traceback" not in done.stderr


LEFT_OPEN = """
from concurrent.futures import Future
from threading import Event
from time import monotonic
import torch
from moe_infinity.memory.threads import ReadThreads

started, values = Event(), torch.rand(1 << 18)

def read():
    started.set()
    end = monotonic() + 0.5  # however fast the machine is
    while monotonic() < end:
        torch.sort(values)
    print("read")

threads = ReadThreads(1, "test")
threads.submit(read, Future())
started.wait()
print("done")
"""


@pytest.mark.parametrize("way", ["through the page cache"], indirect=True)
def test_a_program_that_closes_nothing_ends_well():
    """Python ends daemons where they are; in the middle of torch's code that aborts."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\nread\n"), done.stderr
