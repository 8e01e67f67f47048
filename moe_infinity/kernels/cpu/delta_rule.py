"""One token of linear attention with the gated delta rule (arXiv 2412.06464), between the products
that go in and the one that comes out. In float32; rounded once.

    for each sequence and head of keys
        convolution   of the last K inputs of each channel; the state moves on by one
        SiLU, and queries and keys of length 1
        for each of the head's values
            decay     state *= exp(-exp(A) * softplus(a + dt))
            rule      state += key x (value - key @ state) * sigmoid(b)
            out       query @ state, its root mean square 1, times the norm's weight and SiLU(z)

transformers computes it with some 50 operations of torch, which take 5.5 ms for 32 heads of 128 x
128 in bfloat16 on two Zen 3 cores; this takes 0.4.

Legend: B sequences, G heads of keys, V heads of values, d width of a head.
"""

from __future__ import annotations

import math
from array import array
from functools import cache
from typing import Any, NamedTuple

import torch
from numba import njit, types
from torch import Tensor

from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.compiler import c_function, reader_of
from moe_infinity.kernels.cpu.vectors import float_at, put_float
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

    @property
    def num_value_heads(self) -> int:
        return self.num_key_heads * self.per_key_head

    @property
    def num_channels(self) -> int:
        """Return the number of queries', keys' and values' numbers, which are convolved."""
        keys = 2 * self.num_key_heads * self.key_width
        return keys + self.num_value_heads * self.value_width


class _Call(NamedTuple):
    """The arguments of the machine code. Names of tensors stand for addresses."""

    next: int  # of the item that is taken next
    num_seqs: int
    x: int
    x_width: int
    window: int  # the last inputs of the convolution, [B, channels, window_width]
    window_width: int
    dtype: int  # of the window: its index in DTYPES
    weight: int
    bias: int  # 0: none
    state: int
    decay: int
    dt: int
    norm: int
    norm_eps: int  # the address of the number
    scratch: int  # an item's queries, keys, values and one row
    scratch_width: int
    out: int


_shape_at = reader_of(DeltaShape)
_call_at = reader_of(_Call)
_SHAPE_AT = len(_Call._fields)  # where the shape is, behind the call


class DeltaWeights(NamedTuple):
    """A layer's weights beside its products."""

    convolution: Tensor  # [channels, 1, K]
    bias: Tensor | None  # [channels], of the convolution
    decay: Tensor  # [V], the logarithm of what is called A above
    dt: Tensor  # [V]
    norm: Tensor  # [d]
    norm_eps: float


def delta_step(
    shape: DeltaShape, weights: DeltaWeights, x_BN: Tensor, window: Tensor, state: Tensor
) -> Tensor:
    """Compute one token of each sequence: [B, N], the products of a token in one row -> [B, V * d]
    in float32. Both states are changed in place: `window`, [B, channels, at least K - 1], of a
    dtype in DTYPES, and `state`, [B, V, d of keys, d of values] in float32, without gaps.
    """
    num_seqs = len(x_BN)
    x = x_BN.to(torch.float32).contiguous()
    convolution, decay, dt, norm = (
        each.detach().to(torch.float32).contiguous()
        for each in (weights.convolution, weights.decay, weights.dt, weights.norm)
    )
    bias = None if weights.bias is None else weights.bias.detach().to(torch.float32)
    eps = array("f", [weights.norm_eps])
    scratch_width = 2 * shape.key_width + (shape.per_key_head + 1) * shape.value_width
    scratch = host_float32(num_seqs * shape.num_key_heads, scratch_width)
    out_BN = host_float32(num_seqs, shape.num_value_heads * shape.value_width)
    counter = array("q", [0])
    call = _Call(
        next=counter.buffer_info()[0],
        num_seqs=num_seqs,
        x=x.data_ptr(),
        x_width=x.shape[1],
        window=window.data_ptr(),
        window_width=window.shape[2],
        dtype=DTYPES.index(window.dtype),
        weight=convolution.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        state=state.data_ptr(),
        decay=decay.data_ptr(),
        dt=dt.data_ptr(),
        norm=norm.data_ptr(),
        norm_eps=eps.buffer_info()[0],
        scratch=scratch.data_ptr(),
        scratch_width=scratch_width,
        out=out_BN.data_ptr(),
    )
    arguments = array("q", [*call, *shape])
    team.run(_machine_code().address, arguments.buffer_info()[0], team.num_threads())
    return out_BN


