"""The activation between the two products of an expert, times up, 16 numbers at a time."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I64,
    LANES,
    all_lanes,
    exponential,
    fma,
    larger,
    load,
    pick,
    repeated,
    smaller,
    store_some,
)
from moe_infinity.kernels.reference import FUNCTIONS

# Of erf: Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most.
ERF_STEP = 0.3275911
ERF = 1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592


@intrinsic  # type: ignore[untyped-decorator]
def activate_lanes(
    _: Any, row: Any, first: Any, count: Any, up: Any, step: Any, function: Any, numbers: Any
) -> Any:
    """Activate 16 outputs of the first product from `first` on, and store `count` of them at the
    start of the row in their place. `up` is the index of the first output of up in the row, 0:
    there is none. `step` is from one output to the next, 1 or 2. `numbers` is the address of alpha,
    shift and limit.
    """

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        row, first, count, up, step, function, numbers = args
        alpha, shift, limit = (
            repeated(b, b.load(b.inttoptr(b.add(numbers, I64(4 * k)), F32.as_pointer())))
            for k in range(3)
        )
        gate = smaller(b, _lanes(b, row, first, step), limit)
        value = cgutils.alloca_once_value(b, _activated(b, gate, function, alpha))
        with b.if_then(b.icmp_signed(">", up, I64(0))):
            lanes = _lanes(b, b.add(row, b.mul(up, I64(4))), first, step)
            lanes = larger(b, b.fneg(limit), smaller(b, lanes, limit))
            b.store(b.fmul(b.load(value), b.fadd(lanes, shift)), value)
        store_some(b, b.load(value), b.add(row, b.mul(first, I64(4))), count)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


def _lanes(b: Any, row: Any, first: Any, step: Any) -> Any:
    """Load every `step`-th number of a row; the last may be beyond its end."""
    at = b.add(row, b.mul(b.mul(first, step), I64(4)))
    found = cgutils.alloca_once_value(b, load(b, at, 0, F32))
    with b.if_then(b.icmp_signed("==", step, I64(2))):
        second = load(b, at, 4 * LANES, F32)
        b.store(pick(b, b.load(found), range(0, 2 * LANES, 2), second), found)
    return b.load(found)


def _activated(b: Any, x: Any, function: Any, alpha: Any) -> Any:
    found = cgutils.alloca_once(b, FLOATS)
    for index, name in enumerate(FUNCTIONS):
        with b.if_then(b.icmp_signed("==", function, I64(index))):
            b.store(EMITTED[name](b, x, alpha), found)
    return b.load(found)


def _silu(b: Any, x: Any, alpha: Any) -> Any:
    return b.fmul(x, _sigmoid(b, b.fmul(x, alpha)))


def _gelu(b: Any, x: Any, _: Any) -> Any:
    """Half of x (1 + erf). The rest of erf to 1 is computed; on the other side of 0 it is the rest
    to 2.
    """
    scaled = _absolute(b, b.fmul(x, all_lanes(F32, math.sqrt(0.5))))
    t = b.fdiv(all_lanes(F32, 1.0), fma(b, scaled, all_lanes(F32, ERF_STEP), all_lanes(F32, 1.0)))
    rest = all_lanes(F32, ERF[0])
    for coefficient in ERF[1:]:
        rest = fma(b, rest, t, all_lanes(F32, coefficient))
    rest = b.fmul(b.fmul(rest, t), exponential(b, b.fneg(b.fmul(scaled, scaled))))
    is_negative = b.fcmp_ordered("<", x, FLOATS(None))
    share = b.select(is_negative, rest, b.fsub(all_lanes(F32, 2.0), rest))
    return b.fmul(b.fmul(x, all_lanes(F32, 0.5)), share)


def _gelu_tanh(b: Any, x: Any, _: Any) -> Any:
    """(1 + tanh z) / 2 is the sigmoid of 2 z."""
    cube = b.fmul(b.fmul(x, x), x)
    inner = fma(b, cube, all_lanes(F32, 0.044715), x)
    return b.fmul(x, _sigmoid(b, b.fmul(inner, all_lanes(F32, 2 * math.sqrt(2 / math.pi)))))


def _relu2(b: Any, x: Any, _: Any) -> Any:
    positive = larger(b, FLOATS(None), x)  # NaN stays
    return b.fmul(positive, positive)


EMITTED = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu2": _relu2}


def _sigmoid(b: Any, x: Any) -> Any:
    """The sigmoid, from the exponential of -|x|, which overflows nowhere."""
    power = exponential(b, b.fneg(_absolute(b, x)))
    is_negative = b.fcmp_ordered("<", x, FLOATS(None))
    top = b.select(is_negative, power, all_lanes(F32, 1.0))
    return b.fdiv(top, b.fadd(power, all_lanes(F32, 1.0)))


def _absolute(b: Any, x: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS])
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.fabs.v16f32"), [x])
