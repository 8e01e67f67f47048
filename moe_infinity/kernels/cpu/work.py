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
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.activations import activate_lanes
from moe_infinity.kernels.cpu.arrangement import Arrangement, arrange
from moe_infinity.kernels.cpu.compiler import c_function, machine_code, reader_of
from moe_infinity.kernels.cpu.steps import NUM_ARGUMENTS, NUM_PARTS
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
from moe_infinity.system.machine import yield_address

BIASES = ("float32", "bfloat16", "float16")
BIAS_BYTES = (4, 2, 2)
NO_BIAS = -1
NEXT = 0
DONE = LINE
OF_EXPERTS = 2 * LINE  # in KernelJob.state
JOB_AT = 2  # int64s in front of a KernelJob: addresses of an ExpertMlp and of an Arrangement


class RowBlock(NamedTuple):
    """Rows of a weight that one thread multiplies at once: integers, for numba."""

    function: int  # address of a row function; see rows.py
    arguments: int  # address of KernelArguments
    first: int  # row
    last: int  # one more than the last row
    out_offset: int  # of the weight in a row of out, in bytes
    x_bytes: int  # of a row of x
    x_offset: int  # of the weight's arrangement in a row of x, in bytes


class ExpertMlp(NamedTuple):
    """The MLP of an expert, the same for all of a layer but for where its parts lie: integers, for
    numba. A single product has an up and nothing else.
    """

    up_blocks: int  # address of RowBlocks
    num_up: int
    up_bytes: int  # of a row of up's outputs
    down_blocks: int = 0  # address of RowBlocks
    num_down: int = 0
    out_bytes: int = 0  # of a row of down's outputs
    function: int = 0  # the index of its name in FUNCTIONS
    is_gated: int = 0
    numbers: int = 0  # address of three: alpha, shift and limit
    gate_step: int = 0  # from one output of gate to the next, and so for up
    first_up: int = 0
    up_bias: int = NO_BIAS  # number of the part
    second_row: int = 0  # of up, from which on outputs get another bias
    second_bias: int = NO_BIAS
    down_bias: int = NO_BIAS
    bias: int = 0  # the index of their dtype in BIASES


