"""How much memory there is: the machine's, or the control group's where that is less."""

from __future__ import annotations

import os

import pytest

from moe_infinity.memory import machine
from moe_infinity.system import control_groups
from moe_infinity.system import machine as system_machine

GIB = 1 << 30
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """proc({name: text}) -> a machine whose control group holds only these files."""
    monkeypatch.setattr(control_groups, "CGROUP", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own groups")
    monkeypatch.setattr(system_machine, "available_bytes", lambda: PHYSICAL)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_without_a_control_group_it_is_the_physical_memory(proc):
    proc({})
    assert machine.machine_memory_bytes() == PHYSICAL


def test_the_limit_of_the_control_group_counts_where_it_is_less(proc):
    proc({"memory.max": f"{GIB}\n"})
    assert machine.machine_memory_bytes() == min(GIB, PHYSICAL)


@pytest.mark.parametrize("text", ["max\n", "", f"{PHYSICAL * 4}\n"])
def test_a_control_group_without_a_real_limit_changes_nothing(proc, text):
    proc({"memory.max": text})
    assert machine.machine_memory_bytes() == PHYSICAL


def test_the_older_control_groups_are_understood_too(proc):
    proc({"memory/memory.limit_in_bytes": f"{GIB}\n"})
    assert machine.machine_memory_bytes() == min(GIB, PHYSICAL)
    proc({"memory/memory.limit_in_bytes": "9223372036854771712\n"})  # how v1 writes "no limit"
    assert machine.machine_memory_bytes() == PHYSICAL


@pytest.mark.parametrize(
    ("line", "group", "name", "usage"),
    [
        ("0::/user/job", "user", "memory.max", "memory.current"),
        ("4:memory:/user/job", "memory/user", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_least_limit_of_nested_groups_counts(proc, line, group, name, usage):
    proc({"own groups": f"9:pids:/elsewhere\n{line}\n", f"{group}/job/{name}": str(3 * GIB)})
    assert machine.machine_memory_bytes() == min(3 * GIB, PHYSICAL)
    proc({f"{group}/{name}": str(2 * GIB), f"{group}/{usage}": str(2 * GIB - 7000)})
    assert machine.machine_memory_bytes() == min(2 * GIB, PHYSICAL)
    assert machine.available_memory_bytes() == 7000
    proc({f"{group}/job/{usage}": str(3 * GIB - 6000)})
    assert machine.available_memory_bytes() == 6000


def test_a_group_that_a_container_does_not_see_is_passed_over(proc):
    proc({"own groups": "4:memory:/host/job\n", "memory/memory.limit_in_bytes": str(GIB)})
    assert machine.machine_memory_bytes() == min(GIB, PHYSICAL)


def test_available_is_what_the_system_estimates(proc, monkeypatch):
    proc({})
    monkeypatch.setattr(system_machine, "available_bytes", lambda: 4096 * 1024)
    assert machine.available_memory_bytes() == 4096 * 1024


def test_available_is_what_the_control_group_has_left(proc):
    proc({"memory.max": str(GIB), "memory.current": str(GIB - 5000)})
    assert machine.available_memory_bytes() == 5000


@pytest.mark.parametrize(
    "stat",
    ["anon 9\ninactive_file 3000\n", "inactive_file 7\ncache 9\ntotal_inactive_file 3000\n"],
    ids=["v2", "v1"],
)
def test_page_cache_that_can_be_dropped_is_available_that_of_inner_groups_included(proc, stat):
    usage = {"memory.max": str(GIB), "memory.current": str(GIB - 5000)}
    proc(usage | {"memory.stat": stat})
    assert machine.available_memory_bytes() == 8000


def test_available_is_never_negative(proc):
    proc({"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert machine.available_memory_bytes() == 0


def test_this_machine_has_memory_and_no_more_free_than_it_has():
    assert 0 < machine.available_memory_bytes() <= machine.machine_memory_bytes() <= PHYSICAL
