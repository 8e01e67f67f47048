"""How a router chooses: the experts with the largest logits. The share of each is the exponential
of its logit over the sum for all experts, or for the chosen ones.
"""

from __future__ import annotations

import math

from numba import njit, types

from moe_infinity.kernels.cpu.vectors import float_at, int_at, put_int
from moe_infinity.kernels.cpu.work import put_number

OF_ALL, OF_CHOSEN = range(2)  # what the shares of the chosen experts are parts of


@njit(nogil=True)
def _next_largest(logits, num_experts, last, is_first):  # type: ignore[no-untyped-def]
    """The expert with the largest logit after expert `last`; of equal ones the first. Negative if
    there is none, as with logits that are no numbers.
    """
    found = -1
    for expert in range(num_experts):
        logit = float_at(logits, expert)
        is_left = is_first
        if not is_first:
            limit = float_at(logits, last)
            is_left = logit < limit or (logit == limit and expert > last)
        if is_left and (found < 0 or logit > float_at(logits, found)):
            found = expert
    return found


@njit(nogil=True)
def choose(logits, num_experts, top_k, shares, chosen, to, first, dtype):  # type: ignore[no-untyped-def]
    """From float32 logits [E] of one token: writes the ids int64 [K] to `chosen`, and the shares
    from number `first` on to `to`, which has numbers of this dtype.
    """
    last = 0
    for k in range(top_k):
        found = _next_largest(logits, num_experts, last, k == 0)
        last = k if found < 0 else found
        put_int(chosen, k, last)
    largest = float_at(logits, int_at(chosen, 0))
    total = types.float32(0)
    if shares == OF_ALL:
        for expert in range(num_experts):
            total += math.exp(float_at(logits, expert) - largest)
    else:
        for k in range(top_k):
            total += math.exp(float_at(logits, int_at(chosen, k)) - largest)
    for k in range(top_k):
        share = math.exp(float_at(logits, int_at(chosen, k)) - largest) / total
        put_number(to, first + k, share, dtype)