class KernelJob(NamedTuple):
    """The experts that one call computes: integers, for numba. Without a unit, an address."""

    state: int  # next item; items done; by expert: blocks of up done, and whether hidden is ready
    starts: int  # first row of each expert
    stops: int  # one more than its last
    tables: int  # of each expert the address of its table: addresses of parts; 0: without a table
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
    """Call a function of seven integers, as row functions are."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 7)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


@intrinsic  # type: ignore[untyped-decorator]
def call_rows_at(
    _: Any, function: Any, first: Any, last: Any, x: Any, num_tokens: Any, out: Any,
    arguments: Any, table: Any,
) -> Any:  # fmt: skip
    """Call a row function for a weight whose KernelArguments have the numbers of its parts in place
    of their addresses, which are in a table.
    """

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        function, *before, arguments, table = args
        own = cgutils.alloca_once(b, ir.ArrayType(I64, NUM_ARGUMENTS))
        for k in range(NUM_ARGUMENTS):
            value = _int64_at(b, arguments, I64(k))
            if k < NUM_PARTS:
                value = _int64_at(b, table, value)
            b.store(value, b.gep(own, [I64(0), I64(k)]))
        kind = ir.FunctionType(ir.VoidType(), [I64] * 7)
        b.call(b.inttoptr(function, kind.as_pointer()), [*before, b.ptrtoint(own, I64), I64(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


def _int64_at(b: Any, at: Any, index: Any) -> Any:
    return b.load(b.inttoptr(b.add(at, b.mul(index, I64(8))), I64.as_pointer()))


BLOCK_BYTES = 8 * len(RowBlock._fields)
block_at = reader_of(RowBlock)
_mlp_at = reader_of(ExpertMlp)
_arrangement_at = reader_of(Arrangement)
_job_at = reader_of(KernelJob)


@njit(nogil=True)
def multiply(block, table, p, stop, x, x_bytes, out, out_bytes):  # type: ignore[no-untyped-def]
    """Multiply a RowBlock of a weight, with its parts in this table, by rows of x, from p to
    stop. Without a table, 0, its arguments have the addresses.
    """
    x += p * x_bytes + block.x_offset
    out += p * out_bytes + block.out_offset
    count = stop - p
    if table == 0:
        call_rows(block.function, block.first, block.last, x, count, out, block.arguments, 0)
        return
    call_rows_at(block.function, block.first, block.last, x, count, out, block.arguments, table)


@njit(nogil=True)
def _add_bias(rows, row_bytes, num_rows, bias, dtype, first, last):  # type: ignore[no-untyped-def]
    """Add the bias to the outputs from first to last of `num_rows` rows."""
    for p in range(num_rows):
        row = rows + p * row_bytes
        for r in range(first, last):
            put_float(row, r, float_at(row, r) + value_at(bias, r, dtype))


@njit(nogil=True)
def value_at(at, index, dtype):  # type: ignore[no-untyped-def]
    """A value in float32, from an array whose dtype is number `dtype` of BIASES."""
    if dtype == 0:
        return float_at(at, index)
    return bfloat_at(at, index) if dtype == 1 else half_at(at, index)


@njit(nogil=True)
def put_number(at, index, value, dtype):  # type: ignore[no-untyped-def]
    """Write a value, rounded to dtype number `dtype` of BIASES."""
    if dtype == 0:
        put_float(at, index, value)
    elif dtype == 1:
        put_bfloat(at, index, value)
    else:
        put_half(at, index, value)


@njit(nogil=True)
def _activate(mlp, arrangement, job, expert):  # type: ignore[no-untyped-def]
    """Compute the input of down, for an expert whose up is complete."""
    first = int_at(job.starts, expert)
    num_rows = int_at(job.stops, expert) - first
    at = job.up + first * mlp.up_bytes
    hidden = job.hidden + first * arrangement.row_bytes
    if mlp.up_bias != NO_BIAS:
        table = int_at(job.tables, expert)
        num_up = mlp.up_bytes // 4
        stop = num_up if mlp.second_bias == NO_BIAS else mlp.second_row
        bias = int_at(table, mlp.up_bias)
        _add_bias(at, mlp.up_bytes, num_rows, bias, mlp.bias, 0, stop)
        if stop < num_up:
            bias = int_at(table, mlp.second_bias) - stop * BIAS_BYTES[mlp.bias]
            _add_bias(at, mlp.up_bytes, num_rows, bias, mlp.bias, stop, num_up)
    up = mlp.first_up if mlp.is_gated else 0
    width = arrangement.num_columns
    for p in range(num_rows):
        row = at + p * mlp.up_bytes
        for f in range(0, width, LANES):
            activate_lanes(row, f, width - f, up, mlp.gate_step, mlp.function, mlp.numbers)
    arrange(at, mlp.up_bytes, hidden, num_rows, arrangement)


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
    addresses of an ExpertMlp and of an Arrangement, then a KernelJob.
    """
    mlp = _mlp_at(int_at(call, 0))
    arrangement = _arrangement_at(int_at(call, 1))
    job = _job_at(call + 8 * JOB_AT)
    ups = job.num_experts * mlp.num_up
    num_items = ups + job.num_experts * mlp.num_down
    item = fetch_add(job.state + 8 * NEXT, 1)
    while item < num_items:
        if item < ups:
            expert = item // mlp.num_up
            counter = job.state + 8 * (OF_EXPERTS + LINE * expert)
            block = block_at(mlp.up_blocks + BLOCK_BYTES * (item % mlp.num_up))
            x_bytes = 0 if job.x_is_shared else block.x_bytes
            table = int_at(job.tables, expert)
            p = int_at(job.starts, expert)
            stop = int_at(job.stops, expert)
            multiply(block, table, p, stop, job.x, x_bytes, job.up, mlp.up_bytes)
            if fetch_add(counter, 1) == mlp.num_up - 1 and mlp.num_down:
                _activate(mlp, arrangement, job, expert)
                fetch_add(counter + 8, 1)
        else:
            expert = (item - ups) // mlp.num_down
            wait_for(job.state + 8 * (OF_EXPERTS + LINE * expert + 1), 1, job.yield_)
            block = block_at(mlp.down_blocks + BLOCK_BYTES * ((item - ups) % mlp.num_down))
            table = int_at(job.tables, expert)
            p = int_at(job.starts, expert)
            stop = int_at(job.stops, expert)
            multiply(block, table, p, stop, job.hidden, block.x_bytes, job.out, mlp.out_bytes)
            if mlp.down_bias != NO_BIAS:
                bias = int_at(table, mlp.down_bias)
                at = job.out + p * mlp.out_bytes
                _add_bias(at, mlp.out_bytes, stop - p, bias, mlp.bias, block.first, block.last)
        fetch_add(job.state + 8 * DONE, 1)
        item = fetch_add(job.state + 8 * NEXT, 1)
    wait_for(job.state + 8 * DONE, num_items, job.yield_)


def run_job(
    mlp: array[int],
    arrangement: array[int],
    starts: Sequence[int],
    stops: Sequence[int],
    tables: Sequence[int],
    *,
    num_threads: int,
    **rest: int,
) -> None:
    """Compute a job. `rest` are the fields of KernelJob from `x` to `out`. The memory at their
    addresses has to stay until this returns.
    """
    num_experts = len(tables)
    num_state = OF_EXPERTS + LINE * num_experts
    memory = array("q", bytes(8 * num_state))
    for values in (starts, stops, tables):
        memory.extend(values)
    # Grows no more from here on: its address is taken.
    memory.extend([0] * (JOB_AT + len(KernelJob._fields)))
    at = memory.buffer_info()[0]
    first = at + 8 * num_state
    job = KernelJob(
        state=at,
        starts=first,
        stops=first + 8 * num_experts,
        tables=first + 16 * num_experts,
        num_experts=num_experts,
        yield_=yield_address(),
        **rest,
    )
    call = num_state + 3 * num_experts
    memory[call:] = array("q", [mlp.buffer_info()[0], arrangement.buffer_info()[0], *job])
    team.run(experts.address, at + 8 * call, num_threads)
