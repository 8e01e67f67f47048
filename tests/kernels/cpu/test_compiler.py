"""Compiled kernels are kept for the next process. What is wrong with the place is a warning at
most.

Where that is enough, a process of its own is simulated: the compiler forgets its folder.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from numba import types
from numba.core.caching import IndexDataCacheFile

from moe_infinity.kernels.cpu import compiler

ROOT = Path(__file__).resolve().parents[3]
WARNING = "compiled kernels cannot be kept"
SIGNATURE = types.int64(types.int64)
PROGRAM = """
from tests.kernels.cpu.test_compiler import add_two, num_loaded
print(num_loaded(add_two()))
"""


def add_two(*, is_kept: bool = True) -> tuple[Any, Any]:
    """Two kernels, made anew."""

    @compiler.machine_code(SIGNATURE)
    def add_two(x):
        return x + 2

    @compiler.c_function(SIGNATURE, "add_two_in_c", is_kept=is_kept)
    def add_two_in_c(x: int) -> int:
        return x + 2

    assert add_two(40) == add_two_in_c.ctypes(40) == 42
    return add_two, add_two_in_c


def num_loaded(kernels: tuple[Any, Any]) -> int:
    """How many of them were not compiled."""
    machine_code, c_function = kernels
    return sum(machine_code.stats.cache_hits.values()) + int(c_function.cache_hits)


def forget() -> None:
    compiler.cache_folder.cache_clear()
    compiler._warn_once.cache_clear()


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Path]:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def kept_files(home: Path) -> list[Path]:
    return sorted(home.glob("moe-infinity/kernels/*/*/*.nb?"))


def test_tests_leave_the_users_cache_folder_alone(pytestconfig):
    folder = compiler.cache_folder()
    assert folder is not None
    assert folder.is_relative_to(pytestconfig.rootpath / ".pytest_cache")


@pytest.mark.slow
def test_two_processes_may_compile_at_once_and_the_next_one_compiles_nothing(home):
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    together = [start(), start()]
    assert all(process.communicate()[0].strip() in ("0", "1", "2") for process in together)
    assert start().communicate()[0].strip() == "2"
    assert len(kept_files(home)) == 4  # an index and the code of each kernel
    assert not list(home.rglob("*.tmp.*"))


def test_what_is_not_to_be_kept_leaves_no_file(home):
    add_two(is_kept=False)
    assert num_loaded(add_two(is_kept=False)) == 1
    assert not [file for file in kept_files(home) if "in_c" in file.name]


def test_without_a_folder_kernels_work_and_a_warning_says_so_once(home, monkeypatch, caplog):
    """As with a read-only home."""
    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    for _ in range(2):
        assert num_loaded(add_two()) == 0
    assert caplog.text.count(WARNING) == 1
    assert str(home / "file") in caplog.text


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_what_is_kept_is_its_users_alone_whatever_the_umask(home, mask):
    before = os.umask(mask)
    try:
        add_two()
    finally:
        os.umask(before)
    kernels = home / "moe-infinity" / "kernels"
    (folder,) = kernels.iterdir()
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in (kernels.parent, kernels, folder))
    assert len(kept_files(home)) > 1


def test_a_home_that_is_made_with_no_umask_is_no_folder_of_others(home, monkeypatch, caplog):
    """Threads of libraries set it to 0 for a moment, and it may stay so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "new"))
    before = os.umask(0)
    try:
        add_two()
    finally:
        os.umask(before)
    assert (home / "new").stat().st_mode & 0o777 == 0o755
    assert WARNING not in caplog.text


