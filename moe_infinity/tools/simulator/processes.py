"""The same function for many items in several processes: results in order, progress on the way, and
no process left behind, however it ends.

    this process                    one of `jobs` processes
    the next item       ------->    function(item, on_work)
    on_work, results    <-------    units of work done, then the result or an error of ours

A process that ends by itself has died: that is an error here. When this process ends, even killed,
the others find their pipe closed and end, too. They ignore Ctrl-C, which this process answers.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from moe_infinity.errors import MoEInfinityError

Item = TypeVar("Item")
Result = TypeVar("Result")
OnWork = Callable[[int], None]  # units of work that were done since the last call
Function = Callable[[Item, OnWork], Result]

TELL_EVERY_S = 0.1  # a process that nobody hears any more notices it as soon
END_TIMEOUT_S = 10.0  # of processes that were killed


def run_all(
    function: Function[Item, Result], items: Sequence[Item], *, jobs: int, on_work: OnWork
) -> list[Result]:
    """The result for each item, in order; of one job they are computed here. Raises what the
    function raises, and MoEInfinityError if a process dies.
    """
    if min(jobs, len(items)) <= 1:
        return [function(item, on_work) for item in items]
    with _workers(function, min(jobs, len(items))) as workers:
        return _Round(items, workers, on_work).run()


def adding_up(on_progress: Callable[[int, int], None], total: int) -> OnWork:
    """Tells `on_progress` how many units are done, and how many there are; now it is none."""
    done = 0

    def on_work(work: int) -> None:
        nonlocal done
        done += work
        on_progress(done, total)

    on_progress(0, total)
    return on_work


class _Worker:
    """One process, and this side of its pipe."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.item_idx = -1  # what it works on; -1: nothing

    def send(self, what: object) -> None:
        try:
            self.connection.send(what)
        except OSError as error:
            raise self.died() from error

    def died(self) -> MoEInfinityError:
        self.process.join(END_TIMEOUT_S)
        code = self.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return MoEInfinityError(
            f"one of the processes that simulate ended {how}, with nothing to show\n"
            "hint: if memory ran out, fewer --jobs need less of it"
        )


@contextmanager
def _workers(function: Function[Any, Any], num: int) -> Iterator[list[_Worker]]:
    """So many processes that wait for items. Afterwards none is left."""
    context = get_context("spawn")
    workers: list[_Worker] = []
    try:
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            workers.append(_Worker(process, ours))
            with _ctrl_c_later():  # else it interrupts their imports, with a traceback each
                process.start()
            theirs.close()
        for worker in workers:  # all are starting: what is large is not waited for one by one
            worker.send(function)
        yield workers
    finally:
        started = [worker for worker in workers if worker.process.pid is not None]
        for worker in started:
            worker.process.kill()
        for worker in started:
            worker.process.join(END_TIMEOUT_S)
            worker.connection.close()


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """A Ctrl-C inside is answered at the end, and processes started inside never get one."""
    pressed: list[int] = []
    is_answered_here = threading.current_thread() is threading.main_thread()
    if is_answered_here:  # by Python, whichever thread the system interrupts
        before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with _sigint_blocked():
            yield
    finally:
        if is_answered_here:
            signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """In this thread and in processes that it starts, where the system can do that."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # the first start does it otherwise, and unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Round(Generic[Item, Result]):
    """All items, handed to whoever has nothing to do."""

    def __init__(self, items: Sequence[Item], workers: list[_Worker], on_work: OnWork) -> None:
        self._items = items
        self._workers = workers
        self._on_work = on_work
        self._num_given = 0
        self._results: dict[int, Result] = {}

    def run(self) -> list[Result]:
        for worker in self._workers:
            self._give(worker)
        worker_of: dict[object, _Worker] = {each.connection: each for each in self._workers}
        while len(self._results) < len(self._items):
            for connection in wait([each.connection for each in self._workers]):
                self._hear(worker_of[connection])
        return [self._results[idx] for idx in range(len(self._items))]

    def _give(self, worker: _Worker) -> None:
        worker.item_idx = self._num_given if self._num_given < len(self._items) else -1
        if worker.item_idx >= 0:
            self._num_given += 1
            worker.send(self._items[worker.item_idx])

    def _hear(self, worker: _Worker) -> None:
        try:
            work, is_done, result = worker.connection.recv()
        except (EOFError, OSError) as error:
            raise worker.died() from error
        if isinstance(result, MoEInfinityError):
            raise result
        self._on_work(work)
        if is_done:
            self._results[worker.item_idx] = result
            self._give(worker)


def serve(connection: Connection) -> None:
    """Work in a process: it gets the function, then items until the pipe is closed. An error that
    is not ours ends it, with a traceback.
    """
    with suppress(ValueError):  # in a thread, where Ctrl-C does not arrive
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    telling = _Telling(connection)
    with suppress(_NobodyListens):  # the other side has what it wants, or is gone
        function = telling.hear()
        while True:
            telling.tell(is_done=True, result=_result_of(function, telling.hear(), telling))


def _result_of(function: Function[Any, Any], item: Any, telling: _Telling) -> Any:
    try:
        return function(item, telling.add)
    except MoEInfinityError as error:
        return error


class _NobodyListens(Exception):
    """The other end of the pipe is closed."""


class _Telling:
    """A process's side of its pipe. It collects units of work, and tells them now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._work = 0  # not told yet
        self._told_at = time.monotonic()

    def add(self, work: int) -> None:
        self._work += work
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            self.tell(is_done=False)

    def hear(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise _NobodyListens from error

    def tell(self, *, is_done: bool, result: Any = None) -> None:
        try:
            self._connection.send((self._work, is_done, result))
        except OSError as error:
            raise _NobodyListens from error
        self._work = 0
        self._told_at = time.monotonic()
