"""The measurement: models of ours with different budgets and llama.cpp get the same ids in turn.

    warm up -> repeat 1: 25 %, 50 %, llama.cpp -> repeat 2: 50 %, llama.cpp, 25 % -> ...

If not all fit into memory together, one runs after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from moe_infinity.tools.bench.rows import Measured, Needs, Sample
from moe_infinity.tools.bench.workload import WARM_UP, BenchTest, Workload


class System(Protocol):
    """A model that is loaded, whoever computes it."""

    needs: Needs | None  # None: nothing is known of what limits it
    about: str

    def run(self, ids: list[int], num_prompt: int) -> tuple[Sample, Sample]:
        """Of a prompt, and of the tokens after it."""


Systems = Mapping[str, Callable[[], AbstractContextManager[System]]]
OnRun = Callable[
    [str, BenchTest], None
]  # called with the name of the system that runs, and the test


def measure(
    systems: Systems, workload: Workload, *, together: bool, on_run: OnRun
) -> dict[str, Measured]:
    """By the names of the systems. Raises what opening and running them raises."""
    groups = [systems] if together else [{name: system} for name, system in systems.items()]
    found: dict[str, Measured] = {}
    for group in groups:
        found |= _measure_group(group, workload, on_run)
    return found


def _measure_group(systems: Systems, workload: Workload, on_run: OnRun) -> dict[str, Measured]:
    with ExitStack() as stack:
        opened = {name: stack.enter_context(system()) for name, system in systems.items()}
        found = {name: Measured(system.needs, system.about) for name, system in opened.items()}
        for repeat in range(WARM_UP, workload.repeats):
            names = list(opened)
            first = max(repeat, 0) % len(names)
            for name in names[first:] + names[:first]:
                for test, sample in _run_texts(name, opened[name], workload, repeat, on_run):
                    if repeat != WARM_UP:
                        found[name].samples.setdefault(test, []).append(sample)
    return found


def _run_texts(
    name: str, system: System, workload: Workload, repeat: int, on_run: OnRun
) -> list[tuple[BenchTest, Sample]]:
    found = []
    for length, ids in workload.texts(repeat):
        on_run(name, BenchTest(length, 0))
        prompt, decoded = system.run(ids, length)
        found.append((BenchTest(length, 0), prompt))
        if decoded.num_tokens:
            found.append((BenchTest(length, decoded.num_tokens), decoded))
    return found
