"""The work of one call of experts.py, in machine code that any number of threads enter at once,
and the threads that do so.

    items    expert 0: blocks of up, expert 1: ..., then expert 0: blocks of down, expert 1: ...

Whoever is free takes the next item. Who finishes the last block of up of an expert computes what
goes into its down; by the time that its blocks are taken this has happened, as a rule.

Legend: P rows of all experts, sorted by expert, F expert width.
"""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from collections.abc import Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from moe_infinity.kernels.activation import FUNCTIONS
from moe_infinity.kernels.cpu.compiler import machine_code, named
from moe_infinity.kernels.cpu.steps import Arrangement, arrange
from moe_infinity.kernels.cpu.vectors import (
    I64,
    LANES,
    bfloat_at,
    float_at,
    half_at,
    int_at,
    put_float,
)

FINISHED = -1
SILU, GELU, GELU_TANH = map(FUNCTIONS.index, ("silu", "gelu", "gelu_tanh"))
SPINS = 100_000  # looks at a counter, some 35 us, before Python hears that nothing is ready: more
# than a block takes
PAUSE_S = 1e-5  # for which a thread sleeps then; the machine makes it 60 us
MAX_WAITING = 64  # calls that no helper has looked at; more are computed without
STOPPED = 1 << 62  # an item that is never reached
BIASES = ("float32", "bfloat16", "float16")
NO_BIAS = -1
LINE = 8  # int64s that share a cache line
NEXT = 0
DONE = LINE
OF_EXPERTS = 2 * LINE  # in KernelJob.state
BLOCK = 7  # int64s; see Weights


class Weights(NamedTuple):
    """Where things lie in a slot, the same for all experts: integers, for numba. Blocks are seven:
    addresses of a function for one row of x, one for two, and KernelArguments; first and last row;
    offset in a row of out and bytes of a row of x. A single product is up without anything else.
    """

    up_blocks: int  # address
    num_up: int
    up_bytes: int  # of a row of up's outputs
    down_blocks: int = 0  # address
    num_down: int = 0
    out_bytes: int = 0  # of a row of down's outputs
    function: int = 0  # the place of its name in FUNCTIONS
    is_gated: int = 0
    numbers: int = 0  # address of three: alpha, shift and limit
    gate_step: int = 0  # from one output of gate to the next, and so for up
    first_up: int = 0
    up_bias: int = NO_BIAS  # from the start of a slot
    down_bias: int = NO_BIAS
    bias: int = 0  # the place of their dtype in BIASES


class KernelJob(NamedTuple):
    """What one call computes: integers, for numba. Without a unit, an address."""

    state: int  # next item; items done; by expert: blocks of up done, and whether hidden is ready
    starts: int  # first row of each expert
    stops: int  # one more than its last
    slots: int  # of each expert
    num_experts: int
    x: int  # float32 [P, ...], arranged
    x_is_shared: int  # one row that all experts have
    up: int  # float32 [P, F], twice as wide if gated
    hidden: int  # float32 [P, ...], arranged
    out: int  # float32 [P, D]


@intrinsic  # type: ignore[untyped-decorator]
def _fetch_add(_: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        pointer = b.inttoptr(args[0], I64.as_pointer())
        return b.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(_: Any, address: Any) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def call_rows(
    _: Any, function: Any, first: Any, last: Any, x: Any, out: Any, told: Any, slot: Any
) -> Any:
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 6)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


@cache
def worker() -> Any:
    """_work, compiled."""
    tuples = map(named, (Weights, Arrangement, KernelJob))
    return machine_code(types.int64(*tuples, types.int64, types.int64))(_work)


