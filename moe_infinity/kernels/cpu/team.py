"""The threads that share a call of machine code: a caller and its helpers.

    caller    writes (function, address) down, opens the call, computes, closes it
    helper    looks for an open call for a while, computes with the caller, or sleeps until woken

A call is a C function of one address that any number of threads enter at once; each returns when
no work is left to take, the caller when all is done. A helper that is awake sees a call within a
microsecond, without Python. To wake it for every call of a decode step would take too long.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from array import array
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.compiler import machine_code
from moe_infinity.kernels.cpu.vectors import I64, int_at
from moe_infinity.system.machine import yield_address

logger = logging.getLogger(__name__)

LINE = 8  # int64s that share a cache line
# Where things are in the memory of a team, each in a line of its own.
TURN = 0  # odd while a call is open
INSIDE = LINE  # helpers that may be in the call
ASLEEP = 2 * LINE  # helpers that wait to be woken
FUNCTION = 3 * LINE  # of the call, its address, and that of the system's yield
ADDRESS = FUNCTION + 1
YIELD = FUNCTION + 2
SIZE = 4 * LINE
# A helper looks for a call so often, for some 1.5 ms, before it sleeps. Python takes less between
# two calls.
LOOKS = 40_000
PATIENCE = 100  # looks, some 4 us, between two times that a waiting thread yields its core


@cache
def _pause() -> tuple[str, list[int]] | None:
    """The instruction that lets the other thread of a core run, by its name in LLVM."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return "llvm.x86.sse2.pause", []
    return ("llvm.aarch64.hint", [1]) if machine in ("aarch64", "arm64") else None


@intrinsic  # type: ignore[untyped-decorator]
def pause(_: Any) -> Any:
    """Do nothing for a moment."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        if (found := _pause()) is not None:
            name, values = found
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(values))
            function = cgutils.get_or_insert_function(b.module, kind, name)
            b.call(function, [ir.Constant(ir.IntType(32), value) for value in values])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(_: Any, address: Any, value: Any) -> Any:
    """Add, and return the number before. All threads see these and everything before in one
    order.
    """

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def fetch(_: Any, address: Any) -> Any:
    """Read, and see everything that was written before this value."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def call_at(_: Any, function: Any, address: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _yield(_: Any, function: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        with b.if_then(b.icmp_signed("!=", args[0], I64(0))):
            kind = ir.FunctionType(ir.IntType(32), [])
            b.call(b.inttoptr(args[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _pause_after(looks: int, yield_: int) -> None:
    """Pause between two looks. On a busy machine other threads get the core now and then: one of
    them may be what this thread waits for.
    """
    pause()
    if looks % PATIENCE == 0:
        _yield(yield_)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def wait_for(address: int, value: int, yield_: int) -> None:
    """Wait until the number at `address` is at least `value`, which another thread is about to
    write.
    """
    looks = 0
    while fetch(address) < value:
        looks += 1
        _pause_after(looks, yield_)


@machine_code(types.int64(types.int64, types.int64))
def _help(team: int, last: int) -> int:
    """Take part in calls after `last` until none has come for a while. Returns the last one."""
    looks = 0
    while looks < LOOKS:
        turn = fetch(team + 8 * TURN)
        if turn == last or turn % 2 == 0:
            looks += 1
            _pause_after(looks, int_at(team, YIELD))
            continue
        fetch_add(team + 8 * INSIDE, 1)
        if fetch(team + 8 * TURN) == turn:
            call_at(int_at(team, FUNCTION), int_at(team, ADDRESS))
        fetch_add(team + 8 * INSIDE, -1)
        last = turn
        looks = 0
    fetch_add(team + 8 * ASLEEP, 1)
    return last


@machine_code(types.void(types.int64))
def _lead(team: int) -> None:
    """Run the call that is written in the team's memory, with the helpers that are awake."""
    fetch_add(team + 8 * TURN, 1)
    call_at(int_at(team, FUNCTION), int_at(team, ADDRESS))
    fetch_add(team + 8 * TURN, 1)
    looks = 0
    while fetch(team + 8 * INSIDE) > 0:
        looks += 1
        _pause_after(looks, int_at(team, YIELD))


@machine_code(types.void(types.int64, types.int64))
def _alone(function: int, address: int) -> None:
    call_at(function, address)


class Team:
    """Helper threads for one caller at a time. A caller that finds them busy computes alone."""

    def __init__(self, num_helpers: int) -> None:
        self._lock = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._memory = array("q", bytes(8 * (SIZE + LINE)))
        at = self._memory.buffer_info()[0]
        self._first = -(at // 8) % LINE  # where the first whole cache line begins
        self._at = at + 8 * self._first
        self._memory[self._first + YIELD] = yield_address()
        for i in range(num_helpers):
            name = f"experts-cpu-{i}"
            try:
                threading.Thread(target=self._helper, name=name, daemon=True).start()
            except RuntimeError:
                logger.warning("the system gives %d of %d threads for kernels", i, num_helpers)
                break

    def run(self, function: int, address: int) -> None:
        """Call the function at `function` with `address`, and return when all of it is done."""
        if not self._lock.acquire(blocking=False):
            _alone(function, address)
            return
        try:
            memory = self._memory
            first = self._first
            memory[first + FUNCTION] = function
            memory[first + ADDRESS] = address
            for _ in range(memory[first + ASLEEP] - self._wake.qsize()):
                self._wake.put(None)
            _lead(self._at)
        finally:
            self._lock.release()

    def _helper(self) -> None:
        last = 0
        while True:
            last = _help(self._at, last)
            self._wake.get()
            _woken(self._at)


@machine_code(types.void(types.int64))
def _woken(team: int) -> None:
    fetch_add(team + 8 * ASLEEP, -1)


def run(function: int, address: int, num_threads: int) -> None:
    """Call the function at `function` with `address`, by this number of threads."""
    if num_threads > 1:
        _team(os.getpid(), num_threads - 1).run(function, address)
    else:
        _alone(function, address)


@cache
def _team(pid: int, num_helpers: int) -> Team:
    """The team of a process, since threads do not survive a fork."""
    return Team(num_helpers)


# The number of threads: torch's, also while torch itself is limited to one.
#
# torch's threads wait for each other at the end of every operation they share, however small. If
# another program keeps a core busy, each of these waits is long: with one of two cores busy, a
# decode step of 7 layers took 138 ms. It took 45 ms when only kernels used both cores, whose free
# threads take what work is left.


class _Kept(threading.local):
    num_threads: int | None = None  # torch's number, while it has one


_kept = _Kept()


def num_threads() -> int:
    """The number of threads that kernels use."""
    return _kept.num_threads or torch.get_num_threads()


def leave_torch_one() -> None:
    """Limit torch to one thread for what this thread calls, until `give_torch_all`."""
    if _kept.num_threads is None and torch.get_num_threads() > 1:
        _kept.num_threads = torch.get_num_threads()
        torch.set_num_threads(1)


def give_torch_all() -> None:
    """Undo `leave_torch_one`; without it, do nothing."""
    if _kept.num_threads is not None:
        torch.set_num_threads(_kept.num_threads)
        _kept.num_threads = None
