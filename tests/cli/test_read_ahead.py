"""While torch is imported, the files of a model that fits are brought into the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import enumerate as threads

import pytest

from moe_infinity.cli import read_ahead
from moe_infinity.cli.read_ahead import PIECE_BYTES, reading_ahead
from moe_infinity.cluster.config import ClusterConfig
from moe_infinity.config import OffloadConfig
from moe_infinity.system import linux

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def asked(monkeypatch) -> Iterator[list[int]]:
    """The offsets that the system was asked for."""
    offsets: list[int] = []
    monkeypatch.setattr(read_ahead, "LEAST_BYTES", 1)
    monkeypatch.setattr(linux, "is_linux", lambda: True)
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda descriptor, offset, size, advice: offsets.append(offset),
        raising=False,
    )
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
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
def test_all_of_a_model_that_fits_is_asked_for_in_order(name, config, tmp_path, asked):
    (tmp_path / "config.json").write_text("{}")
    with reading_ahead(checkpoint(tmp_path, name), config):
        assert not is_reading()
    assert asked == [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]


def test_nothing_is_asked_for_once_the_model_is_loaded(tmp_path, asked, monkeypatch):
    def slowly(descriptor: int, offset: int, size: int, advice: int) -> None:
        asked.append(offset)
        time.sleep(0.2)

    monkeypatch.setattr(os, "posix_fadvise", slowly)
    with reading_ahead(checkpoint(tmp_path), OffloadConfig()):
        while not asked:
            time.sleep(0.01)
    assert not is_reading()
    assert len(asked) < 4


@pytest.mark.parametrize(
    "config",
    [
        OffloadConfig(memory="8GiB"),
        OffloadConfig(host_memory="50%"),
        OffloadConfig(preload="off"),
        ClusterConfig(expert_hosts=1),
    ],
)
def test_nothing_is_asked_for_if_only_a_part_is_to_be_in_memory(config, tmp_path, asked):
    with reading_ahead(checkpoint(tmp_path), config):
        assert not is_reading()
    assert asked == []


def test_nothing_is_asked_for_if_it_does_not_fit(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(read_ahead, "available_memory_bytes", lambda: 3 * PIECE_BYTES)
    with reading_ahead(checkpoint(tmp_path), OffloadConfig()):
        assert not is_reading()
    assert asked == []


def test_what_cannot_be_read_is_left_to_who_loads_the_model(tmp_path, asked, monkeypatch):
    for name in ("absent.gguf", "absent", "Some/hub-id"):
        with reading_ahead(str(tmp_path / name), OffloadConfig()):
            assert not is_reading()

    def refuse(*args: int) -> None:
        raise OSError("no such advice")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with reading_ahead(checkpoint(tmp_path), OffloadConfig()):
        assert not is_reading()
    assert asked == []


def test_a_command_that_ends_early_reads_no_further(tmp_path, asked):
    with (
        pytest.raises(KeyboardInterrupt),
        reading_ahead(checkpoint(tmp_path), OffloadConfig()),
    ):
        raise KeyboardInterrupt
    assert not is_reading()
