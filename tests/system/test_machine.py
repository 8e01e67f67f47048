"""What is known of this machine: limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moe_infinity.system import machine

GIB = 1 << 30
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_of_machine(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    memory = SimpleNamespace(total=PHYSICAL, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.fixture
def group(tmp_path, monkeypatch):
    """group({name: text}) -> a machine whose control group holds only these files."""
    memory_of_machine(monkeypatch, available=PHYSICAL)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own groups")

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
    assert machine.core_limit() == cores


def test_without_the_files_of_linux_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "NODES", tmp_path / "absent")
    assert machine.numa_nodes() == [[]]


# Memory


def test_without_a_control_group_it_is_the_physical_memory(group):
    group({})
    assert machine.machine_memory_bytes() == PHYSICAL


def test_the_limit_of_the_control_group_counts_where_it_is_less(group):
    group({"memory.max": f"{GIB}\n"})
    assert machine.machine_memory_bytes() == min(GIB, PHYSICAL)


@pytest.mark.parametrize("text", ["max\n", "", f"{PHYSICAL * 4}\n"])
def test_a_control_group_without_a_real_limit_changes_nothing(group, text):
    group({"memory.max": text})
    assert machine.machine_memory_bytes() == PHYSICAL


@pytest.mark.parametrize(("most", "high"), [("max", GIB), (GIB * 3 // 2, GIB), (GIB, GIB * 3 // 2)])
def test_a_limit_above_which_a_group_is_slowed_down_counts_too(group, most, high):
    """Above it a program is not ended, and hardly goes on: `MemoryHigh` of systemd."""
    group({"memory.max": f"{most}\n", "memory.high": f"{high}\n", "memory.current": "1000\n"})
    assert machine.machine_memory_bytes() == min(GIB, PHYSICAL)
    assert machine.available_memory_bytes() == min(GIB - 1000, PHYSICAL)


def test_the_older_control_groups_are_understood_too(group):
    group({"memory/memory.limit_in_bytes": f"{GIB}\n"})
    assert machine.machine_memory_bytes() == min(GIB, PHYSICAL)
    group({"memory/memory.limit_in_bytes": "9223372036854771712\n"})  # how v1 writes "no limit"
    assert machine.machine_memory_bytes() == PHYSICAL


@pytest.mark.parametrize(
    ("line", "folder", "name", "usage"),
    [
        ("0::/user/job", "user", "memory.max", "memory.current"),
        ("4:memory:/user/job", "memory/user", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_least_limit_of_nested_groups_counts(group, line, folder, name, usage):
    group({"own groups": f"9:pids:/elsewhere\n{line}\n", f"{folder}/job/{name}": str(3 * GIB)})
    assert machine.machine_memory_bytes() == min(3 * GIB, PHYSICAL)
    group({f"{folder}/{name}": str(2 * GIB), f"{folder}/{usage}": str(2 * GIB - 7000)})
    assert machine.machine_memory_bytes() == min(2 * GIB, PHYSICAL)
    assert machine.available_memory_bytes() == 7000
    group({f"{folder}/job/{usage}": str(3 * GIB - 6000)})
    assert machine.available_memory_bytes() == 6000


def test_a_group_that_a_container_does_not_see_is_passed_over(group):
    group({"own groups": "4:memory:/host/job\n", "memory/memory.limit_in_bytes": str(GIB)})
    assert machine.machine_memory_bytes() == min(GIB, PHYSICAL)


def test_available_is_what_the_system_estimates(group, monkeypatch):
    group({})
    memory_of_machine(monkeypatch, available=4096 * 1024)
    assert machine.available_memory_bytes() == 4096 * 1024


def test_available_is_what_the_control_group_has_left(group):
    group({"memory.max": str(GIB), "memory.current": str(GIB - 5000)})
    assert machine.available_memory_bytes() == 5000


@pytest.mark.parametrize(
    "stat",
    [
        "anon 9\ninactive_file 1000\nactive_file 2000\n",
        "inactive_file 7\nactive_file 5\ntotal_inactive_file 1000\ntotal_active_file 2000\n",
    ],
    ids=["v2", "v1"],
)
def test_page_cache_that_can_be_dropped_is_available_that_of_inner_groups_included(group, stat):
    usage = {"memory.max": str(GIB), "memory.current": str(GIB - 5000)}
    group(usage | {"memory.stat": stat})
    assert machine.available_memory_bytes() == 8000


def test_available_is_never_negative(group):
    group({"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert machine.available_memory_bytes() == 0


def test_this_machine_has_memory_and_no_more_free_than_it_has():
    assert 0 < machine.available_memory_bytes() <= machine.machine_memory_bytes() <= PHYSICAL


@pytest.mark.parametrize(
    "read", [machine.machine_memory_bytes, machine.available_memory_bytes, machine.own_bytes]
)
def test_a_system_that_does_not_say_what_memory_it_has_is_an_error(read, tmp_path, monkeypatch):
    """Once a traceback of psutil's, in a container without /proc."""
    if not Path("/proc").exists():
        pytest.skip("psutil reads elsewhere")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    with pytest.raises(machine.NotTold, match="does not say how much memory .*\nhint: .*/proc"):
        read()
