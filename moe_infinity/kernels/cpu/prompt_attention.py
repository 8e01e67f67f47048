"""Attention of many queries, for prompts: a block of keys after another, so that no score is kept
longer than its block.

    threads take rows: a few queries of all heads of a group, which share its keys
        for each block of keys that one of them sees
            scores    rows x keys           onto registers, in float32
            softmax   as far as it is known: what came before is scaled down
            sums      of values, weighted   onto `out`, in float32

A query sees a band of neighbouring keys: that is what causal masks, windows and padding leave. The
bits of a row depend on nothing but its query and the keys that it sees.

Numbers are float32 or, where the processor multiplies bfloat16 and all are bfloat16, that: sums are
float32 then, too, and the weights of values are rounded, as torch's kernel rounds them. Two cores
of Zen 4 compute 512 queries of 32 heads of 128 in 0.6 of torch's time.

Legend: B sequences, H heads, G heads of keys and values, P heads of a group, T queries, N tokens of
the cache, d width of a head, dv of a value.
"""

from __future__ import annotations

import math
from array import array
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.compiler import (
    c_function,
    has_avx512,
    multiplies_bfloat16,
    reader_of,
)
from moe_infinity.kernels.cpu.team import LINE, fetch_add, num_threads, wait_for
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    all_lanes,
    dot,
    exponential,
    float_at,
    fma,
    int_at,
    larger,
    largest_of_lanes,
    load,
    number_at,
    put_float,
    repeated,
    store,
    sum_of_lanes,
    to_bfloat,
    vector_of,
)
from moe_infinity.system.machine import yield_address

PACKED = 64  # keys that lie beside each other, number by number
KEYS = 256  # of a block: the bits of a sum depend on where it ends
TILE = 6  # rows that registers sum up at once
ROWS = 8 * TILE  # that a thread takes at once
DTYPES = torch.float32, torch.bfloat16, torch.float16
PACKED_NUMBERS = 16 << 20  # copied at once: of queries, keys and values
LOWEST = -1e30  # no score is as low
NEXT, DONE = 0, LINE  # in `PromptJob.state`
STATE = 2 * LINE
SCORES_AT = 2 * 4 * ROWS  # in a thread's memory, behind the largest score and the sum of each row
WEIGHTS_AT = SCORES_AT + 4 * TILE * KEYS
MEMORY = WEIGHTS_AT + 4 * TILE * KEYS


class PromptJob(NamedTuple):
    """What one call computes: integers, for numba. Without a unit, an address."""

    state: int  # next item; items done
    num_items: int
    blocks: int  # items of one group
    rows: int  # of a group: of its queries and heads, one head beside another
    heads: int  # P
    groups: int  # G
    num_queries: int
    query: int  # numbers [B, G, rows, d]
    steps: int  # words of 4 bytes of a query
    keys: int  # words [B, G, N / PACKED, steps, PACKED]
    keys_bytes: int  # of a group
    values: int  # words [B, G, N or N / 2, dv]
    values_bytes: int  # of a group
    num_vectors: int  # of a value
    bounds: int  # int64 [B, T, 2]: the first key that a query sees, and one more than the last
    sinks: int  # float32 [H]; 0: there are none
    scale: int  # float32
    out: int  # float32 [B, G, rows, dv], zeros
    yield_: int  # of the system; see team.py


_job_at = reader_of(PromptJob)


def bounds_of(mask: Tensor | None, num_queries: int, num_keys: int) -> Tensor | None:
    """The keys that queries see by a mask [B, 1, T or 1, N], as `attend_prompt` takes them. It is
    bool, or added: 0 or the lowest number. Without one all do. None: not of a mask that shows a
    query no key, or keys apart from each other, or that has more heads.
    """
    if mask is None:
        return torch.tensor([0, num_keys]).expand(1, num_queries, 2)
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != num_keys:
        return None
    seen = mask[:, 0]
    if seen.dtype != torch.bool:
        seen = seen == 0
        if not (seen | (mask[:, 0] <= torch.finfo(mask.dtype).min)).all():
            return None
    found = seen.numpy()
    first = found.argmax(axis=2)
    last = num_keys - found[:, :, ::-1].argmax(axis=2)
    if (np.count_nonzero(found, axis=2) != last - first).any():
        return None  # where no key is seen, `last` is behind all
    bounds = torch.from_numpy(np.stack([first, last], axis=2).astype(np.int64))
    return bounds.expand(-1, num_queries, -1)


