"""The work of one call of experts.py, in machine code that all threads of a team run at once.

    items    expert 0: blocks of up, expert 1: ..., then expert 0: blocks of down, expert 1: ...

A free thread takes the next item. The thread that finishes an expert's last block of up also
computes the input of its down. Usually that is done before the first block of its down is taken.

Legend: P rows of all experts, sorted by expert, F expert width.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.activations import activate_lanes
from moe_infinity.kernels.cpu.compiler import c_function, machine_code, reader_of
from moe_infinity.kernels.cpu.steps import Arrangement, arrange
from moe_infinity.kernels.cpu.team import LINE, fetch_add, wait_for
from moe_infinity.kernels.cpu.vectors import (
    I64,
    LANES,
    bfloat_at,
    float_at,
    half_at,
    int_at,
    put_bfloat,
    put_float,
    put_half,
)
from moe_infinity.system.processes import yield_address

BIASES = ("float32", "bfloat16", "float16")
NO_BIAS = -1
NEXT = 0
DONE = LINE
OF_EXPERTS = 2 * LINE  # in KernelJob.state
BLOCK = 7  # int64s; see Weights


class Weights(NamedTuple):
    """Where things are in a slot, the same for all experts: integers, for numba. A block is seven
    numbers: the addresses of a row function and of KernelArguments; its first row, and one more
    than its last; its offset in a row of out; the bytes of a row of x, and its offset there. A
    single product has an up and nothing else.
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
    yield_: int  # of the system; see team.py


@intrinsic  # type: ignore[untyped-decorator]
def call_rows(
    _: Any, function: Any, first: Any, last: Any, x: Any, num_tokens: Any, out: Any,
    arguments: Any, slot: Any,
) -> Any:  # fmt: skip
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 7)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


_weights_at = reader_of(Weights)
_places_at = reader_of(Arrangement)
_job_at = reader_of(KernelJob)


@njit(nogil=True)
def multiply(block, slot, p, stop, x, x_bytes, out, out_bytes):  # type: ignore[no-untyped-def]
    """Multiply a block of rows of a weight in this slot by rows of x, from p to stop."""
    x += p * x_bytes + int_at(block, 6)
    out += p * out_bytes + int_at(block, 4)
    first = int_at(block, 2)
    last = int_at(block, 3)
    call_rows(int_at(block, 0), first, last, x, stop - p, out, int_at(block, 1), slot)


@njit(nogil=True)
def _add_bias(rows, row_bytes, num_rows, bias, dtype, first, last):  # type: ignore[no-untyped-def]
    """To outputs from first to last of so many rows."""
    for p in range(num_rows):
        row = rows + p * row_bytes
        for r in range(first, last):
            put_float(row, r, float_at(row, r) + value_at(bias, r, dtype))


@njit(nogil=True)
def value_at(at, index, dtype):  # type: ignore[no-untyped-def]
    """In float32, from an array whose dtype is number `dtype` of BIASES."""
    if dtype == 0:
        return float_at(at, index)
    return bfloat_at(at, index) if dtype == 1 else half_at(at, index)


@njit(nogil=True)
def put_number(at, index, value, dtype):  # type: ignore[no-untyped-def]
    """Rounded to dtype number `dtype` of BIASES."""
    if dtype == 0:
        put_float(at, index, value)
    elif dtype == 1:
        put_bfloat(at, index, value)
    else:
        put_half(at, index, value)


@njit(nogil=True)
def _activate(weights, places, job, expert):  # type: ignore[no-untyped-def]
    """The input of down, for an expert whose up is complete."""
    first = int_at(job.starts, expert)
    num_rows = int_at(job.stops, expert) - first
    at = job.up + first * weights.up_bytes
    hidden = job.hidden + first * places.row_bytes
    if weights.up_bias != NO_BIAS:
        bias = int_at(job.slots, expert) + weights.up_bias
        num_up = weights.up_bytes // 4
        _add_bias(at, weights.up_bytes, num_rows, bias, weights.bias, 0, num_up)
    up = weights.first_up if weights.is_gated else 0
    width = places.num_columns
    for p in range(num_rows):
        row = at + p * weights.up_bytes
        for f in range(0, width, LANES):
            activate_lanes(
                row, f, width - f, up, weights.gate_step, weights.function, weights.numbers
            )
    arrange(at, weights.up_bytes, hidden, num_rows, places)