@njit(nogil=True)
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return types.float32(1) / (types.float32(1) + math.exp(-x))


@njit(nogil=True)
def _convolve(call, taps, seq, channel, first, count, num_channels, to):  # type: ignore[no-untyped-def]
    """Convolve `count` channels, whose newest numbers begin at the address `first`."""
    width = call.window_width
    size = 4 if call.dtype == 0 else 2
    for i in range(count):
        c = channel + i
        row = call.window + size * width * (seq * num_channels + c)
        new = float_at(first, i)
        total = new * float_at(call.weight, c * taps + taps - 1)
        for k in range(taps - 1):
            old = value_at(row, width - (taps - 1) + k, call.dtype)
            total += old * float_at(call.weight, c * taps + k)
        if call.bias:
            total += float_at(call.bias, c)
        for k in range(width - 1):
            put_number(row, k, value_at(row, k + 1, call.dtype), call.dtype)
        put_number(row, width - 1, new, call.dtype)
        put_float(to, i, total * _sigmoid(total))


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
def _follow_rule(query, key, value, row, state, key_width, value_width, decay, beta, out):  # type: ignore[no-untyped-def]
    """Let the state of one head of values learn a token, and read it. `row` is scratch memory."""
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
            put_float(at, j, new)
            put_float(out, j, float_at(out, j) + new * asked)


@njit(nogil=True)
def _gate(call, z, width, out):  # type: ignore[no-untyped-def]
    """Norm the output of a head, and multiply with its gate."""
    total = types.float32(0)
    for j in range(width):
        total += float_at(out, j) * float_at(out, j)
    eps = float_at(call.norm_eps, 0)
    scale = types.float32(1) / math.sqrt(total / types.float32(width) + eps)
    for j in range(width):
        gate = float_at(z, j)
        value = float_at(out, j) * scale * float_at(call.norm, j)
        put_float(out, j, value * gate * _sigmoid(gate))


@cache
def _machine_code() -> Any:
    """Compile it when a model needs it; most do not."""
    return c_function(types.void(types.int64), "delta_heads")(_delta_heads)


def _delta_heads(at: int) -> None:
    """Take heads of keys until none is left. At the address are a _Call and a DeltaShape."""
    call = _call_at(at)
    shape = _shape_at(at + 8 * _SHAPE_AT)
    num_heads = shape.num_key_heads
    per_head = shape.per_key_head
    dk = shape.key_width
    dv = shape.value_width
    num_channels = 2 * num_heads * dk + num_heads * per_head * dv
    item = team.fetch_add(call.next, 1)
    while item < call.num_seqs * num_heads:
        seq = item // num_heads
        head = item % num_heads
        x = call.x + 4 * call.x_width * seq
        query = call.scratch + 4 * call.scratch_width * item
        key = query + 4 * dk
        value = key + 4 * dk
        row = value + 4 * per_head * dv
        at_query = x + 4 * (shape.query + head * shape.query_step)
        _convolve(call, shape.taps, seq, head * dk, at_query, dk, num_channels, query)
        at_key = x + 4 * (shape.key + head * shape.key_step)
        first = num_heads * dk + head * dk
        _convolve(call, shape.taps, seq, first, at_key, dk, num_channels, key)
        at_value = x + 4 * (shape.value + head * shape.value_step)
        first = 2 * num_heads * dk + head * per_head * dv
        _convolve(call, shape.taps, seq, first, at_value, per_head * dv, num_channels, value)
        _normalize(query, dk, types.float32(1) / math.sqrt(types.float32(dk)))
        _normalize(key, dk, types.float32(1))
        for i in range(per_head):
            number = head * per_head + i
            a = float_at(x, shape.a + head * shape.a_step + i) + float_at(call.dt, number)
            soft = a if a > types.float32(20) else math.log1p(math.exp(a))
            decay = math.exp(-math.exp(float_at(call.decay, number)) * soft)
            beta = _sigmoid(float_at(x, shape.b + head * shape.b_step + i))
            which = seq * num_heads * per_head + number
            state = call.state + 4 * dk * dv * which
            out = call.out + 4 * dv * which
            _follow_rule(
                query, key, value + 4 * i * dv, row, state, dk, dv,
                types.float32(decay), types.float32(beta), out,
            )  # fmt: skip
            z = x + 4 * (shape.z + head * shape.z_step + i * dv)
            _gate(call, z, dv, out)
        item = team.fetch_add(call.next, 1)
