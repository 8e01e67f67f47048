"""Where the time of a decode step goes, and what each step looked up.

    with profiling(moe) as profile, counting_steps(moe) as seen:
        moe.generate(...)
    print(profile, decode_steps_of(seen))

Each moment counts for the innermost part that runs, so the parts sum to the time of the steps.
Measuring takes some microseconds per MoE layer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

from moe_infinity.cache.counters import Counters, PhaseCounters
from moe_infinity.experts import Phase, Step
from moe_infinity.model import MoE

BETWEEN = "between steps"
DENSE = "dense layers"
ATTENTION = "attention"
EXPERT_CACHE = "expert cache"
EXPERTS = "experts"
WAITING = "waiting for experts"
PARTS = (DENSE, ATTENTION, EXPERTS, EXPERT_CACHE, WAITING, BETWEEN)


class Profile:
    """Seconds of decode steps by part. Prefill is left out."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running: list[str] = []  # parts, the innermost last; empty outside of decode steps
        self._since = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all decode steps and between them."""
        return sum(self.seconds.values())

    def begin_step(self, phase: Phase) -> None:
        """Count time for a step from now on, if it is a decode step."""
        self._charge()
        if phase is Phase.DECODE:
            self.num_steps += 1
            self._running = [BETWEEN, DENSE]
        else:
            self._running = []

    def end_step(self) -> None:
        """Count time as between steps from now on."""
        self._charge()
        self._running = self._running[:1]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted for `part` while a decode step runs."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(self._running) < 2:
                return function(*args, **kwargs)
            self._charge()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._running.pop()

        return run

    def move_to_waiting(self, stall_s: float) -> None:
        """Count the seconds that the engine waited for experts, which it measures itself."""
        self.seconds[EXPERT_CACHE] -= stall_s
        self.seconds[WAITING] += stall_s

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def as_dict(self) -> dict[str, Any]:
        """Number of decode steps, and seconds of each part."""
        return {"decode_steps": self.num_steps, "seconds": self.seconds}

    def __str__(self) -> str:
        if not self.num_steps:
            return "profile: no decode steps"
        lines = [f"profile of {self.num_steps:,} decode steps, ms of each"]
        for part, seconds in {**self.seconds, "all": self.total_s}.items():
            share = seconds / self.total_s
            lines.append(f"  {part:20} {1e3 * seconds / self.num_steps:9.2f}  {share:6.1%}")
        return "\n".join(lines)


@contextmanager
def profiling(moe: MoE) -> Iterator[Profile]:
    """Profile what the model does inside. The profile is complete afterwards."""
    profile = Profile()
    engine = moe.engine
    counters = engine.bookkeeping.counters
    stalled_before = counters.decode.stall_s
    replaced = [
        (module, "forward", ATTENTION)
        for module in moe.model.modules()
        if type(module).__name__.endswith("Attention")
    ]
    replaced += [(engine, "layer", EXPERT_CACHE), (engine, "answer_calls", EXPERT_CACHE)]
    replaced += [(computer, "compute", EXPERTS) for computer in engine.path.computers]
    for owner, name, part in replaced:
        setattr(owner, name, profile.timed(part, getattr(owner, name)))
    begin_step = profile.timed(EXPERT_CACHE, engine.begin_step)

    def begun(step: Step) -> None:
        profile.begin_step(step.phase)
        begin_step(step)

    vars(engine)["begin_step"] = begun  # an encoder and a decoder begin one each
    hook = moe.model.register_forward_hook(lambda *_: profile.end_step(), always_call=True)
    try:
        yield profile
    finally:
        hook.remove()
        for owner, name, _ in replaced:
            delattr(owner, name)
        del vars(engine)["begin_step"]
        profile.end_step()
        profile.move_to_waiting(counters.decode.stall_s - stalled_before)


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
    """Return what each decode step counted. A step that a device decided is counted when it
    reports, which may be with the next one.
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
