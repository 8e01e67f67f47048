"""The activation between the two products of an expert, for Triton. kernels/reference.py has the
definition.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

_NO_LIMIT = tl.constexpr(math.inf)
_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def mlp_hidden(gate, up, ACTIVATION: tl.constexpr):
    """Return the hidden values of any shape, in float32. Without a gate `up` is not looked at."""
    if ACTIVATION.limit < _NO_LIMIT:
        gate = tl.minimum(gate, ACTIVATION.limit, propagate_nan=_NAN)
    hidden = activated(gate, tl.constexpr(ACTIVATION.function), ACTIVATION.alpha)
    if ACTIVATION.is_gated:
        if ACTIVATION.limit < _NO_LIMIT:
            up = tl.clamp(up, -ACTIVATION.limit, ACTIVATION.limit, propagate_nan=_NAN)
        hidden *= up + ACTIVATION.shift
    return hidden


@triton.jit
def activated(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    if FUNCTION == "silu":
        hidden = x * tl.sigmoid(ALPHA * x)
    elif FUNCTION == "gelu":
        hidden = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # 1 + tanh(z) = 2 sigmoid(2 z), without cancellation
        hidden = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(FUNCTION == "relu2")
        x = tl.maximum(x, 0.0, propagate_nan=_NAN)
        hidden = x * x
    return hidden
