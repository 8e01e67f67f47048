"""Fills free HOST slots with experts that no layer has asked for yet: the likeliest first, as far
as anything is known, else in the order of the files.

A thread of its own decides about these loads, in short turns between the layers of the model, under
the engine's lock. Nothing is evicted for them, every other read goes first, and what they brought
leaves first: it is transient, as what prefill brings.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Thread

from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.memory.mover import LOAD_TIMEOUT_S, Mover
from moe_infinity.memory.slots import MappedSlots
from moe_infinity.memory.threads import PoolClosed
from moe_infinity.predict.planner import LOADING_SHARE
from moe_infinity.system.threads import keep_running

# Under way at once: two for each of four read threads. Their slots cannot be evicted meanwhile.
MOST_LOADING = 8
PLANNED = 64  # experts whose order is decided at once: it changes while the predictor learns
PAUSE_S = 0.5  # between two turns if no load ends

logger = logging.getLogger(__name__)


class Preloader:
    """For the tier of slots that is filled from disk."""

    def __init__(
        self,
        bookkeeping: Bookkeeping,
        in_file_order: Callable[[list[ExpertKey]], Sequence[ExpertKey]],
        # Those of some of a layer that the page cache has where they can be used.
        present: Callable[[Sequence[ExpertKey]], Iterable[ExpertKey]],
    ) -> None:
        tier = bookkeeping.tiers[-1]
        self._slots = tier.slots
        self._table = tier.table
        assert isinstance(tier.mover, Mover), tier
        self._mover: Mover = tier.mover
        self._books = bookkeeping
        self._in_file_order = in_file_order
        self._present = present
        self._keys: Sequence[ExpertKey] | None = None  # of all experts, in that order
        self._planned: list[ExpertKey] = []  # the next one last
        self._most_loading = min(MOST_LOADING, tier.table.num_slots // LOADING_SHARE)
        self.load_ended = Event()

    def enter_present(self) -> None:
        """Enter at once the experts that need no reading, if they are used in the page cache: a
        look at their pages while they compute costs less than threads that visit all of them.
        """
        if not isinstance(self._slots, MappedSlots):
            return
        for moe_layer_idx in range(len(self._books.keys)):
            local = self._books.local_keys(moe_layer_idx)
            absent = [key for key in local if self._table.lookup(key) is None]
            for key in self._present(absent) if absent else ():
                if not self._table.num_free:
                    return
                self._slots.bytes_for(self._table.begin_load(key, Phase.PREFILL), key)
                self._table.finish_load(key)

    def advance(self) -> bool:
        """Enter the experts that arrived and begin the next loads. Returns False once nothing is
        left to do: no slot is free, a read failed or does not end, or there are too few slots.
        """
        self._mover.record_arrivals()
        if self._mover.is_preload_late:
            logger.warning("preloading of experts ends: none arrived for %.0f s", LOAD_TIMEOUT_S)
            return False
        num_under_way = self._mover.num_preloading
        if self._mover.failed or not self._most_loading:
            return num_under_way > 0
        loading = max(num_under_way, self._table.num_loading)
        room = min(self._most_loading - loading, self._table.num_free)
        for key in self._next(room):
            slot_id = self._table.begin_load(key, Phase.PREFILL)
            self._mover.preload({key: slot_id}, self.load_ended.set)
            self._books.note_preload(key)
        if self._table.num_resident == self._books.total_experts and len(self._books.tiers) == 1:
            self._books.note_all_resident()
        return self._table.num_free > 0 or self._mover.num_preloading > 0

    def _next(self, count: int) -> list[ExpertKey]:
        """At most so many absent experts."""
        found: list[ExpertKey] = []
        while len(found) < count:
            if not self._planned:
                self._planned = [key for key in self._plan() if key not in found][::-1]
            if not self._planned:
                break
            key = self._planned.pop()
            if self._table.lookup(key) is None:
                found.append(key)
        return found

    def _plan(self) -> list[ExpertKey]:
        """The absent experts that are likeliest to be used; equals in the order of the files."""
        if self._keys is None:
            self._keys = self._in_file_order([key for keys in self._books.keys for key in keys])
        local_LE = self._books.local_LE
        absent = [key for key in self._keys if local_LE[key] and self._table.lookup(key) is None]
        predictor = self._books.predictor
        if predictor is not None:
            base_LE = predictor.base_LE
            absent.sort(key=lambda key: -base_LE[key])
        return absent[:PLANNED]


def start_turns(turn: weakref.WeakMethod[Callable[[], bool]], load_ended: Event) -> Thread:
    """Start a thread that calls `turn` as loads end, until it gives False or its object is gone."""
    thread = Thread(target=_take_turns, args=(turn, load_ended), name="moe-infinity-fill")
    thread.daemon = True
    thread.start()
    return thread


def _take_turns(turn: weakref.WeakMethod[Callable[[], bool]], load_ended: Event) -> None:
    def take() -> bool:
        method = turn()
        try:
            if method is None or not method():
                return False
        except PoolClosed:
            return False
        del method  # the engine may be collected while this thread waits
        load_ended.wait(PAUSE_S)
        load_ended.clear()
        return True

    keep_running(take, "preloading of experts")