@pytest.mark.parametrize("name", [".", "moe-infinity", "moe-infinity/kernels", "*"])
def test_a_folder_that_others_can_write_to_is_not_read(home, name, caplog, monkeypatch):
    """Files in it are pickles: to read them is to run what they say."""
    add_two()
    kernels = home / "moe-infinity" / "kernels"
    folder = next(iter(kernels.iterdir())) if name == "*" else home / name
    folder.chmod(0o770)
    forget()
    monkeypatch.setattr(IndexDataCacheFile, "load", None)
    for _ in range(2):
        assert num_loaded(add_two()) == 0
    assert caplog.text.count(WARNING) == 1
    assert f"others may write to it: '{folder}'" in caplog.text
    folder.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_not_read(home, caplog):
    add_two()
    os.chown(home / "moe-infinity", 65534, 65534)
    forget()
    assert num_loaded(add_two()) == 0
    assert "belongs to another user" in caplog.text


def test_a_link_in_the_place_of_the_folder_is_not_followed(home, tmp_path_factory, caplog):
    (home / "moe-infinity").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert num_loaded(add_two()) == 0
    assert "is no folder" in caplog.text


def no_home(*_: object, **__: object) -> Path:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("answer", [no_home, lambda *_: Path("~/.cache/moe-infinity")])
def test_without_a_home_folder_kernels_work_and_a_warning_says_so(
    home, monkeypatch, caplog, answer
):
    """A user without a passwd entry and HOME; older versions of platformdirs do not raise."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "~")
    monkeypatch.chdir(home)
    monkeypatch.setattr(platformdirs, "user_cache_path", answer)
    assert num_loaded(add_two()) == 0
    assert caplog.text.count(WARNING) == 1
    assert not list(home.iterdir())


def test_the_first_start_says_that_it_compiles(home, caplog):
    for _ in range(2):
        add_two()
        forget()
    assert caplog.text.count("compiling kernels (once)") == 1


def test_on_a_full_disk_kernels_work_and_a_warning_says_so_once(home, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", full)
        for _ in range(2):
            assert num_loaded(add_two()) == 0
    assert caplog.text.count(WARNING) == 1
    assert num_loaded(add_two()) == 0  # there is room again
    assert num_loaded(add_two()) == 2


@pytest.mark.parametrize(
    "damaged", [lambda raw: b"", lambda raw: bytes(len(raw)), lambda r: r[:99]]
)
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_damaged_file_is_replaced(home, caplog, suffix, damaged):
    add_two()
    for file in kept_files(home):
        if file.suffix == suffix:
            file.write_bytes(damaged(file.read_bytes()))
    assert num_loaded(add_two()) == 0
    assert num_loaded(add_two()) == 2
    assert WARNING not in caplog.text


def test_kernels_of_other_source_are_kept_elsewhere(home, monkeypatch):
    monkeypatch.setattr(compiler, "PACKAGE", home / "package")
    source = home / "package" / "kernels" / "cpu" / "rows.py"
    source.parent.mkdir(parents=True)
    folders = []
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        forget()
        folders.append(compiler.cache_folder())
    assert folders[0] == folders[2] != folders[1]


def test_folders_that_nobody_used_for_a_month_are_deleted(home):
    folder = compiler.cache_folder()
    assert folder is not None
    for name, unused_s in (("recent", compiler.UNUSED_S - 60), ("old", compiler.UNUSED_S + 60)):
        mark = folder.parent / name / "last-use"
        mark.parent.mkdir()
        mark.touch()
        os.utime(mark, (time.time() - unused_s,) * 2)
    forget()
    assert compiler.cache_folder() == folder
    assert {path.name for path in folder.parent.iterdir()} == {"recent", folder.name}


def test_a_folder_that_another_process_deletes_first_is_no_matter(home, monkeypatch, caplog):
    folder = compiler.cache_folder()
    assert folder is not None
    old = folder.parent / "old" / "last-use"
    old.parent.mkdir()
    old.touch()

    def deleting() -> float:
        old.unlink(missing_ok=True)
        return 0.0

    forget()
    monkeypatch.setattr(time, "time", deleting)
    assert compiler.cache_folder() == folder
    assert WARNING not in caplog.text
