"""A prompt store in a folder that fails, hangs, is shared or is somebody else's."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity.prefixes import prompt_store, stored_file
from moe_infinity.prefixes.cache_bytes import CacheBytes, Part
from moe_infinity.prefixes.prompt_store import PromptStore
from moe_infinity.prefixes.stored_file import Stored
from moe_infinity.system.files import open_no_link
from tests.server.driving import answered, cached
from tests.server.harmed_files import files_in
from tests.server.test_prompt_store import LONGER, asked, engine_at

KEY = "ab" * 16
PARTS = CacheBytes((Part(0, "keys", 0, torch.float32, (2, 4)),), (), ())
STORED = Stored(torch.arange(64, dtype=torch.uint8), None, PARTS)
FIRST, SECOND = (f"{number:040x}.block" for number in (1, 2))


def store_in(folder: Path, num_bytes: int = 1 << 20) -> PromptStore:
    return PromptStore(folder, KEY, num_bytes)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with FIRST in it."""
    folder = tmp_path / "store"
    store = store_in(folder)
    store.keep({FIRST: STORED}, PARTS)
    store.close()
    assert files_in(folder) == [folder / KEY / FIRST]
    return folder


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


# Whose folder


def a_link(folder: Path) -> None:
    """To a folder in which others may leave what they want."""
    elsewhere = folder.with_name("elsewhere")
    (folder / KEY).rename(elsewhere)
    (folder / KEY).symlink_to(elsewhere)


def of_a_group(folder: Path) -> None:
    (folder / KEY).chmod(0o770)


def in_one_of_all(folder: Path) -> None:
    folder.chmod(0o777)


def test_a_folder_of_somebody_else_beside_it_is_left_alone(folder, monkeypatch, caplog):
    """As root one sees into each, so it is played."""
    foreign = folder / ("cd" * 16)
    foreign.mkdir()
    scandir = os.scandir

    def scan(path: Any) -> Any:
        if Path(path) == foreign:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    store = store_in(folder)
    store.keep({SECOND: STORED}, PARTS)
    store.close()
    assert not caplog.text
    assert files_in(folder) == [folder / KEY / FIRST, folder / KEY / SECOND]


@pytest.mark.parametrize("refused", [a_link, of_a_group, in_one_of_all])
def test_a_folder_that_was_refused_is_neither_read_nor_written(refused, folder, caplog):
    refused(folder)
    before = files_in(folder.parent)
    store = store_in(folder)
    assert "cannot be opened" in caplog.text
    assert store.size(FIRST) is None
    store.keep({SECOND: STORED}, PARTS)
    store.close()
    assert files_in(folder.parent) == before


def test_a_prompt_begins_with_nothing_of_a_refused_folder(moe, tmp_path):
    assert cached(asked(moe, tmp_path, LONGER)) == 0
    assert cached(asked(moe, tmp_path, LONGER)) > 0
    (key,) = tmp_path.iterdir()
    key.chmod(0o770)
    assert cached(asked(moe, tmp_path, LONGER)) == 0


# Errors


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_opened_now_is_read_later(code, folder, monkeypatch, caplog):
    store = store_in(folder)
    with monkeypatch.context() as patch:
        patch.setattr(stored_file, "open_no_link", fail_with(OSError(code, os.strerror(code))))
        for _ in range(2):
            assert store.read([FIRST]) == []
    (warning,) = caplog.messages
    assert "cannot be read" in warning
    assert [stored.parts for stored in store.read([FIRST])] == [PARTS]
    store.close()


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("a thread")])
def test_whatever_a_read_raises_gives_nothing(error, folder, monkeypatch, caplog):
    store = store_in(folder)
    with monkeypatch.context() as patch:
        patch.setattr(stored_file, "contents", fail_with(error))
        assert store.read([FIRST]) == []
    assert f"cannot be read: {error!r}" in caplog.text
    assert len(store.read([FIRST])) == 1
    store.close()


def test_what_is_read_ends_before_a_file_that_fails(folder, monkeypatch):
    store = store_in(folder)
    files = [FIRST, SECOND]
    store.keep(dict.fromkeys(files, STORED), PARTS)
    store.close()
    store = store_in(folder)

    def failing(path: Path) -> int:
        if path.name == SECOND:
            raise OSError(errno.ENFILE, "Too many open files in system")
        return open_no_link(path)

    with monkeypatch.context() as patch:
        patch.setattr(stored_file, "open_no_link", failing)
        assert len(store.read(files)) == 1
    assert len(store.read(files)) == 2
    (folder / KEY / SECOND).write_bytes(b"damaged")
    (folder / KEY / SECOND).chmod(0o600)
    assert len(store.read(files)) == 1
    assert files_in(folder) == [folder / KEY / FIRST], "what is damaged is of no use"
    store.close()


def test_where_no_thread_can_be_started_nothing_is_kept_or_read(folder, monkeypatch, caplog):
    store = store_in(folder)
    error = RuntimeError("can't start new thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_with(error))
        assert store.read([FIRST]) == []
        assert store.ask(lambda: store.size(FIRST)) is None
        for _ in range(2):
            store.keep({SECOND: STORED}, PARTS)
    assert [text.partition("cannot be ")[2] for text in caplog.messages] == [
        f"read: {error!r}",
        f"written: {error}",
    ]
    assert store.ask(lambda: store.size(FIRST)) is not None
    store.keep({SECOND: STORED}, PARTS)
    store.close()
    assert len(files_in(folder)) == 2


def test_a_folder_that_does_not_give_its_names_is_given_up(moe, tmp_path, monkeypatch, caplog):
    """A look at a name on a network disk may take minutes."""
    engine = engine_at(moe, tmp_path)
    stuck = threading.Event()
    looks = []

    def size(store: PromptStore, file: str) -> int | None:
        looks.append(threading.current_thread())
        stuck.wait(5)
        return None

    monkeypatch.setattr(prompt_store, "READ_S", 0.05)
    monkeypatch.setattr(PromptStore, "size", size)
    answered(engine, LONGER)
    num_looks = len(looks)
    answered(engine, [5, *LONGER])
    assert len(looks) == num_looks, "it was given up"
    stuck.set()
    engine.close()
    assert "reading took more than 0.05 s: it is not used any more" in caplog.text
    assert threading.current_thread() not in looks
    assert files_in(tmp_path) == []


# Several servers


def test_two_servers_keep_to_the_size_together(tmp_path):
    store = store_in(tmp_path)
    store._write_those({FIRST: STORED}, PARTS)
    one_bytes = (tmp_path / KEY / FIRST).stat().st_size
    size = 64 * one_bytes
    stores = [store_in(tmp_path, size) for _ in range(2)]
    most = 0
    for number in range(200):
        stores[number % 2]._write_those({f"{number + 10:040x}.block": STORED}, PARTS)
        most = max(most, sum(path.stat().st_size for path in files_in(tmp_path)))
    assert size * 3 // 4 < most <= size + size // prompt_store.LOOKS + one_bytes