def _work(weights, places, job, item, waits_for_all):  # type: ignore[no-untyped-def]
    """Take items, from `item` on if it is one that was taken before, until none is left.

    FINISHED, or an item that is not ready yet: sleep and come back with it.
    """
    ups = job.num_experts * weights.num_up
    num_items = ups + job.num_experts * weights.num_down
    if item == FINISHED:
        item = _fetch_add(job.state + 8 * NEXT, 1)
    while item < num_items:
        if item < ups:
            expert = item // weights.num_up
            counter = job.state + 8 * (OF_EXPERTS + LINE * expert)
            block = weights.up_blocks + 8 * BLOCK * (item % weights.num_up)
            x_bytes = 0 if job.x_is_shared else int_at(block, 6)
            _multiply(job, block, expert, job.x, x_bytes, job.up, weights.up_bytes)
            if _fetch_add(counter, 1) == weights.num_up - 1 and weights.num_down:
                _activate(weights, places, job, expert)
                _fetch_add(counter + 8, 1)
        else:
            expert = (item - ups) // weights.num_down
            if not _spin(job.state + 8 * (OF_EXPERTS + LINE * expert + 1), 1):
                return item
            block = weights.down_blocks + 8 * BLOCK * ((item - ups) % weights.num_down)
            _multiply(job, block, expert, job.hidden, int_at(block, 6), job.out, weights.out_bytes)
            if weights.down_bias != NO_BIAS:
                _add_bias(weights, job, block, expert)
        _fetch_add(job.state + 8 * DONE, 1)
        item = _fetch_add(job.state + 8 * NEXT, 1)
    if waits_for_all and not _spin(job.state + 8 * DONE, num_items):
        return num_items
    return FINISHED


@njit(nogil=True)
def _spin(address, value):  # type: ignore[no-untyped-def]
    looks = 0
    while _fetch(address) < value and looks < SPINS:
        looks += 1
    return looks < SPINS


@njit(nogil=True)
def _multiply(job, block, expert, x, x_bytes, out, out_bytes):  # type: ignore[no-untyped-def]
    """A block of rows of a weight with all rows of x that are routed to the expert."""
    p = int_at(job.starts, expert)
    stop = int_at(job.stops, expert)
    slot = int_at(job.slots, expert)
    of_one = int_at(block, 0)
    of_two = int_at(block, 1)
    told = int_at(block, 2)
    first = int_at(block, 3)
    last = int_at(block, 4)
    while p < stop:
        function = of_one
        num_tokens = 1
        if p + 1 < stop:
            function = of_two
            num_tokens = 2
        out_at = out + p * out_bytes + int_at(block, 5)
        call_rows(function, first, last, x + p * x_bytes, out_at, told, slot)
        p += num_tokens


@njit(nogil=True)
def _add_bias(weights, job, block, expert):  # type: ignore[no-untyped-def]
    """To a block of rows of down."""
    bias = int_at(job.slots, expert) + weights.down_bias
    for p in range(int_at(job.starts, expert), int_at(job.stops, expert)):
        row = job.out + p * weights.out_bytes
        for r in range(int_at(block, 3), int_at(block, 4)):
            put_float(row, r, float_at(row, r) + _bias_at(bias, r, weights.bias))


@njit(nogil=True)
def _bias_at(at, index, kind):  # type: ignore[no-untyped-def]
    if kind == 0:
        return float_at(at, index)
    return bfloat_at(at, index) if kind == 1 else half_at(at, index)


@njit(nogil=True)
def _activate(weights, places, job, expert):  # type: ignore[no-untyped-def]
    """What goes into down, of an expert whose up is complete."""
    first = int_at(job.starts, expert)
    stop = int_at(job.stops, expert)
    at = job.up + first * weights.up_bytes
    hidden = job.hidden + first * places.num_steps * places.num_vectors * LANES * 4
    alpha = float_at(weights.numbers, 0)
    shift = float_at(weights.numbers, 1)
    limit = float_at(weights.numbers, 2)
    bias = int_at(job.slots, expert) + weights.up_bias
    for p in range(stop - first):
        row = at + p * weights.up_bytes
        for f in range(places.num_columns):
            i = f * weights.gate_step
            gate = float_at(row, i)
            if weights.up_bias != NO_BIAS:
                gate += _bias_at(bias, i, weights.bias)
            value = _activated(min(gate, limit), weights.function, alpha)
            if weights.is_gated:
                i += weights.first_up
                up = float_at(row, i)
                if weights.up_bias != NO_BIAS:
                    up += _bias_at(bias, i, weights.bias)
                value *= max(min(up, limit), -limit) + shift
            put_float(row, f, value)
    arrange(at, weights.up_bytes, hidden, stop - first, places)


