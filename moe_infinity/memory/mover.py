"""The mover reads experts from disk into slots that the residency table has reserved.

    load_now     a layer waits for them                                 demand threads
    stream       the next layer of a long prompt will wait for them     demand threads, after those
    load_ahead   a prediction says that a layer will wait for them      one thread, yields
    preload      no layer is known to wait, but slots are free          threads of its own, yield

A read that yields pauses between chunks while demand reads run, until a layer asks for its expert.
Loads begin and end only in calls by the thread that decides (`LocalExperts.deciding`); read threads
only fill slots. Every wait is bounded, and the time spent waiting is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Protocol

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import LoadTimeout
from moe_infinity.experts import ExpertKey, Phase, Residency
from moe_infinity.memory import threads
from moe_infinity.memory.threads import ReadThreads

# One expert from a slow network disk takes seconds; past this something is wrong.
LOAD_TIMEOUT_S = 120.0
ARRIVAL_POLL_S = 0.2  # after which a wait for arrivals lets its caller look at something else
LOAD_TIME_RATE = 0.1  # weight of the newest load in the moving average of load times

Read = Callable[[ExpertKey, int], None]  # fills a slot with an expert's bytes
# The same, but yields to demand reads until its third argument, `is_wanted()`, returns True.
ReadGivingWay = Callable[[ExpertKey, int, Callable[[], bool]], None]

logger = logging.getLogger(__name__)


class SharedLoads(Protocol):
    """Several reads that threads do together."""

    futures: list[Future[None]]  # one for each read

    @property
    def num_chunks(self) -> int:
        """The pieces of work that threads may take."""

    def work(self) -> None:
        """Take part, in a read thread, until nothing is left to take."""

    def stop(self) -> None:
        """Let threads take nothing more; futures of what is not read by then are cancelled."""


Share = Callable[[Sequence[tuple[ExpertKey, int]]], SharedLoads | None]  # experts and slots


class Mover:
    """DISK -> HOST for one residency table. `read` and `read_ahead` run in read threads;
    `read_ahead` gives way to `read`. `shared` makes one read of several, None where that cannot be.
    Demand loads begin `in_file_order`.
    """

    def __init__(
        self,
        table: ResidencyTable,
        read: Read,
        *,
        num_threads: int,
        read_ahead: ReadGivingWay | None = None,  # None: the same as `read`
        shared: Share | None = None,
        in_file_order: Callable[[Iterable[ExpertKey]], Iterable[ExpertKey]] = list,
    ) -> None:
        self._table = table
        self._read = read
        self._read_ahead = read_ahead or (lambda key, slot_id, is_wanted: read(key, slot_id))
        self._shared = shared or (lambda loads: None)
        self._in_file_order = in_file_order
        self._num_threads = num_threads
        self._threads = ReadThreads(num_threads, "moe-infinity-read")
        self._ahead_threads = ReadThreads(1, "moe-infinity-prefetch")
        self._preload_threads = ReadThreads(num_threads, "moe-infinity-preload")
        self._loading: dict[ExpertKey, Future[None]] = {}
        self._begun: list[SharedLoads] = []  # those that may not be over
        # Loads that no layer has asked for yet, and the threads they were given to.
        self._ahead: dict[ExpertKey, ReadThreads] = {}
        self._last_end = 0.0  # of a load, in the time of time.perf_counter()
        self.failed: set[ExpertKey] = set()  # loads ahead that failed
        self.load_s = 0.0  # moving average of the seconds of a prefetch; 0 before the first

    def load_now(self, keys: Iterable[ExpertKey], slot_ids: dict[ExpertKey, int]) -> None:
        """Start loads that the current layer waits for. Their slots are already reserved."""
        self._begin({key: slot_ids[key] for key in self._in_file_order(keys)})

    def stream(self, keys: Sequence[ExpertKey]) -> Sequence[ExpertKey]:
        """Begin to read experts that a long prompt will need next, behind the demand loads that
        have begun; returns those that were begun.

        They are as many as the prefill quota has room for. One slot is left, for an MoE layer that
        needs none of them.
        """
        table = self._table
        present = [key for key in keys if table.lookup(key) is not None]
        absent = [key for key in self._in_file_order(keys) if table.lookup(key) is None]
        room = min(table.room(Phase.PREFILL, present), table.num_slots - table.num_loading - 1)
        coming = absent[: max(room, 0)]
        with table.holding([*present, *coming], Phase.PREFILL) as held:
            self._ahead.update(dict.fromkeys(coming, self._threads))
            self._begin({key: held.slot_ids[key] for key in coming})
        return coming

    def _begin(self, slot_ids: Mapping[ExpertKey, int]) -> None:
        """Begin reads in demand threads, together if possible."""
        shared = self._shared(list(slot_ids.items()))
        if shared is None:
            for key, slot_id in slot_ids.items():
                self._submit(self._threads, self._read, key, slot_id)
            return
        self._begun = [one for one in self._begun if not all(f.done() for f in one.futures)]
        self._begun.append(shared)
        self._loading.update(zip(slot_ids, shared.futures, strict=True))
        for _ in range(min(self._num_threads, shared.num_chunks)):
            self._threads.submit(shared.work, Future())

    def load_ahead(self, slot_ids: Mapping[ExpertKey, int]) -> None:
        """Queue loads that no layer waits for yet; they run one at a time. Their slots are already
        reserved.
        """
        for key, slot_id in slot_ids.items():
            self._submit_ahead(self._ahead_threads, self._read_timed, key, slot_id)

    def preload(self, slot_ids: Mapping[ExpertKey, int], on_end: Callable[[], None]) -> None:
        """Queue loads into slots that are not needed now. `on_end` is called as each of them ends,
        by the thread that read.
        """
        if not self.num_preloading:
            self._last_end = time.perf_counter()
        for key, slot_id in slot_ids.items():
            self._submit_ahead(self._preload_threads, self._read_giving_way, key, slot_id)
            self._loading[key].add_done_callback(lambda _: on_end())

    @property
    def num_preloading(self) -> int:
        """Loads of `preload` that no layer has asked for and that have not been entered."""
        return list(self._ahead.values()).count(self._preload_threads)

    @property
    def is_preload_late(self) -> bool:
        """True if preloads are under way and no load has ended for long."""
        return self.num_preloading > 0 and time.perf_counter() > self._last_end + LOAD_TIMEOUT_S

    def num_read(self, keys: Collection[ExpertKey]) -> int:
        """How many of these loads, which have just begun, read from disk."""
        return len(keys)

    def _submit_ahead(self, pool: ReadThreads, read: Read, key: ExpertKey, slot: int) -> None:
        self._ahead[key] = pool  # before submitting: the read looks here to see if it must yield
        self._submit(pool, read, key, slot)

    def _submit(self, pool: ReadThreads, read: Read, key: ExpertKey, slot: int) -> None:
        """Begin a read. Its future is stored before, so that recovery finds the read even if
        `submit` is interrupted.
        """
        self._loading[key] = Future()
        pool.submit(partial(read, key, slot), self._loading[key])

    def _read_timed(self, key: ExpertKey, slot_id: int) -> None:
        started = time.perf_counter()
        self._read_giving_way(key, slot_id)
        took_s = time.perf_counter() - started
        self.load_s += (took_s - self.load_s) * (LOAD_TIME_RATE if self.load_s else 1)

    def _read_giving_way(self, key: ExpertKey, slot_id: int) -> None:
        self._read_ahead(key, slot_id, lambda: key not in self._ahead)

    def record_arrivals(self) -> float:
        """Record in the table which loads that no layer asked for have arrived. Returns the seconds
        until all prefetches will have.

        A load that failed is dropped and logged; a demand load of the expert raises the error.
        Preloading stops at the first failure of any kind, so a failed preload is logged only if
        nothing failed before.
        """
        for key in [key for key in self._ahead if self._loading[key].done()]:
            pool = self._ahead.pop(key)
            error = self._end_load(key)
            if error is None:
                continue
            if pool is not self._preload_threads:
                logger.warning("prefetch of %s failed: %s", key, error)
            elif not self.failed:
                logger.warning("preloading of experts ends: %s", error)
            self.failed.add(key)
        return list(self._ahead.values()).count(self._ahead_threads) * self.load_s

    def arrivals(
        self, keys: Sequence[ExpertKey], counters: PhaseCounters
    ) -> Iterator[Sequence[ExpertKey]]:
        """Yield every key once its expert is RESIDENT: residents at once, others as they arrive.

        While nothing arrives it yields an empty sequence now and then, so that the caller can do
        something else. Raises what a failed read raised, with its slot free again, or LoadTimeout.
        """
        if not self._loading:  # all are hits
            assert self._table.num_loading == 0, self._table.loading_keys()
            yield keys
            return
        joined = self._ask_for(keys)
        waiting = {self._loading[key]: key for key in keys if key in self._loading}
        resident = [key for key in keys if key not in self._loading]
        assert all(self._table.lookup(key) is Residency.RESIDENT for key in resident), resident
        if resident:
            yield resident
        give_up_at = time.perf_counter() + LOAD_TIMEOUT_S
        while waiting:
            started = time.perf_counter()
            left_s = min(max(give_up_at - started, 0), ARRIVAL_POLL_S)
            done, _ = wait(waiting, timeout=left_s, return_when=FIRST_COMPLETED)
            ended = time.perf_counter()
            counters.stall_s += ended - started
            if not done and ended >= give_up_at:
                raise LoadTimeout(
                    f"{len(waiting)} experts did not arrive within {LOAD_TIMEOUT_S:.0f} s"
                )
            arrived = [waiting.pop(future) for future in done]
            again = [key for key in arrived if key in joined and self._loading[key].exception()]
            for key in again:  # one retry: the error came before any layer asked
                joined.remove(key)
                self._submit(self._threads, self._read, key, self._table.slot_of(key))
                waiting[self._loading[key]] = key
            arrived = [key for key in arrived if key not in again]
            for key in arrived:
                if (error := self._end_load(key)) is not None:
                    raise error
            yield arrived
            if done:
                give_up_at = time.perf_counter() + LOAD_TIMEOUT_S

    def _ask_for(self, keys: Sequence[ExpertKey]) -> set[ExpertKey]:
        """Turn the pending loads among `keys` into demand loads: requeue those that wait in
        threads that yield, and return the others, which no longer yield.
        """
        joined = set()
        for key in [key for key in keys if key in self._ahead]:
            pool = self._ahead.pop(key)
            if pool is not self._threads and self._loading[key].cancel():
                self._submit(self._threads, self._read, key, self._table.slot_of(key))
            else:
                joined.add(key)
        if self._ahead:
            self.record_arrivals()
        return joined

    def recover(self) -> None:
        """After a step was interrupted: end its loads, keep the experts that arrived, and free the
        slots of the others.
        """
        self._end_loads()
        for key in self._table.loading_keys():
            future = self._loading.get(key)
            arrived = future is not None and not future.cancelled() and not future.exception()
            if arrived:
                self._table.finish_load(key)
            else:
                self._table.cancel_load(key)
        self._loading.clear()
        self._ahead.clear()

    def _end_loads(self) -> None:
        """Cancel reads that have not begun and wait for the others. Raises LoadTimeout."""
        self._stop_shared()
        begun = [future for future in self._loading.values() if not future.cancel()]
        _, late = wait(begun, timeout=LOAD_TIMEOUT_S)
        if late:
            raise LoadTimeout(
                f"{len(late)} experts of an earlier step did not arrive "
                f"within {LOAD_TIMEOUT_S:.0f} s"
            )

    def _stop_shared(self) -> None:
        for shared in self._begun:
            shared.stop()
        self._begun = []

    def _end_load(self, key: ExpertKey) -> BaseException | None:
        """Enter in the table that the read of `key` ended; return its error if it failed."""
        self._last_end = time.perf_counter()
        error = self._loading.pop(key).exception()
        if error is not None:
            self._table.cancel_load(key)
            return error
        self._table.finish_load(key)
        self.failed.discard(key)
        return None

    def close(self) -> None:
        """Cancel reads that have not begun and wait a limited time for the others."""
        self._stop_shared()
        for future in self._loading.values():
            future.cancel()
        threads.close(self._threads, self._ahead_threads, self._preload_threads)
