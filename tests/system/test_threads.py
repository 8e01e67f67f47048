"""Threads that serve go on after errors, and say so seldom."""

from __future__ import annotations

import ast
import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_infinity.system import threads
from moe_infinity.system.threads import Seldom, keep_running

PACKAGE = Path(threads.__file__).resolve().parents[1]
NO_FILES = OSError(errno.EMFILE, "Too many open files")
# Threads that do not serve for as long as their process lives, by their targets.
SHORT = {
    "self._greet": "one caller of the port of expert hosts",
    "self._run": "one generation",
    "self._helper": "nothing but machine code and a queue",
    "self._template.try_out": "one template, tried at the start",
    "tokenize": "one text, tried at the start",
    "_read": "files that the page cache lacks, whose errors are left to who loads the model",
    "_run": "work of others, whose errors go to who waits for it",
}


class Clock:
    """Time passes only while a thread pauses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


FAILING: list[bool | Exception] = [NO_FILES] * 10
COMING_AND_GOING: list[bool | Exception] = [NO_FILES, True] * 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    simulated = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr(threads, "time", simulated)
    return clock


def turns(*results: bool | Exception) -> Callable[[], bool]:
    left: Iterator[bool | Exception] = iter(results)

    def turn() -> bool:
        result = next(left)
        if isinstance(result, Exception):
            raise result
        return result

    return turn


def test_it_goes_on_after_errors_with_pauses_that_grow_to_a_second(clock):
    keep_running(turns(*FAILING, False), "a thread")
    assert clock.pauses[:3] == [0.01, 0.02, 0.04]
    assert clock.pauses[-3:] == [1.0] * 3


def test_pauses_are_short_again_once_it_has_worked(clock):
    keep_running(turns(NO_FILES, NO_FILES, True, NO_FILES, False), "a thread")
    assert clock.pauses == [0.01, 0.02, 0.01]


def test_an_error_that_lasts_has_one_line(clock, caplog):
    keep_running(turns(*FAILING * 10, False), "accepting")
    (record,) = caplog.records
    assert record.getMessage() == (
        "accepting goes on after OSError: [Errno 24] Too many open files"
    )


def test_errors_that_come_and_go_have_at_most_a_line_a_second(clock, caplog):
    keep_running(turns(*COMING_AND_GOING, False), "accepting")
    assert clock.now == pytest.approx(110)
    assert len(caplog.records) in (10, 11)


def test_another_error_in_a_row_has_a_line_of_its_own(clock, caplog):
    keep_running(turns(*FAILING, ValueError("else"), ValueError("else"), False), "accepting")
    assert [r.getMessage().split()[4] for r in caplog.records] == ["OSError:", "ValueError:"]


def test_the_traceback_is_in_the_log_of_who_asks_for_it(clock, caplog):
    with caplog.at_level(logging.DEBUG):
        keep_running(turns(ValueError("else"), False), "accepting")
    assert caplog.records[0].exc_info


def test_what_ends_a_program_ends_the_thread(clock):
    def turn() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_running(turn, "a thread")


def test_a_line_that_others_can_cause_comes_once_a_second(clock):
    is_due = Seldom()
    told = []
    for _ in range(35):
        told.append(is_due())
        clock.now += 0.1
    assert sum(told) == 4
    assert told[0]


def threads_of(file: Path) -> list[str]:
    """Return the targets of the threads that a file starts."""
    calls = [
        node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    return [
        ast.unparse(keyword.value)
        for call in calls
        if ast.unparse(call.func) in ("Thread", "threading.Thread")
        for keyword in call.keywords
        if keyword.arg == "target"
    ]


def test_every_thread_of_the_package_that_serves_is_kept_running():
    targets = [target for file in PACKAGE.glob("**/*.py") for target in threads_of(file)]
    assert targets.count("keep_running") == 5
    assert set(targets) == {"keep_running", "_take_turns", *SHORT}
