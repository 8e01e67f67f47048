"""Threads that read, in a process that was forked when they were running."""

from __future__ import annotations

import os
from concurrent.futures import Future

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
