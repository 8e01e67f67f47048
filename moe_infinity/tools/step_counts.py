"""What each forward pass looked up, and how long it waited.

with counting_steps(moe) as seen:
    moe.generate(...)
print(decode_steps_of(seen))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from moe_infinity.cache.counters import Counters, PhaseCounters
from moe_infinity.model import MoE


@contextmanager
def counting_steps(moe: MoE) -> Iterator[list[Counters]]:
    """The counters before the first pass of the model inside and after each one; complete
    afterwards.
    """
    bookkeeping = moe.engine.bookkeeping
    seen = [copy.deepcopy(bookkeeping.counters)]
    hook = moe.model.register_forward_hook(
        lambda *_: seen.append(copy.deepcopy(bookkeeping.counters))
    )
    try:
        yield seen
    finally:
        hook.remove()
        if len(seen) > 1:  # a device reports its last pass after it
            seen[-1] = copy.deepcopy(bookkeeping.counters)


def decode_steps_of(seen: Sequence[Counters]) -> list[PhaseCounters]:
    """What each decode step counted. A step that a device decided is counted when it reports, which
    may be with the next one.
    """
    return [
        _difference(before.decode, after.decode)
        for before, after in pairwise(seen)
        if after.decode.steps > before.decode.steps
    ]


def _difference(before: PhaseCounters, after: PhaseCounters) -> PhaseCounters:
    return PhaseCounters(
        hits=after.hits - before.hits,
        late_hits=after.late_hits - before.late_hits,
        misses=after.misses - before.misses,
        steps=after.steps - before.steps,
        tokens=after.tokens - before.tokens,
        bytes_read=after.bytes_read - before.bytes_read,
        stall_s=after.stall_s - before.stall_s,
    )
