"""Threads that read. A disk that does not answer delays neither `close` nor the end of the program:
reads that do not end are left running, and keep the memory that they write to.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread

CLOSE_TIMEOUT_S = 10.0

Work = Callable[[], None]
Waiting = SimpleQueue[tuple[Work, Future[None]] | None]  # None ends a thread

logger = logging.getLogger(__name__)


open_threads: weakref.WeakSet[ReadThreads] = weakref.WeakSet()


class PoolClosed(RuntimeError):
    """Work for a pool that takes no more, as at the end of a program that left its model open."""


class ReadThreads:
    """A pool of at most `num_threads` threads, each started when there is work for it."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._waiting: Waiting = SimpleQueue()
        self._threads: list[Thread] = []
        self._process = os.getpid()  # that the threads are in
        self._lock = Lock()
        self._end = weakref.finalize(self, self._waiting.put, None)  # once
        open_threads.add(self)

    def submit(self, work: Work, future: Future[None]) -> None:
        """Do `work`, unless `future` is cancelled before, which then tells how it ended. The caller
        has the future before the work may begin, even if Ctrl-C interrupts this call. Raises
        PoolClosed after `close`, and RuntimeError if no thread can be started.
        """
        with self._lock:
            if not self._end.alive:
                raise PoolClosed(f"{self._name}: closed")
            self._waiting.put((work, future))
            if self._process != os.getpid():  # a fork has no threads but the one that made it
                self._threads = []
                self._process = os.getpid()
            if len(self._threads) < self._num_threads:
                name = f"{self._name}_{len(self._threads)}"
                thread = Thread(target=_run, args=(self._waiting,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        raise
                    return  # the system gives no more: those that there are do it
                self._threads.append(thread)

    def end(self) -> list[Thread]:
        """Refuse new work; returns the threads that may still be running."""
        with self._lock:
            self._end()
            open_threads.discard(self)
            return self._threads


def close(*pools: ReadThreads) -> None:
    """End these pools, and wait a limited time for the work that was submitted to them."""
    running = [thread for pool in pools for thread in pool.end()]
    give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in running:
        thread.join(max(0.0, give_up_at - time.monotonic()))
    if left := [thread.name for thread in running if thread.is_alive()]:
        logger.warning("reads did not end, and are left behind: %s", ", ".join(left))


@atexit.register
def _close_all() -> None:
    """Python stops daemon threads anywhere at exit. Inside torch's code that aborts the process."""
    close(*open_threads)


def _do(work: Work, future: Future[None]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)


def _run(waiting: Waiting) -> None:
    while (task := waiting.get()) is not None:
        _do(*task)
        del task  # frees what it refers to before the wait for the next one
    # Wakes the next thread. `end` puts only one None: it cannot count on knowing every thread, as
    # Ctrl-C may have interrupted `submit` after it started one.
    waiting.put(None)