@machine_code(types.void(*[types.int64] * 7))
def add_weighted(rows, width, row_of, weights, top_k, total, num_tokens):  # type: ignore[no-untyped-def]
    """Add rows `row_of` [T, K], times `weights` [T, K], to `total` [T, D]: addresses. A pair whose
    row is negative has none.
    """
    for pair in range(num_tokens * top_k):
        if int_at(row_of, pair) < 0:
            continue
        row = rows + 4 * width * int_at(row_of, pair)
        weight = float_at(weights, pair)
        onto = total + 4 * width * (pair // top_k)
        for d in range(width):
            put_float(onto, d, float_at(onto, d) + weight * float_at(row, d))


@c_function(types.void(types.int64), "experts")
def experts(call: int) -> None:
    """Take items until none is left, and wait until all are done. At the address `call` are the
    addresses of Weights and of an Arrangement, then a KernelJob.
    """
    weights = _weights_at(int_at(call, 0))
    places = _places_at(int_at(call, 1))
    job = _job_at(call + 16)
    ups = job.num_experts * weights.num_up
    num_items = ups + job.num_experts * weights.num_down
    item = fetch_add(job.state + 8 * NEXT, 1)
    while item < num_items:
        if item < ups:
            expert = item // weights.num_up
            counter = job.state + 8 * (OF_EXPERTS + LINE * expert)
            block = weights.up_blocks + 8 * BLOCK * (item % weights.num_up)
            x_bytes = 0 if job.x_is_shared else int_at(block, 5)
            slot = int_at(job.slots, expert)
            p = int_at(job.starts, expert)
            stop = int_at(job.stops, expert)
            multiply(block, slot, p, stop, job.x, x_bytes, job.up, weights.up_bytes)
            if fetch_add(counter, 1) == weights.num_up - 1 and weights.num_down:
                _activate(weights, places, job, expert)
                fetch_add(counter + 8, 1)
        else:
            expert = (item - ups) // weights.num_down
            wait_for(job.state + 8 * (OF_EXPERTS + LINE * expert + 1), 1, job.yield_)
            block = weights.down_blocks + 8 * BLOCK * ((item - ups) % weights.num_down)
            slot = int_at(job.slots, expert)
            p = int_at(job.starts, expert)
            stop = int_at(job.stops, expert)
            x_bytes = int_at(block, 5)
            multiply(block, slot, p, stop, job.hidden, x_bytes, job.out, weights.out_bytes)
            if weights.down_bias != NO_BIAS:
                bias = slot + weights.down_bias
                at = job.out + p * weights.out_bytes
                first = int_at(block, 2)
                last = int_at(block, 3)
                _add_bias(at, weights.out_bytes, stop - p, bias, weights.bias, first, last)
        fetch_add(job.state + 8 * DONE, 1)
        item = fetch_add(job.state + 8 * NEXT, 1)
    wait_for(job.state + 8 * DONE, num_items, job.yield_)


def run_job(
    weights: array[int],
    places: array[int],
    starts: Sequence[int],
    stops: Sequence[int],
    slots: Sequence[int],
    *,
    num_threads: int,
    **rest: int,
) -> None:
    """Compute a job. `rest` are the fields of KernelJob from `x` to `out`. The memory at their
    addresses has to stay until this returns.
    """
    num_experts = len(slots)
    num_state = OF_EXPERTS + LINE * num_experts
    memory = array("q", bytes(8 * num_state))
    for values in (starts, stops, slots):
        memory.extend(values)
    # Grows no more from here on: its address is taken.
    memory.extend([0] * (2 + len(KernelJob._fields)))
    at = memory.buffer_info()[0]
    lists = [at + 8 * (num_state + i * num_experts) for i in range(4)]
    job = KernelJob(
        state=at,
        starts=lists[0],
        stops=lists[1],
        slots=lists[2],
        num_experts=num_experts,
        yield_=yield_address(),
        **rest,
    )
    call = num_state + 3 * num_experts
    memory[call:] = array("q", [weights.buffer_info()[0], places.buffer_info()[0], *job])
    team.run(experts.address, lists[3], num_threads)
