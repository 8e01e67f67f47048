"""Who runs when: in turn if all are in memory together, else one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from moe_infinity.tools.bench.measuring import (
    BenchTest,
    Measured,
    Needs,
    Sample,
    Workload,
    measure,
)

WORKLOAD = Workload(lengths=(2, 3), num_decoded=1, repeats=2, vocab_size=9)


class Noted:
    """A system that notes what it gets."""

    needs: Needs | None = None
    about = "noted"

    def __init__(self, name: str, events: list[str]) -> None:
        self._name = name
        self._events = events

    def run(self, ids: list[int], num_prompt: int) -> tuple[Sample, Sample]:
        if num_prompt == 2:
            self._events.append(self._name)
        return Sample(num_prompt, 1.0), Sample(len(ids) - num_prompt, 1.0)


def measured(events: list[str], *, together: bool) -> dict[str, Measured]:
    def system(name: str) -> Callable[[], AbstractContextManager[Noted]]:
        @contextmanager
        def opened() -> Iterator[Noted]:
            events.append(f"+{name}")
            yield Noted(name, events)
            events.append(f"-{name}")

        return opened

    systems = {name: system(name) for name in ("a", "b")}
    return measure(systems, WORKLOAD, together=together, on_run=lambda name, test: None)


def test_systems_that_fit_together_alternate_after_each_warmed_up():
    events: list[str] = []
    measured(events, together=True)
    assert events == ["+a", "+b", "a", "b", "a", "b", "b", "a", "-b", "-a"]


def test_systems_that_do_not_are_open_one_after_the_other():
    events: list[str] = []
    measured(events, together=False)
    assert events == ["+a", "a", "a", "a", "-a", "+b", "b", "b", "b", "-b"]


@pytest.mark.parametrize("together", [True, False])
def test_the_warm_up_is_not_counted_and_every_repeat_is(together):
    found = measured([], together=together)
    for name in ("a", "b"):
        samples = found[name].samples
        assert set(samples) == {BenchTest(2, 0), BenchTest(3, 0), BenchTest(2, 1)}
        assert all(len(each) == WORKLOAD.repeats for each in samples.values())
