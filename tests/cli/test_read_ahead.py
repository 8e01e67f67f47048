"""While torch is imported, the files of a model that fits are read into the page cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from threading import Event
from threading import enumerate as threads
from typing import Any

import pytest

from moe_infinity.cli import read_ahead
from moe_infinity.cli.read_ahead import PIECE_BYTES, reading_ahead
from moe_infinity.cluster.config import ClusterConfig
from moe_infinity.config import OffloadConfig
from moe_infinity.system import linux, machine

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def asked(monkeypatch) -> Iterator[list[int]]:
    """The offsets of pieces of which the thread asks if the page cache has them. It has none."""
    offsets: list[int] = []

    def is_cached(descriptor: int, offset: int, num_bytes: int) -> bool:
        offsets.append(offset)
        return False

    monkeypatch.setattr(read_ahead, "LEAST_BYTES", 1)
    monkeypatch.setattr(linux, "is_linux", lambda: True)
    monkeypatch.setattr(linux, "is_cached", is_cached)
    yield offsets
    assert not is_reading()


def is_reading() -> bool:
    """Whether a thread still reads after a while."""
    ends = time.monotonic() + TIMEOUT_S
    while any(thread.name == "read-ahead" for thread in threads()):
        if time.monotonic() > ends:
            return True
        time.sleep(0.01)
    return False


def checkpoint(folder: Path, name: str = "model.gguf") -> str:
    with (folder / name).open("wb") as file:
        file.truncate(3 * PIECE_BYTES + 1)
    return str(folder / name if name.endswith(".gguf") else folder)


@pytest.mark.parametrize("config", [OffloadConfig(), ClusterConfig()])
@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_all_of_a_model_that_fits_is_read_in_order(name, config, tmp_path, asked):
    (tmp_path / "config.json").write_text("{}")
    with reading_ahead(checkpoint(tmp_path, name), config):
        assert not is_reading()
    assert asked == [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]


@pytest.mark.parametrize("is_told", [False, True])
def test_what_the_page_cache_has_is_not_read(is_told, tmp_path, monkeypatch):
    """Where the system does not say what it has, all is read."""

    def is_cached(descriptor: int, offset: int, num_bytes: int) -> bool:
        if not is_told:
            raise OSError("it does not say")
        return offset > 0

    file = checkpoint(tmp_path)
    monkeypatch.setattr(linux, "is_cached", is_cached)
    read = []

    class Watched(FileIO):
        def readinto(self, scratch: Any) -> int:
            at = self.tell()
            read.append((at, super().readinto(scratch)))
            return read[-1][1]

    monkeypatch.setattr(Path, "open", lambda self, mode, buffering: Watched(self, mode))
    read_ahead._read([Path(file)], Event())
    monkeypatch.undo()
    pieces = [(i * PIECE_BYTES, PIECE_BYTES) for i in range(3)] + [(3 * PIECE_BYTES, 1)]
    assert read == (pieces[:1] if is_told else pieces)


def test_nothing_is_read_once_the_model_is_loaded(tmp_path, monkeypatch):
    has_begun, is_loaded = Event(), Event()
    asked = []

    def is_cached(descriptor: int, offset: int, num_bytes: int) -> bool:
        asked.append(offset)
        has_begun.set()
        return is_loaded.wait(TIMEOUT_S)

    monkeypatch.setattr(linux, "is_cached", is_cached)
    with reading_ahead(checkpoint(tmp_path), OffloadConfig()):
        assert has_begun.wait(TIMEOUT_S)
    is_loaded.set()
    assert not is_reading()
    assert asked == [0]


@pytest.mark.parametrize(
    "config",
    [
        OffloadConfig(memory="8GiB"),
        OffloadConfig(host_memory="50%"),
        OffloadConfig(preload="off"),
        ClusterConfig(expert_hosts=1),
    ],
)
def test_nothing_is_read_if_only_a_part_is_to_be_in_memory(config, tmp_path, asked):
    with reading_ahead(checkpoint(tmp_path), config):
        assert not is_reading()
    assert asked == []


def test_nothing_is_read_if_it_does_not_fit(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 3 * PIECE_BYTES)
    with reading_ahead(checkpoint(tmp_path), OffloadConfig()):
        assert not is_reading()
    assert asked == []


@pytest.mark.parametrize("name", ["absent.gguf", "absent", "Some/hub-id"])
def test_what_is_not_there_is_left_to_who_loads_the_model(name, tmp_path, asked):
    with reading_ahead(str(tmp_path / name), OffloadConfig()):
        assert not is_reading()
    assert asked == []


def test_a_command_that_ends_early_reads_no_further(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        reading_ahead(checkpoint(tmp_path), OffloadConfig()),
    ):
        raise KeyboardInterrupt
    assert not is_reading()
