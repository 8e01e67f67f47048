"""The one object that copies experts. It moves what the residency table has reserved a slot for.

One thread decides: loads begin and end only in calls of its owner; the read threads do nothing but
fill slots. Every wait is bounded, and the time spent waiting is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import LoadTimeout
from moe_infinity.experts import ExpertKey, Residency

# One expert from a slow network disk takes seconds; past this something is wrong.
LOAD_TIMEOUT_S = 120.0


class Mover:
    """DISK -> HOST for one residency table. `read` fills a slot with an expert's bytes, in any
    thread.
    """

    def __init__(
        self, table: ResidencyTable, read: Callable[[ExpertKey, int], None], *, num_threads: int
    ) -> None:
        self._table = table
        self._read = read
        self._num_threads = num_threads
        self._pool = self._make_pool()
        self._loading: dict[ExpertKey, Future[None]] = {}

    def load_now(self, keys: Iterable[ExpertKey], slot_ids: dict[ExpertKey, int]) -> None:
        """Start loads the current layer waits for. The slots are reserved already."""
        for key in keys:
            self._loading[key] = self._pool.submit(self._read, key, slot_ids[key])

    def arrivals(self, keys: Iterable[ExpertKey], counters: PhaseCounters) -> Iterator[ExpertKey]:
        """Every key as its expert is there: residents at once, the others as they arrive.

        Raises what a failed read raised (its slot is free again), or LoadTimeout.
        """
        if not self._loading:  # every one a hit
            assert self._table.num_loading == 0, self._table.loading_keys()
            yield from keys
            return
        waiting: dict[Future[None], ExpertKey] = {}
        for key in keys:
            future = self._loading.get(key)
            if future is None:
                assert self._table.lookup(key) is Residency.RESIDENT, key
                yield key
            else:
                waiting[future] = key
        while waiting:
            started = time.perf_counter()
            done, _ = wait(waiting, timeout=LOAD_TIMEOUT_S, return_when=FIRST_COMPLETED)
            counters.stall_s += time.perf_counter() - started
            if not done:
                raise LoadTimeout(
                    f"{len(waiting)} experts did not arrive within {LOAD_TIMEOUT_S:.0f} s"
                )
            for future in done:
                key = waiting.pop(future)
                self._finish(key)
                yield key

    def recover(self) -> None:
        """After a step was interrupted: wait for its reads, those included that were begun but not
        yet noted, keep what arrived, and give back the slots of what did not.
        """
        _, late = wait(self._loading.values(), timeout=LOAD_TIMEOUT_S)
        if late:
            raise LoadTimeout(
                f"{len(late)} experts of an earlier step did not arrive "
                f"within {LOAD_TIMEOUT_S:.0f} s"
            )
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = self._make_pool()
        for key in self._table.loading_keys():
            future = self._loading.get(key)
            arrived = future is not None and not future.cancelled() and not future.exception()
            (self._table.finish_load if arrived else self._table.cancel_load)(key)
        self._loading.clear()

    def _make_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="moe-infinity-read")

    def _finish(self, key: ExpertKey) -> None:
        """The read of `key` ended: tell the table, and the caller if it failed."""
        future = self._loading.pop(key)
        error = future.exception()
        if error is not None:
            self._table.cancel_load(key)
            raise error
        self._table.finish_load(key)

    def close(self) -> None:
        """Drop what has not begun and wait for the reads that have."""
        self._pool.shutdown(wait=True, cancel_futures=True)