@njit(nogil=True)
def _activated(x, function, alpha):  # type: ignore[no-untyped-def]
    one = np.float32(1)
    half = np.float32(0.5)
    if function == SILU:
        return x / (one + math.exp(-alpha * x))
    if function == GELU:
        return half * x * (one + math.erf(x * np.float32(math.sqrt(0.5))))
    if function == GELU_TANH:
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return half * x * (one + math.tanh(inner))
    return max(x, np.float32(0)) ** 2


@machine_code(types.void(*[types.int64] * 7))
def add_weighted(rows, width, places, weights, top_k, total, num_tokens):  # type: ignore[no-untyped-def]
    """Rows at `places` [T, K], times `weights` [T, K], onto `total` [T, D]: addresses."""
    for pair in range(num_tokens * top_k):
        row = rows + 4 * width * int_at(places, pair)
        weight = float_at(weights, pair)
        onto = total + 4 * width * (pair // top_k)
        for d in range(width):
            put_float(onto, d, float_at(onto, d) + weight * float_at(row, d))


def job_for(
    starts: Sequence[int], stops: Sequence[int], slots: Sequence[int], **rest: int
) -> tuple[KernelJob, array[int]]:
    """With what it has addresses of; `rest` are the other fields but the first."""
    num_experts = len(slots)
    state = OF_EXPERTS + LINE * num_experts
    ints = array("q", bytes(8 * state))
    for values in (starts, stops, slots):
        ints.extend(values)
    at = ints.buffer_info()[0]
    starts_at, stops_at, slots_at = (at + 8 * (state + i * num_experts) for i in range(3))
    return KernelJob(at, starts_at, stops_at, slots_at, num_experts, **rest), ints


class SharedCall:
    """A job that threads enter. It keeps alive what they write to; the caller keeps the slots."""

    def __init__(
        self, weights: Weights, places: Arrangement, job: KernelJob, buffers: tuple[Any, ...]
    ) -> None:
        self._args = weights, places, job
        self._buffers = buffers  # that the job has addresses of; first its state
        self._error: BaseException | None = None  # of a helper

    def run(self, num_threads: int) -> None:
        """Compute the job and return when it is done. Helper threads that are free take part."""
        try:
            worker()  # compiled once, not by every helper
            if num_threads > 1:
                calls = _waiting_calls(os.getpid(), num_threads - 1)
                for _ in range(min(num_threads - 1, MAX_WAITING - calls.qsize())):
                    calls.put(self)
            self._enter(waits_for_all=True)
            if self._error is not None:
                raise self._error
        except BaseException:
            self._buffers[0][NEXT] = STOPPED
            raise

    def help(self) -> None:
        try:
            self._enter(waits_for_all=False)
        except BaseException as error:
            self._error = error

    def _enter(self, *, waits_for_all: bool) -> None:
        work = worker()
        item = work(*self._args, FINISHED, int(waits_for_all))
        while item != FINISHED:
            if self._error is not None:
                raise self._error  # of who took what this waits for, perhaps
            time.sleep(PAUSE_S)
            item = work(*self._args, item, int(waits_for_all))


@cache
def _waiting_calls(pid: int, num_helpers: int) -> SimpleQueue[SharedCall]:
    """Of helpers that sleep until there is one. By process: threads do not survive a fork."""
    calls: SimpleQueue[SharedCall] = SimpleQueue()
    for i in range(num_helpers):
        threading.Thread(target=_help, args=(calls,), name=f"experts-cpu-{i}", daemon=True).start()
    return calls


def _help(calls: SimpleQueue[SharedCall]) -> None:
    while True:
        calls.get().help()
