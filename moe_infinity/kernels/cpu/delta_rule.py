"""One token of linear attention with the gated delta rule (arXiv 2412.06464), between the products
that go in and the one that comes out. In float32; rounded once.

    for each sequence and head of keys
        convolution   of the last K inputs of each channel; the state moves on by one
        SiLU, and queries and keys of length 1
        for each of the head's values
            decay     state *= exp(-exp(A) * softplus(a + dt))
            rule      state += key x (value - key @ state) * sigmoid(b)
            out       query @ state, its root mean square 1, times the norm's weight and SiLU(z)

The products, the residual, its norm and the router around it are those of any decoder layer
(decoder_call.py). transformers computes what is above with some 50 operations of torch, which take
5.5 ms for 32 heads of 128 x 128 in bfloat16 on two Zen 3 cores; this takes 0.7, with states that
are in no cache of the processor.

The new states go to memory of their own: a layer may be computed before the model calls it, and
what it had is still needed if the model then does something else.

Legend: B sequences, G heads of keys, V heads of values, d width of a head.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from numba import njit, types

from moe_infinity.kernels.cpu.compiler import c_function, reader_of
from moe_infinity.kernels.cpu.decoder_call import (
    HEADS,
    after_heads,
    before_heads,
    finish,
    layer_call_at,
    meet,
    take,
)
from moe_infinity.kernels.cpu.layer_call import OUT_EPS
from moe_infinity.kernels.cpu.vectors import float_at, int_at, put_float, sigmoid
from moe_infinity.kernels.cpu.work import BIASES, put_number, value_at

DTYPES = tuple(getattr(torch, name) for name in BIASES)  # of the states of convolutions
MIN_NORM = 1e-6  # added to the squared length of queries and keys


class DeltaShape(NamedTuple):
    """The heads of a layer, and where a token's products have them: offsets and steps in numbers,
    a step from the first number of one head of keys to that of the next.
    """

    num_key_heads: int
    per_key_head: int  # heads of values
    key_width: int
    value_width: int
    taps: int  # of the convolution
    query: int
    query_step: int
    key: int
    key_step: int
    value: int
    value_step: int
    z: int
    z_step: int
    b: int
    b_step: int
    a: int
    a_step: int

    @classmethod
    def of(
        cls,
        num_key_heads: int,
        per_key_head: int,
        key_width: int,
        value_width: int,
        taps: int,
        *,
        are_apart: bool,
    ) -> DeltaShape:
        """Products have all queries, then all keys, values, z, b and a; or else query, key, values
        and z of each head of keys, then b and a of each.
        """
        values = per_key_head * value_width
        sizes = {
            "query": key_width, "key": key_width, "value": values, "z": values,
            "b": per_key_head, "a": per_key_head,
        }  # fmt: skip
        groups = [[name] for name in sizes] if are_apart else [[*sizes][:4], [*sizes][4:]]
        places: dict[str, int] = {}
        first = 0
        for group in groups:
            step = sum(sizes[name] for name in group)
            before = 0
            for name in group:
                places |= {name: first + before, f"{name}_step": step}
                before += sizes[name]
            first += num_key_heads * step
        return cls(num_key_heads, per_key_head, key_width, value_width, taps, **places)

    @property
    def num_value_heads(self) -> int:
        return self.num_key_heads * self.per_key_head

    @property
    def num_channels(self) -> int:
        """Return the number of queries', keys' and values' numbers, which are convolved."""
        keys = 2 * self.num_key_heads * self.key_width
        return keys + self.num_value_heads * self.value_width


class DeltaCall(NamedTuple):
    """The fields of linear attention alone: integers, for numba. A DeltaShape lies
    behind it. Names of tensors stand for addresses.
    """

    weight: int  # of the convolution, [channels, 1, K]
    weight_dtype: int  # the index of its name in BIASES
    bias: int  # float32 [channels]; 0: none
    decay: int  # float32 [V], the logarithm of what is called A above
    dt: int  # float32 [V]
    norm: int  # float32 [d]
    places: int  # int64 [V]: where each head of values goes in what is multiplied next


_delta_at = reader_of(DeltaCall)
_shape_at = reader_of(DeltaShape)
_SHAPE_AT = 8 * len(DeltaCall._fields)


@njit(nogil=True)
def scratch_bytes(shape):  # type: ignore[no-untyped-def]
    """Return the memory of one head of keys: query, key, values and one row."""
    return 4 * (2 * shape.key_width + (shape.per_key_head + 1) * shape.value_width)


@njit(nogil=True)
def _convolve(call, delta, shape, seq, channel, first, count, to):  # type: ignore[no-untyped-def]
    """Convolve `count` channels, whose newest numbers begin at the address `first`."""
    width = call.window_width
    taps = shape.taps
    row_bytes = (4 if call.dtype == 0 else 2) * width
    num_keys = 2 * shape.num_key_heads * shape.key_width
    num_channels = num_keys + shape.num_key_heads * shape.per_key_head * shape.value_width
    for i in range(count):
        c = channel + i
        row = row_bytes * (seq * num_channels + c)
        before = call.window + row
        after = call.next_window + row
        new = float_at(first, i)
        total = new * value_at(delta.weight, c * taps + taps - 1, delta.weight_dtype)
        for k in range(taps - 1):
            old = value_at(before, width - (taps - 1) + k, call.dtype)
            total += old * value_at(delta.weight, c * taps + k, delta.weight_dtype)
        if delta.bias:
            total += float_at(delta.bias, c)
        for k in range(width - 1):
            put_number(after, k, value_at(before, k + 1, call.dtype), call.dtype)
        put_number(after, width - 1, new, call.dtype)
        put_float(to, i, total * sigmoid(total))