def causal_bounds(num_queries: int) -> Tensor:
    """The keys that queries see of as many keys if none is behind a query."""
    last = torch.arange(1, num_queries + 1, device="cpu")
    return torch.stack([torch.zeros_like(last), last], dim=1)[None]


def attend_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor | None:
    """Attend: [B, H, T, d], [B, G, N, d], [B, G, N, dv] -> [B, T, H, dv]. Query t of a sequence
    sees the keys from bounds[b, t, 0] to bounds[b, t, 1]; int64 [B or 1, T, 2]. Sinks are numbers
    in the softmax that have no value. None: not for these shapes, dtypes or devices.
    """
    num_seqs, num_heads, num_queries, width = query.shape
    num_groups, num_keys, value_width = value.shape[1:]
    alike = query.dtype == key.dtype == value.dtype and query.device.type == "cpu"
    alike &= key.shape == (num_seqs, num_groups, num_keys, width)
    if not alike or query.dtype not in DTYPES:
        return None
    if num_heads % num_groups or width % 2 or value_width % LANES or not num_keys:
        return None
    out = query.new_empty(num_seqs, num_queries, num_heads, value_width)
    bounds = bounds.expand(num_seqs, -1, -1).contiguous()
    sinks = None if sinks_H is None else sinks_H.detach().to(torch.float32)
    per_group = num_heads // num_groups
    packed = num_seqs * (num_keys * (width + value_width) + num_queries * per_group * width)
    at_once = max(1, PACKED_NUMBERS // packed)  # groups
    for first in range(0, num_groups, at_once):
        groups = slice(first, first + at_once)
        heads = slice(first * per_group, (first + at_once) * per_group)
        out[:, :, heads] = _attend(
            query[:, heads], key[:, groups], value[:, groups], bounds, scale,
            None if sinks is None else sinks[heads].contiguous(),
        )  # fmt: skip
    return out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """The same in float32, for some groups."""
    num_seqs, num_heads, num_queries, width = query.shape
    num_groups, _, value_width = value.shape[1:]
    is_half = query.dtype == torch.bfloat16 and multiplies_bfloat16()
    numbers = 2 if is_half else 1  # of a word
    dtype = torch.bfloat16 if is_half else torch.float32
    per_group = num_heads // num_groups
    num_rows = num_queries * per_group
    rows = -(-num_rows // ROWS) * ROWS
    x = torch.zeros(num_seqs, num_groups, rows, width, dtype=dtype, device="cpu")
    own = x[:, :, :num_rows].unflatten(2, (num_queries, per_group))
    own.copy_(query.unflatten(1, (num_groups, per_group)).transpose(2, 3))
    keys = _packed_keys(key, dtype, numbers)
    values = _packed_values(value, dtype, numbers)
    out = host_float32(num_seqs, num_groups, rows, value_width).zero_()
    scales = np.array([scale], np.float32)
    memory = array("q", bytes(8 * (STATE + len(PromptJob._fields))))
    at = memory.buffer_info()[0]
    job = PromptJob(
        state=at,
        num_items=num_seqs * num_groups * (rows // ROWS),
        blocks=rows // ROWS,
        rows=rows,
        heads=per_group,
        groups=num_groups,
        num_queries=num_queries,
        query=x.data_ptr(),
        steps=width // numbers,
        keys=keys.data_ptr(),
        keys_bytes=keys.stride(1) * keys.itemsize,
        values=values.data_ptr(),
        values_bytes=values.stride(1) * values.itemsize,
        num_vectors=value_width // LANES,
        bounds=bounds.data_ptr(),
        sinks=0 if sinks is None else sinks.data_ptr(),
        scale=scales.ctypes.data,
        out=out.data_ptr(),
        yield_=yield_address(),
    )
    memory[STATE:] = array("q", job)
    team.run(_function(is_half).address, at + 8 * STATE, num_threads())
    found: Tensor = out[:, :, :num_rows].unflatten(2, (num_queries, per_group)).transpose(1, 2)
    return found.flatten(2, 3)


def _packed_keys(key: Tensor, dtype: torch.dtype, numbers: int) -> Tensor:
    """[B, G, N, d] -> [B, G, blocks, words of d, PACKED]."""
    num_seqs, num_groups, num_keys, width = key.shape
    words = key.to(dtype).contiguous().view(torch.int32)
    num_whole = num_keys // PACKED
    shape = num_seqs, num_groups, -(-num_keys // PACKED), width // numbers, PACKED
    packed = torch.empty(shape, dtype=torch.int32, device="cpu")
    by_key = packed.transpose(3, 4)
    by_key[:, :, :num_whole] = words[:, :, : num_whole * PACKED].unflatten(2, (num_whole, PACKED))
    if rest := num_keys % PACKED:
        by_key[:, :, -1, :rest] = words[:, :, -rest:]
        by_key[:, :, -1, rest:] = 0
    return packed


def _packed_values(value: Tensor, dtype: torch.dtype, numbers: int) -> Tensor:
    """[B, G, N, dv] -> [B, G, N or pairs of N, dv, 1 or 2], with zeros behind."""
    num_seqs, num_groups, num_keys, width = value.shape
    length = -(-num_keys // PACKED) * PACKED
    shape = num_seqs, num_groups, length // numbers, width, numbers
    packed = torch.empty(shape, dtype=dtype, device="cpu")
    by_key = packed.transpose(3, 4)
    num_whole = num_keys // numbers
    by_key[:, :, :num_whole] = value[:, :, : num_whole * numbers].unflatten(2, (num_whole, numbers))
    by_key[:, :, num_whole:] = 0
    if rest := num_keys % numbers:
        by_key[:, :, num_whole, :rest] = value[:, :, -rest:]
    return packed


def tile_vectors() -> tuple[int, int]:
    """Vectors whose sums fit in registers for TILE rows, and the lanes of each."""
    return (4, LANES) if has_avx512() else (2, LANES // 2)


@cache
def _function(is_half: bool) -> Any:
    """Machine code that takes items until none is left, for pairs of bfloat16 or for float32."""
    half = int(is_half)

    @njit(nogil=True)
    def attend_rows(job, item, memory):  # type: ignore[no-untyped-def]
        group = item // job.blocks
        first = item % job.blocks * ROWS
        bounds = job.bounds + 16 * job.num_queries * (group // job.groups)
        begin = bounds + 16 * (first // job.heads)
        end = bounds + 16 * min((first + ROWS - 1) // job.heads + 1, job.num_queries)
        low, high = int_at(begin, 0), 0
        for at in range(begin, end, 16):
            low = min(low, int_at(at, 0))
            high = max(high, int_at(at, 1))
        for r in range(ROWS):
            put_float(memory, r, np.float32(LOWEST))
            put_float(memory, ROWS + r, np.float32(0))
        row_bytes = 4 * LANES * job.num_vectors
        out = job.out + (group * job.rows + first) * row_bytes
        x = job.query + (group * job.rows + first) * 4 * job.steps
        keys = job.keys + group * job.keys_bytes
        values = job.values + group * job.values_bytes
        scores = memory + SCORES_AT
        weights = memory + WEIGHTS_AT
        scale = float_at(job.scale, 0)
        word_keys = 2 if half else 1
        for base in range(low // KEYS * KEYS, high, KEYS):
            start = max(base, low // PACKED * PACKED)
            stop = min(base + KEYS, (high + PACKED - 1) // PACKED * PACKED)
            for r in range(0, ROWS, TILE):
                for k in range(start, stop, PACKED):
                    tile = keys + k // PACKED * (4 * PACKED * job.steps)
                    of_tile = scores + 4 * (k - start)
                    _score(half, x + r * 4 * job.steps, job.steps, tile, of_tile)
                for i in range(r, r + TILE):
                    t = (first + i) // job.heads
                    lo, hi = 0, 0
                    if t < job.num_queries:
                        lo = int_at(bounds, 2 * t) - start
                        hi = int_at(bounds, 2 * t + 1) - start
                    of_row = scores + 4 * KEYS * (i - r)
                    to = weights + 4 * KEYS * (i - r)
                    at = memory + 4 * i
                    _weigh_row(
                        half, of_row, stop - start, lo, hi, scale, at, to,
                        out + i * row_bytes, job.num_vectors,
                    )  # fmt: skip
                of_block = values + start // word_keys * row_bytes
                steps = (stop - start) // word_keys
                _add_values(half, weights, steps, of_block, job.num_vectors, out + r * row_bytes)
        for r in range(ROWS):
            sink = np.float32(-np.inf)
            if job.sinks:
                head = group % job.groups * job.heads + (first + r) % job.heads
                sink = float_at(job.sinks, head)
            peak = float_at(memory, r)
            top = max(peak, sink)
            share = math.exp(peak - top)
            total = float_at(memory, ROWS + r) * share + math.exp(sink - top)
            share = share / total if total > 0 else np.float32(0)
            at = out + r * row_bytes
            for k in range(LANES * job.num_vectors):
                put_float(at, k, float_at(at, k) * share)

    @c_function(types.void(types.int64), f"attend_prompt_{half}")
    def function(call: int) -> None:
        job = _job_at(call)
        memory = _stack()
        item = fetch_add(job.state + 8 * NEXT, 1)
        while item < job.num_items:
            attend_rows(job, item, memory)
            fetch_add(job.state + 8 * DONE, 1)
            item = fetch_add(job.state + 8 * NEXT, 1)
        wait_for(job.state + 8 * DONE, job.num_items, job.yield_)

    return function


@intrinsic  # type: ignore[untyped-decorator]
def _stack(_: Any) -> Any:
    """The address of a thread's memory, which begins with a cache line."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(I8, MEMORY + 64))
        return b.and_(b.add(b.ptrtoint(memory, I64), I64(63)), I64(-64))

    return types.int64(), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _score(_: Any, is_half: Any, x: Any, steps: Any, keys: Any, scores: Any) -> Any:
    """Store the products of TILE rows with PACKED keys."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _, x, steps, keys, scores = args
        row_bytes = b.mul(steps, I64(4))
        count, lanes = tile_vectors()
        with cgutils.for_range_slice(
            b, I64(0), I64(4 * PACKED), I64(4 * count * lanes), intp=I64
        ) as (offset, _):
            sums = _emit_tile(
                b, is_half.literal_value, x, row_bytes, steps, b.add(keys, offset), I64(4 * PACKED),
                _zeros(b, count, lanes),
            )  # fmt: skip
            for r, of_row in enumerate(sums):
                for v, total in enumerate(of_row):
                    at = b.add(b.add(scores, offset), I64(4 * (KEYS * r + lanes * v)))
                    store(b, b.load(total), at)
        return context.get_dummy_value()

    return types.void(is_half, *[types.int64] * 4), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _add_values(
    _: Any, is_half: Any, weights: Any, steps: Any, values: Any, num_vectors: Any, out: Any
) -> Any:
    """Add the values of a block, weighted, to TILE rows of `out`."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _, weights, steps, values, num_vectors, out = args
        row_bytes = b.mul(num_vectors, I64(4 * LANES))
        most, lanes = tile_vectors()
        count = b.mul(num_vectors, I64(LANES // lanes))
        rest = b.urem(count, I64(most))
        whole = b.sub(count, rest)

        def emit_tile(vectors: int, first: Any) -> None:
            offset = b.mul(first, I64(4 * lanes))
            places = [
                [b.add(b.add(b.add(out, b.mul(row_bytes, I64(r))), offset), I64(4 * lanes * v))
                 for v in range(vectors)]
                for r in range(TILE)
            ]  # fmt: skip
            sums = _emit_tile(
                b, is_half.literal_value, weights, I64(4 * KEYS), steps, b.add(values, offset),
                row_bytes, _zeros(b, vectors, lanes),
            )  # fmt: skip
            for of_row, totals in zip(places, sums, strict=True):
                for at, total in zip(of_row, totals, strict=True):
                    store(b, b.fadd(b.load(total), load(b, at, 0, F32, lanes)), at)

        with cgutils.for_range_slice(b, I64(0), whole, I64(most), intp=I64) as (first, _):
            emit_tile(most, first)
        for vectors in range(1, most):
            with b.if_then(b.icmp_signed("==", rest, I64(vectors))):
                emit_tile(vectors, whole)
        return context.get_dummy_value()

    return types.void(is_half, *[types.int64] * 5), emit


def _zeros(b: Any, count: int, lanes: int) -> list[list[Any]]:
    kind = vector_of(F32, lanes)
    sums = [[cgutils.alloca_once(b, kind) for _ in range(count)] for _ in range(TILE)]
    for of_row in sums:
        for total in of_row:
            b.store(kind(None), total)
    return sums


def _emit_tile(
    b: Any, is_half: int, x: Any, row_bytes: Any, steps: Any, y: Any, step_bytes: Any,
    sums: list[list[Any]],
) -> list[list[Any]]:  # fmt: skip
    """Emit, for each word of a step, sums[r][v] += x[r, step] times y[step, v], and return the
    sums.
    """
    lanes = sums[0][0].type.pointee.count
    kind = I32 if is_half else F32
    rows = [b.add(x, b.mul(row_bytes, I64(r))) for r in range(TILE)]
    with cgutils.for_range(b, steps, intp=I64) as each:
        at = b.add(y, b.mul(each.index, step_bytes))
        vectors = [load(b, at, 4 * lanes * v, kind, lanes) for v in range(len(sums[0]))]
        offset = b.mul(each.index, I64(4))
        for row, totals in zip(rows, sums, strict=True):
            word = repeated(b, number_at(b, b.add(row, offset), 0, kind), lanes)
            for vector, total in zip(vectors, totals, strict=True):
                times = dot if is_half else fma
                b.store(times(b, word, vector, b.load(total)), total)
    return sums


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _weigh_row(
    _: Any, is_half: Any, scores: Any, count: Any, low: Any, high: Any, scale: Any, state: Any,
    weights: Any, out: Any, num_vectors: Any,
) -> Any:  # fmt: skip
    """Make weights of the scores of a row, of which it sees those from `low` to `high`, relative to
    the largest score so far. What the row has summed up is scaled by how much that has grown.
    """

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        _, scores, count, low, high, scale, state, weights, out, num_vectors = args
        own = repeated(b, number_at(b, state, 0, F32))
        scales = repeated(b, scale)
        lanes = ir.Constant(vector_of(I64), [*range(LANES)])
        largest = cgutils.alloca_once_value(b, own)
        steps = b.udiv(count, I64(LANES))
        with cgutils.for_range(b, steps, intp=I64) as each:
            at = b.add(scores, b.mul(each.index, I64(4 * LANES)))
            places = b.add(lanes, repeated(b, b.mul(each.index, I64(LANES))))
            is_seen = b.and_(
                b.icmp_signed(">=", places, repeated(b, low)),
                b.icmp_signed("<", places, repeated(b, high)),
            )
            score = b.fmul(load(b, at, 0, F32), scales)
            score = b.select(is_seen, score, all_lanes(F32, -math.inf))
            store(b, score, at)
            b.store(larger(b, score, b.load(largest)), largest)
        peak = repeated(b, largest_of_lanes(b, b.load(largest)))
        share = exponential(b, b.fsub(own, peak))
        total = cgutils.alloca_once_value(b, FLOATS(None))
        with cgutils.for_range(b, steps, intp=I64) as each:
            offset = b.mul(each.index, I64(4 * LANES))
            weight = exponential(b, b.fsub(load(b, b.add(scores, offset), 0, F32), peak))
            b.store(b.fadd(weight, b.load(total)), total)
            if is_half.literal_value:
                weight = to_bfloat(b, weight)
                offset = b.udiv(offset, I64(2))
            store(b, weight, b.add(weights, offset))
        pointer = b.inttoptr(state, F32.as_pointer())
        first = b.extract_element(share, I32(0))
        before = number_at(b, state, 4 * ROWS, F32)
        now = b.fadd(b.fmul(before, first), sum_of_lanes(b, b.load(total)))
        b.store(now, b.inttoptr(b.add(state, I64(4 * ROWS)), F32.as_pointer()))
        b.store(b.extract_element(peak, I32(0)), pointer)
        is_scaled = b.fcmp_ordered("!=", first, F32(1))
        with b.if_then(is_scaled), cgutils.for_range(b, num_vectors, intp=I64) as each:
            at = b.add(out, b.mul(each.index, I64(4 * LANES)))
            store(b, b.fmul(load(b, at, 0, F32), share), at)
        return context.get_dummy_value()

    ints = [types.int64] * 4
    return types.void(is_half, *ints, types.float32, *ints), emit
