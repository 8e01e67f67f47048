"""Calls of machine code that several threads compute together."""

from __future__ import annotations

import ctypes
import threading
import time
from array import array

import pytest
from numba import types

from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.compiler import c_function
from moe_infinity.kernels.cpu.team import fetch_add, wait_for
from moe_infinity.kernels.cpu.vectors import int_at

NUM_ITEMS = 500
NEXT = 0
DONE = 1
SUM = 2
THREADS = 3


@c_function(types.void(types.int64), "test_team_add_up")
def add_up(call: int) -> None:
    """Add the numbers below NUM_ITEMS up, each by whoever takes it."""
    fetch_add(call + 8 * THREADS, 1)
    item = fetch_add(call + 8 * NEXT, 1)
    while item < int_at(call, 4):
        fetch_add(call + 8 * SUM, item)
        fetch_add(call + 8 * DONE, 1)
        item = fetch_add(call + 8 * NEXT, 1)
    wait_for(call + 8 * DONE, int_at(call, 4), 0)


def _memory(num_items: int = NUM_ITEMS) -> array[int]:
    return array("q", [0, 0, 0, 0, num_items])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_item_is_taken_once_in_each_of_many_calls(num_threads):
    for num_items in [*range(40)] * 20:
        memory = _memory(num_items)
        team.run(add_up.address, memory.buffer_info()[0], num_threads)
        assert memory[SUM] == num_items * (num_items - 1) // 2, num_items
        assert 1 <= memory[THREADS] <= num_threads


def test_helpers_come_back_after_they_went_to_sleep():
    own = team.Team(1)
    for _ in range(3):
        time.sleep(0.2)
        took_part = False
        deadline = time.monotonic() + 30
        while not took_part and time.monotonic() < deadline:
            memory = _memory(200_000)
            own.run(add_up.address, memory.buffer_info()[0])
            took_part = memory[THREADS] == 2
        assert took_part


def test_a_helper_that_waits_offers_its_core(monkeypatch):
    """On a busy machine it took a third of the time of a decode step from whoever had work."""
    offered = threading.Event()

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def yield_() -> int:
        offered.set()
        return 0

    monkeypatch.setattr(team, "yield_address", lambda: ctypes.cast(yield_, ctypes.c_void_p).value)
    own = team.Team(1)
    assert offered.wait(30)
    wait_until_asleep(own)  # it has the address of what goes away now


def wait_until_asleep(own: team.Team) -> None:
    deadline = time.monotonic() + 30
    while own._memory[own._first + team.ASLEEP] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_callers_at_once_compute_as_if_alone():
    failed = []

    def call() -> None:
        for _ in range(300):
            memory = _memory()
            team.run(add_up.address, memory.buffer_info()[0], 2)
            if memory[SUM] != NUM_ITEMS * (NUM_ITEMS - 1) // 2:
                failed.append(memory)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed


def test_fewer_threads_than_wanted_are_enough(monkeypatch, caplog):
    """Where the system gives no more, those that there are do all."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_one(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    own = team.Team(4)
    assert "gives 1 of 4 threads" in caplog.text
    memory = _memory()
    own.run(add_up.address, memory.buffer_info()[0])
    assert memory[SUM] == NUM_ITEMS * (NUM_ITEMS - 1) // 2
