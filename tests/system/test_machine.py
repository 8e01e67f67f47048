"""What is known of this machine: limits of control groups, mounts, settings."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from moe_infinity.system import control_groups, machine

Partition = namedtuple("Partition", "device mountpoint fstype opts")


@pytest.fixture
def group(tmp_path, monkeypatch):
    """group({name: text}) -> a control group that holds only these files."""
    monkeypatch.setattr(control_groups, "CGROUP", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own groups")

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"own groups": "0::/a\n", "a/cpu.max": "200000 100000", "cpu.max": "max 100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        (
            {
                "own groups": "3:cpu,cpuacct:/a\n",
                "cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
    ],
)
def test_the_least_share_of_cores_of_nested_groups_counts(group, files, cores):
    group(files)
    assert control_groups.core_limit() == cores


def test_a_path_is_on_the_innermost_mount(monkeypatch):
    mounts = [
        Partition("/dev/a", "/", "ext4", "rw"),
        Partition("server:/x", "/data", "nfs4", "rw,noexec"),
        Partition("/dev/b", "/data/fast", "xfs", "rw"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    found = machine.mount_of(Path("/data/models/not/there"))
    assert found == ("server:/x", "nfs4", ("rw", "noexec"))
    assert machine.mount_of(Path("/data/fast/one")).file_system == "xfs"
    assert machine.mount_of(Path("/database")).file_system == "ext4"


@pytest.mark.parametrize(
    ("text", "setting"),
    [("always [madvise] never\n", "madvise"), ("always madvise [never]", "never")],
)
def test_the_setting_of_huge_pages_is_the_one_in_brackets(text, setting, tmp_path, monkeypatch):
    file = tmp_path / "enabled"
    file.write_text(text)
    monkeypatch.setattr(machine, "HUGE_PAGES", file)
    assert machine.huge_pages_setting() == setting


def test_without_the_files_of_linux_nothing_is_known(tmp_path, monkeypatch):
    for name in ("HUGE_PAGES", "NVIDIA", "NODES"):
        monkeypatch.setattr(machine, name, tmp_path / "absent")
    assert machine.huge_pages_setting() == ""
    assert machine.nvidia_driver() == ""
    assert machine.numa_nodes() == [[]]
