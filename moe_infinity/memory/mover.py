"""The mover reads experts from disk into slots that the residency table has reserved.

One thread decides: loads begin and end only in calls of its owner. The read threads only fill
slots. Demand loads have threads of their own, so that they never queue behind prefetches. A
prefetch becomes a demand load if a layer asks for it before a thread has begun it. Every wait is
bounded, and the time spent waiting is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import LoadTimeout
from moe_infinity.experts import ExpertKey, Residency
from moe_infinity.memory import threads
from moe_infinity.memory.threads import ReadThreads

# One expert from a slow network disk takes seconds; past this something is wrong.
LOAD_TIMEOUT_S = 120.0
LOAD_TIME_RATE = 0.1  # weight of the newest load in the moving average of load times

Read = Callable[[ExpertKey, int], None]  # fills a slot with an expert's bytes

logger = logging.getLogger(__name__)


class Mover:
    """DISK -> HOST for one residency table. `read` and `read_ahead` run in read threads;
    `read_ahead` gives way to `read`.
    """

    def __init__(
        self,
        table: ResidencyTable,
        read: Read,
        *,
        num_threads: int,
        read_ahead: Read | None = None,  # None: the same as `read`
    ) -> None:
        self._table = table
        self._read = read
        self._read_ahead = read_ahead or read
        self._threads = ReadThreads(num_threads, "moe-infinity-read")
        self._ahead_threads = ReadThreads(1, "moe-infinity-prefetch")
        self._loading: dict[ExpertKey, Future[None]] = {}
        self._ahead: dict[ExpertKey, int] = {}  # slots of prefetches no layer has asked for yet
        self.failed: set[ExpertKey] = set()  # prefetches that failed; until a demand load succeeds
        self.load_s = 0.0  # moving average of the seconds of a prefetch; 0 before the first

    def load_now(self, keys: Iterable[ExpertKey], slot_ids: dict[ExpertKey, int]) -> None:
        """Start loads that the current layer waits for. Their slots are already reserved."""
        for key in keys:
            self._submit(self._threads, self._read, key, slot_ids[key])

    def load_ahead(self, slot_ids: Mapping[ExpertKey, int]) -> None:
        """Queue loads that no layer waits for yet; they run one at a time. Their slots are already
        reserved.
        """
        for key, slot_id in slot_ids.items():
            self._submit(self._ahead_threads, self._read_timed, key, slot_id)
            self._ahead[key] = slot_id

    def num_read(self, keys: Collection[ExpertKey]) -> int:
        """How many of these loads, which have just begun, read from disk."""
        return len(keys)

    def _submit(self, pool: ReadThreads, read: Read, key: ExpertKey, slot: int) -> None:
        """Begin a read. Its future is stored first: an interrupted `submit` may have begun it."""
        self._loading[key] = Future()
        pool.submit(partial(read, key, slot), self._loading[key])

    def _read_timed(self, key: ExpertKey, slot_id: int) -> None:
        started = time.perf_counter()
        self._read_ahead(key, slot_id)
        took_s = time.perf_counter() - started
        self.load_s += (took_s - self.load_s) * (LOAD_TIME_RATE if self.load_s else 1)

    def settle(self) -> float:
        """Enter the prefetches that have arrived; returns seconds until the others will have.

        A prefetch that failed is dropped and logged: a demand load of the expert raises the error.
        """
        for key in [key for key in self._ahead if self._loading[key].done()]:
            del self._ahead[key]
            try:
                self._finish(key)
            except Exception as error:
                self.failed.add(key)
                logger.warning("prefetch of %s failed: %s", key, error)
        return len(self._ahead) * self.load_s

    def arrivals(
        self, keys: Sequence[ExpertKey], counters: PhaseCounters
    ) -> Iterator[Sequence[ExpertKey]]:
        """Yield every key once its expert is RESIDENT: residents at once, others as they arrive.

        Raises what a failed read raised, with its slot free again, or LoadTimeout.
        """
        if not self._loading:  # all are hits
            assert self._table.num_loading == 0, self._table.loading_keys()
            yield keys
            return
        for key in self._ahead.keys() & keys:  # those still in the queue become demand loads
            slot_id = self._ahead.pop(key)
            if self._loading[key].cancel():
                self._submit(self._threads, self._read, key, slot_id)
        waiting = {self._loading[key]: key for key in keys if key in self._loading}
        resident = [key for key in keys if key not in self._loading]
        assert all(self._table.lookup(key) is Residency.RESIDENT for key in resident), resident
        if resident:
            yield resident
        while waiting:
            started = time.perf_counter()
            done, _ = wait(waiting, timeout=LOAD_TIMEOUT_S, return_when=FIRST_COMPLETED)
            counters.stall_s += time.perf_counter() - started
            if not done:
                raise LoadTimeout(
                    f"{len(waiting)} experts did not arrive within {LOAD_TIMEOUT_S:.0f} s"
                )
            arrived = [waiting.pop(future) for future in done]
            for key in arrived:
                self._finish(key)
            yield arrived

    def recover(self) -> None:
        """After a step was interrupted: end its loads, keep the experts that arrived, and free the
        slots of the others.
        """
        self._end_loads()
        for key in self._table.loading_keys():
            future = self._loading.get(key)
            arrived = future is not None and not future.cancelled() and not future.exception()
            (self._table.finish_load if arrived else self._table.cancel_load)(key)
        self._loading.clear()
        self._ahead.clear()

    def _end_loads(self) -> None:
        """Cancel reads that have not begun and wait for the others. Raises LoadTimeout."""
        begun = [future for future in self._loading.values() if not future.cancel()]
        _, late = wait(begun, timeout=LOAD_TIMEOUT_S)
        if late:
            raise LoadTimeout(
                f"{len(late)} experts of an earlier step did not arrive "
                f"within {LOAD_TIMEOUT_S:.0f} s"
            )

    def _finish(self, key: ExpertKey) -> None:
        """Enter in the table that the read of `key` ended; raises its error if it failed."""
        future = self._loading.pop(key)
        error = future.exception()
        if error is not None:
            self._table.cancel_load(key)
            raise error
        self._table.finish_load(key)
        self.failed.discard(key)

    def close(self) -> None:
        """Cancel reads that have not begun and wait a limited time for the others."""
        for future in self._loading.values():
            future.cancel()
        threads.close(self._threads, self._ahead_threads)
