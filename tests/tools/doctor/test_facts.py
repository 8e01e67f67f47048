"""What the system says: mounts, settings."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from moe_infinity.tools.doctor import facts

Partition = namedtuple("Partition", "device mountpoint fstype opts")


def test_a_path_is_on_the_innermost_mount(monkeypatch):
    mounts = [
        Partition("/dev/a", "/", "ext4", "rw"),
        Partition("server:/x", "/data", "nfs4", "rw,noexec"),
        Partition("/dev/b", "/data/fast", "xfs", "rw"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    found = facts.mount_of(Path("/data/models/not/there"))
    assert found == ("server:/x", "nfs4", ("rw", "noexec"))
    assert facts.mount_of(Path("/data/fast/one")).file_system == "xfs"
    assert facts.mount_of(Path("/database")).file_system == "ext4"


@pytest.mark.parametrize(
    ("text", "setting"),
    [("always [madvise] never\n", "madvise"), ("always madvise [never]", "never")],
)
def test_the_setting_of_huge_pages_is_the_one_in_brackets(text, setting, tmp_path, monkeypatch):
    file = tmp_path / "enabled"
    file.write_text(text)
    monkeypatch.setattr(facts, "HUGE_PAGES", file)
    assert facts.huge_pages_setting() == setting


def test_without_the_files_of_linux_nothing_is_known(tmp_path, monkeypatch):
    for name in ("HUGE_PAGES", "NVIDIA"):
        monkeypatch.setattr(facts, name, tmp_path / "absent")
    assert facts.huge_pages_setting() == ""
    assert facts.nvidia_driver() == ""
