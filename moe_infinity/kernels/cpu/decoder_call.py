"""The parts of a decoder layer around its experts, for one new token of each sequence, in one call:

    norm       of the residual
    products   queries, keys and values                         items: blocks of rows
    attention  biases, norms of heads, rotation, keys and       items: a head of keys of a sequence
               values into the cache, scores, softmax, sum,
               times the gate; or linear attention, which
               delta_rule.py has
    product    of the heads' outputs                            items: blocks of rows
    residual   the sum, and its norm: what the experts get
    router     the product of the norm with its weight          items: blocks of rows
    choice     each sequence's experts; see routed.py             items: sequences
    shared     the last product of a shared expert;             items: blocks of rows
               see shared_expert.py

All threads of a team enter, and meet after each stage. Everything is summed in float32. Rounded to
the model's dtype are the residual and its norm, and the keys and values that the cache keeps unless
they are packed (put_row.py).

layer_call.py has the numbers that a call gets. Legend: B sequences, D model width, H heads, G heads
of keys and values, N tokens of the cache with the new one, d width of a head, v of its values.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from numba import njit, types

from moe_infinity.kernels.cpu.arrangement import Arrangement, arrange
from moe_infinity.kernels.cpu.attention import weigh
from moe_infinity.kernels.cpu.compiler import c_function, reader_of
from moe_infinity.kernels.cpu.layer_call import (
    KEY_EPS,
    NEIGHBOURS,
    NORM_EPS,
    NORM_OF_ALL,
    NORM_OF_HEADS,
    QUERY_EPS,
    RESIDUAL_EPS,
    SCORE_SCALE,
    LayerCall,
)
from moe_infinity.kernels.cpu.put_row import put_row
from moe_infinity.kernels.cpu.routed import choose
from moe_infinity.kernels.cpu.team import LINE, fetch_add, wait_for
from moe_infinity.kernels.cpu.vectors import LANES, float_at, put_float, sigmoid
from moe_infinity.kernels.cpu.work import (
    BLOCK_BYTES,
    block_at,
    call_rows,
    multiply,
    put_number,
    value_at,
)

# The stages that all threads of a team pass together, in this order.
NORM, PROJECTIONS, HEADS, ARRANGE, OUTPUT, RESIDUAL, LOGITS, CHOICE, SHARED = range(9)
STATE = (SHARED + 1) * 2 * LINE  # int64s: of each stage the next item, and how many are done

layer_call_at = reader_of(LayerCall)
_arrangement_at = reader_of(Arrangement)


@njit(nogil=True)
def take(state, stage):  # type: ignore[no-untyped-def]
    """Return the number of the next item of a stage."""
    return fetch_add(state + 8 * LINE * 2 * stage, 1)


@njit(nogil=True)
def finish(state, stage):  # type: ignore[no-untyped-def]
    """Count an item as done."""
    fetch_add(state + 8 * LINE * (2 * stage + 1), 1)


@njit(nogil=True)
def meet(state, stage, num_items, yield_):  # type: ignore[no-untyped-def]
    """Wait until all items of a stage are done."""
    wait_for(state + 8 * LINE * (2 * stage + 1), num_items, yield_)


@njit(nogil=True, fastmath={"reassoc", "contract"})
def _sum_of_squares(at, count):  # type: ignore[no-untyped-def]
    total = types.float32(0)
    for i in range(count):
        value = float_at(at, i)
        total += value * value
    return total


@njit(nogil=True)
def _scale_of_norm(at, count, eps):  # type: ignore[no-untyped-def]
    mean = _sum_of_squares(at, count) / types.float32(count)
    return types.float32(1) / math.sqrt(mean + eps)


@njit(nogil=True)
def _scale(at, count, factor, weight):  # type: ignore[no-untyped-def]
    for i in range(count):
        put_float(at, i, float_at(at, i) * factor * float_at(weight, i))


@njit(nogil=True)
def _add(at, other, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        put_float(at, i, float_at(at, i) + float_at(other, i))


@njit(nogil=True)
def _rotate(at, cos, sin, rotated, pairs):  # type: ignore[no-untyped-def]
    half = rotated // 2
    step = 2 if pairs == NEIGHBOURS else 1
    apart = 1 if pairs == NEIGHBOURS else half
    for i in range(half):
        first = float_at(at, i * step)
        second = float_at(at, i * step + apart)
        put_float(at, i * step, first * float_at(cos, i) - second * float_at(sin, i))
        put_float(at, i * step + apart, second * float_at(cos, i) + first * float_at(sin, i))


@njit(nogil=True)
def _begin(call):  # type: ignore[no-untyped-def]
    """Compute the norm of x, arranged."""
    for seq in range(call.num_seqs):
        row = call.hidden + 4 * call.width * seq
        for i in range(call.width):
            put_float(row, i, value_at(call.x, seq * call.width + i, call.dtype))
        scale = _scale_of_norm(row, call.width, float_at(call.numbers, NORM_EPS))
        _scale(row, call.width, scale, call.norm)
    arrangement = _arrangement_at(call.x_arrangement)
    arrange(call.hidden, 4 * call.width, call.arranged, call.num_seqs, arrangement)


@njit(nogil=True)
def _keep(call, at, count, to):  # type: ignore[no-untyped-def]
    """Write a key or value into the cache, which is packed or has the dtype of x."""
    if call.packing:
        put_row(at, count, to, call.packing)
        return
    for i in range(count):
        put_number(to, i, float_at(at, i), call.dtype)


@njit(nogil=True)
def _make_head(call, at, seq, is_query, norm, eps, scale_of_all, head):  # type: ignore[no-untyped-def]
    """Apply the norm and the rotation to one head of queries or keys."""
    if call.norms == NORM_OF_HEADS:
        _scale(at, call.head_width, _scale_of_norm(at, call.head_width, eps), norm)
    elif call.norms == NORM_OF_ALL:
        _scale(at, call.head_width, scale_of_all, norm + 4 * call.head_width * head)
    angle = call.angle_bytes * seq
    _rotate(at, call.cos + angle, call.sin + angle, call.rotated, call.pairs)
    if is_query:
        scale = float_at(call.numbers, SCORE_SCALE)
        for i in range(call.head_width):
            put_float(at, i, float_at(at, i) * scale)


@njit(nogil=True)
def _make_heads(call, seq, group):  # type: ignore[no-untyped-def]
    """Make the queries and the key of one head of keys: queries arranged, key and value in the
    cache.
    """
    num_heads = call.num_groups * call.per_group
    row = call.heads + 4 * call.num_columns * seq
    first_key = row + 4 * num_heads * call.query_step
    value = first_key + 4 * call.num_groups * call.head_width + 4 * group * call.value_width
    key = first_key + 4 * group * call.head_width
    first = group * call.per_group
    queries = row + 4 * first * call.query_step
    if call.bias:
        key_bias = call.bias + (key - row)
        _add(queries, call.bias + (queries - row), call.per_group * call.query_step)
        _add(key, key_bias, call.head_width)
        _add(value, call.bias + (value - row), call.value_width)
    query_eps = float_at(call.numbers, QUERY_EPS)
    key_eps = float_at(call.numbers, KEY_EPS)
    of_queries = types.float32(0)
    of_keys = types.float32(0)
    if call.norms == NORM_OF_ALL:
        of_queries = _scale_of_norm(row, num_heads * call.head_width, query_eps)
        of_keys = _scale_of_norm(first_key, call.num_groups * call.head_width, key_eps)
    last = call.num_tokens - 1
    # Norms of all read what these change: the key is made in memory of its own.
    own = call.scores + call.score_bytes * (seq * num_heads + first)
    for i in range(call.head_width):
        put_float(own, i, float_at(key, i))
    _make_head(call, own, seq, 0, call.key_norm, key_eps, of_keys, group)
    at = call.key + call.key_seq * seq + call.key_head * group + call.key_row * last
    _keep(call, own, call.head_width, at)
    at = call.value + call.value_seq * seq + call.value_head * group + call.value_row * last
    _keep(call, value, call.value_width, at)
    arrangement = _arrangement_at(call.query_arrangement)
    query_bytes = arrangement.row_bytes
    for head in range(first, first + call.per_group):
        for i in range(call.head_width):
            put_float(own, i, float_at(row, head * call.query_step + i))
        _make_head(call, own, seq, 1, call.query_norm, query_eps, of_queries, head)
        to = call.queries + query_bytes * (seq * num_heads + head)
        arrange(own, 4 * call.head_width, to, 1, arrangement)


@njit(nogil=True)
def _gate(call, seq, head, at):  # type: ignore[no-untyped-def]
    """Multiply what a head attended to with the sigmoid of its gate, if it has one."""
    if call.query_step > call.head_width:
        gate = call.heads + 4 * (call.num_columns * seq + head * call.query_step + call.head_width)
        for i in range(call.value_width):
            put_float(at, i, float_at(at, i) * sigmoid(float_at(gate, i)))


@njit(nogil=True)
def _score(call, seq, group):  # type: ignore[no-untyped-def]
    """Multiply the queries of one head of keys with all keys. Returns the vectors of a query's
    scores.
    """
    num_heads = call.num_groups * call.per_group
    arrangement = _arrangement_at(call.query_arrangement)
    query_bytes = arrangement.row_bytes
    keys = call.key + call.key_seq * seq + call.key_head * group
    count = call.num_tokens + (1 if call.sinks else 0)
    num_vectors = -(-count // LANES)
    first = seq * num_heads + group * call.per_group
    queries = call.queries + query_bytes * first
    at = call.scores + call.score_bytes * first
    call_rows(call.score, 0, call.num_tokens, queries, call.per_group, at, call.key_arguments, keys)
    for in_group in range(call.per_group):
        head = group * call.per_group + in_group
        at = call.scores + call.score_bytes * (seq * num_heads + head)
        if call.mask:
            _add(at, call.mask + call.mask_bytes * seq, call.num_tokens)
        if call.sinks:
            put_float(at, call.num_tokens, float_at(call.sinks, head))
        for i in range(count, num_vectors * LANES):
            put_float(at, i, types.float32(-math.inf))
    return num_vectors


@njit(nogil=True)
def _end(call):  # type: ignore[no-untyped-def]
    """Compute the residual, and its norm."""
    for seq in range(call.num_seqs):
        row = call.out + 4 * call.width * seq
        if call.out_bias:
            _add(row, call.out_bias, call.width)
        first = seq * call.width
        for i in range(call.width):
            value = float_at(row, i) + value_at(call.x, first + i, call.dtype)
            put_float(row, i, value)
            put_number(call.residual, first + i, value, call.dtype)
        scale = _scale_of_norm(row, call.width, float_at(call.numbers, RESIDUAL_EPS))
        _scale(row, call.width, scale, call.residual_norm)
        for i in range(call.width):
            put_number(call.normed, first + i, float_at(row, i), call.dtype)
    if call.num_router_blocks:
        arrangement = _arrangement_at(call.router_arrangement)
        arrange(call.out, 4 * call.width, call.arranged, call.num_seqs, arrangement)


@njit(nogil=True)
def _product(call, stage, blocks, num_blocks, out, num_columns):  # type: ignore[no-untyped-def]
    """Multiply the arranged rows with a weight in blocks of rows: [B, columns]."""
    item = take(call.state, stage)
    while item < num_blocks:
        block = block_at(blocks + BLOCK_BYTES * item)
        multiply(block, 0, 0, call.num_seqs, call.arranged, block.x_bytes, out, 4 * num_columns)
        finish(call.state, stage)
        item = take(call.state, stage)
    meet(call.state, stage, num_blocks, call.yield_)


@njit(nogil=True)
def _choose(call, seq):  # type: ignore[no-untyped-def]
    row = call.logits + 4 * call.num_logits * seq
    if call.router_bias:
        _add(row, call.router_bias, call.num_experts)
    first = call.top_k * seq
    choose(
        row, call.num_experts, call.top_k, call.softmax_over,
        call.top_k_index + 8 * first, call.top_k_weights, first, call.weights_dtype,
    )  # fmt: skip
    if call.shared_width:
        to = call.arranged + call.shared_bytes * seq
        call_rows(
            call.shared_input, row + 4 * call.num_experts, call.shared_width, call.shared_is_scaled,
            call.shared_activation, call.shared_numbers, call.shared_arrangement, to,
        )  # fmt: skip


@njit(nogil=True)
def _route(call):  # type: ignore[no-untyped-def]
    """Pass the stages from the router on."""
    num_blocks = call.num_router_blocks
    _product(call, LOGITS, call.router_blocks, num_blocks, call.logits, call.num_logits)
    num_seqs = call.num_seqs if num_blocks else 0
    seq = take(call.state, CHOICE)
    while seq < num_seqs:
        _choose(call, seq)
        finish(call.state, CHOICE)
        seq = take(call.state, CHOICE)
    meet(call.state, CHOICE, num_seqs, call.yield_)
    num_blocks = call.num_shared_blocks
    _product(call, SHARED, call.shared_blocks, num_blocks, call.shared, call.width)


@njit(nogil=True)
def before_heads(call):  # type: ignore[no-untyped-def]
    """Pass the stages before the heads."""
    if take(call.state, NORM) == 0:
        _begin(call)
        finish(call.state, NORM)
    meet(call.state, NORM, 1, call.yield_)
    _product(call, PROJECTIONS, call.blocks, call.num_blocks, call.heads, call.num_columns)


@njit(nogil=True)
def after_heads(call):  # type: ignore[no-untyped-def]
    """Pass the stages after the heads."""
    state = call.state
    if take(state, ARRANGE) == 0:
        width = 4 * call.num_groups * call.per_group * call.value_width
        arrangement = _arrangement_at(call.out_arrangement)
        arrange(call.attended, width, call.arranged, call.num_seqs, arrangement)
        finish(state, ARRANGE)
    meet(state, ARRANGE, 1, call.yield_)

    _product(call, OUTPUT, call.out_blocks, call.num_out_blocks, call.out, call.width)

    if take(state, RESIDUAL) == 0:
        _end(call)
        finish(state, RESIDUAL)
    meet(state, RESIDUAL, 1, call.yield_)

    _route(call)


@cache
def layer_function(kind: str, num_vectors: int) -> Any:
    """The C function of layers whose cache has values of this kind, `num_vectors` vectors wide."""

    @c_function(types.void(types.int64), f"decoder_{kind}_{num_vectors}")
    def run(address: int) -> None:
        call = layer_call_at(address)
        before_heads(call)
        num_heads = call.num_groups * call.per_group
        num_items = call.num_seqs * call.num_groups
        item = take(call.state, HEADS)
        while item < num_items:
            seq = item // call.num_groups
            group = item % call.num_groups
            _make_heads(call, seq, group)
            steps = _score(call, seq, group)
            values = call.value + call.value_seq * seq + call.value_head * group
            for in_group in range(call.per_group):
                head = group * call.per_group + in_group
                row = seq * num_heads + head
                at = call.scores + call.score_bytes * row
                to = call.attended + 4 * call.value_width * row
                weigh(kind, num_vectors, at, steps, values, call.value_row, call.num_tokens, to)
                _gate(call, seq, head, to)
            finish(call.state, HEADS)
            item = take(call.state, HEADS)
        meet(call.state, HEADS, num_items, call.yield_)
        after_heads(call)

    return run