@njit(nogil=True)
def _normalize(at, count, factor):  # type: ignore[no-untyped-def]
    """Give a vector the length 1, times a factor."""
    total = types.float32(0)
    for i in range(count):
        total += float_at(at, i) * float_at(at, i)
    scale = factor / math.sqrt(total + types.float32(MIN_NORM))
    for i in range(count):
        put_float(at, i, float_at(at, i) * scale)


@njit(nogil=True)
def _follow_rule(query, key, value, row, state, to, key_width, value_width, decay, beta, out):  # type: ignore[no-untyped-def]
    """Write the state of one head of values with a token learned to another place, and read it.
    `row` is scratch memory.
    """
    for j in range(value_width):
        put_float(row, j, types.float32(0))
        put_float(out, j, types.float32(0))
    for i in range(key_width):
        at = state + 4 * i * value_width
        factor = float_at(key, i) * decay
        for j in range(value_width):
            put_float(row, j, float_at(row, j) + float_at(at, j) * factor)
    for j in range(value_width):
        put_float(row, j, (float_at(value, j) - float_at(row, j)) * beta)
    for i in range(key_width):
        at = state + 4 * i * value_width
        learned = float_at(key, i)
        asked = float_at(query, i)
        for j in range(value_width):
            new = float_at(at, j) * decay + float_at(row, j) * learned
            put_float(to + 4 * i * value_width, j, new)
            put_float(out, j, float_at(out, j) + new * asked)


@njit(nogil=True)
def _gate(z, norm, eps, width, out):  # type: ignore[no-untyped-def]
    """Norm the output of a head, and multiply with its gate."""
    total = types.float32(0)
    for j in range(width):
        total += float_at(out, j) * float_at(out, j)
    scale = types.float32(1) / math.sqrt(total / types.float32(width) + eps)
    for j in range(width):
        gate = float_at(z, j)
        value = float_at(out, j) * scale * float_at(norm, j)
        put_float(out, j, value * gate * sigmoid(gate))


@njit(nogil=True)
def _head(call, delta, shape, seq, head):  # type: ignore[no-untyped-def]
    """Compute one head of keys of a sequence, with its heads of values."""
    num_heads = shape.num_key_heads
    per_head = shape.per_key_head
    dk = shape.key_width
    dv = shape.value_width
    x = call.heads + 4 * call.num_columns * seq
    query = call.queries + scratch_bytes(shape) * (seq * num_heads + head)
    key = query + 4 * dk
    value = key + 4 * dk
    row = value + 4 * per_head * dv
    at_query = x + 4 * (shape.query + head * shape.query_step)
    _convolve(call, delta, shape, seq, head * dk, at_query, dk, query)
    at_key = x + 4 * (shape.key + head * shape.key_step)
    _convolve(call, delta, shape, seq, (num_heads + head) * dk, at_key, dk, key)
    at_value = x + 4 * (shape.value + head * shape.value_step)
    first = 2 * num_heads * dk + head * per_head * dv
    _convolve(call, delta, shape, seq, first, at_value, per_head * dv, value)
    _normalize(query, dk, types.float32(1) / math.sqrt(types.float32(dk)))
    _normalize(key, dk, types.float32(1))
    for i in range(per_head):
        number = head * per_head + i
        a = float_at(x, shape.a + head * shape.a_step + i) + float_at(delta.dt, number)
        soft = a if a > types.float32(20) else math.log1p(math.exp(a))
        decay = math.exp(-math.exp(float_at(delta.decay, number)) * soft)
        beta = sigmoid(float_at(x, shape.b + head * shape.b_step + i))
        which = 4 * dk * dv * (seq * num_heads * per_head + number)
        place = int_at(delta.places, number)
        out = call.attended + 4 * dv * (seq * num_heads * per_head + place)
        _follow_rule(
            query, key, value + 4 * i * dv, row, call.recurrent + which,
            call.next_recurrent + which, dk, dv, types.float32(decay), types.float32(beta), out,
        )  # fmt: skip
        z = x + 4 * (shape.z + head * shape.z_step + i * dv)
        _gate(z, delta.norm, float_at(call.numbers, OUT_EPS), dv, out)


@cache
def delta_function() -> Any:
    """The C function of layers with linear attention. It is compiled when a model needs it."""

    @c_function(types.void(types.int64), "decoder_delta")
    def run(address: int) -> None:
        call = layer_call_at(address)
        before_heads(call)
        delta = _delta_at(call.delta)
        shape = _shape_at(call.delta + _SHAPE_AT)
        num_items = call.num_seqs * shape.num_key_heads
        item = take(call.state, HEADS)
        while item < num_items:
            seq = item // shape.num_key_heads
            _head(call, delta, shape, seq, item % shape.num_key_heads)
            finish(call.state, HEADS)
            item = take(call.state, HEADS)
        meet(call.state, HEADS, num_items, call.yield_)
        after_heads(call)

    return run
