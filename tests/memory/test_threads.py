"""Threads that read, where no other can be started, and in a process that was forked."""

from __future__ import annotations

import os
from concurrent.futures import Future
from threading import Thread

import pytest

from moe_infinity.memory import threads
from moe_infinity.memory.threads import ReadThreads


def ends(pool: ReadThreads) -> bool:
    future: Future[None] = Future()
    pool.submit(lambda: None, future)
    try:
        future.result(5)
    except TimeoutError:
        return False
    return True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork, since Python 3.12
def test_a_forked_process_starts_threads_of_its_own():
    """An expert that a child wanted did not arrive within two minutes."""
    pool = ReadThreads(2, "test")
    assert ends(pool)
    child = os.fork()
    if child == 0:
        os._exit(int(not ends(pool)))
    assert os.waitpid(child, 0)[1] == 0
    assert ends(pool)
    threads.close(pool)


def test_a_thread_that_cannot_be_started_is_no_error_while_others_run(monkeypatch):
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = ReadThreads(3, "test")
    assert ends(pool)
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        assert ends(pool)
        with pytest.raises(RuntimeError, match="new thread"):
            ends(ReadThreads(3, "none"))
    assert ends(pool)
    assert len(pool._threads) == 2
    threads.close(pool)
