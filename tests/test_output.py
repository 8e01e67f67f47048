"""Files of ours on disk: whole, for their owner, and looked at before they are read."""

from __future__ import annotations

import io
import os
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest

from moe_infinity import output
from moe_infinity.errors import TraceError
from moe_infinity.output import DAMAGED, read_arrays, whole_file, why_unwritable, write_arrays
from moe_infinity.predict.tracefile import load_trace
from moe_infinity.system import machine


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_arrays_are_their_owners_alone_whatever_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_arrays(tmp_path / "file.npz", {"a": np.arange(3)}, what="history")
        with whole_file(tmp_path / "page.html") as file:
            file.write(b"page")
    finally:
        os.umask(before)
    assert (tmp_path / "file.npz").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o666 & ~mask
    assert sorted(os.listdir(tmp_path)) == ["file.npz", "page.html"]
    assert read_arrays(tmp_path / "file.npz", expected={"a"})["a"].tolist() == [0, 1, 2]


def test_a_link_in_the_place_of_a_new_file_is_not_followed(tmp_path, monkeypatch):
    """Not even if somebody guesses the name."""
    guessed = tmp_path / "guessed"
    guessed.symlink_to(tmp_path / "victim")
    monkeypatch.setattr(output, "name_beside", lambda path: guessed)
    with pytest.raises(FileExistsError), whole_file(tmp_path / "file"):
        pass
    assert not (tmp_path / "victim").exists()


def test_a_link_to_a_file_stays_one_and_its_file_is_written(tmp_path):
    target = tmp_path / "disk" / "target"
    target.parent.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    for content in (b"new", b"newer"):
        assert why_unwritable(link) is None
        with whole_file(link) as opened:
            opened.write(content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    """As /dev/null would be by root."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert why_unwritable(path) == "no file can be written there"


def archive(path: Path, sizes: dict[str, int]) -> Path:
    """Arrays of zeros, compressed a thousand times."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, size in sizes.items():
            with opened.open(f"{name}.npy", "w", force_zip64=True) as entry:
                header = io.BytesIO()
                np.lib.format.write_array_header_1_0(
                    header, {"descr": "|u1", "fortran_order": False, "shape": (size,)}
                )
                entry.write(header.getvalue())
                for _ in range(0, size, 1 << 20):
                    entry.write(bytes(1 << 20))
    return path


def test_an_archive_larger_than_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    file = archive(tmp_path / "bomb.npz", {"experts": 64 << 20, "offsets": 1 << 20})
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 100 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TraceError, match="arrays of .* bytes, and there is memory for"):
        load_trace(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


@pytest.mark.parametrize(
    ("names", "said"),
    [(["other\x1b[2J"], r"other\\x1b"), ([f"a{i}" for i in range(65)], "at most 64")],
    ids=["others", "many"],
)  # fmt: skip
def test_names_are_looked_at_before_contents(tmp_path, monkeypatch, names, said):
    file = archive(tmp_path / "file.npz", dict.fromkeys(names, 1))
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(DAMAGED, match=said):
        read_arrays(file, expected={"experts"})
