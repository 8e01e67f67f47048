"""Which experts have a slot of one tier, and which one leaves when room is needed.

    absent --begin_load--> LOADING --finish_load--> RESIDENT --evict--> absent
                              └------cancel_load------------------------^

Experts are read-only, so eviction copies nothing back: the copy one tier below stays true.
What prefill brings in is *transient* until a decode step uses it: transient experts leave first, so
a long prompt streams through a small ring of slots and does not flush what decoding lives on. One
thread decides (this table); other threads only copy bytes. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.errors import OutOfSlots
from moe_infinity.experts import ExpertKey, Phase, Residency

# A prefill step may take num_slots / 8 slots from the decode set; log.md 2026-11-21, "ring".
PREFILL_RING_SHARE = 8


class Held(NamedTuple):
    """What `holding` gives: a slot for every key, and which of them still need a load."""

    absent: list[ExpertKey]  # slots reserved, in LOADING: the caller must load them
    slot_ids: dict[ExpertKey, int]


@dataclass(slots=True)
class Entry:
    """One expert that has a slot."""

    slot_id: int
    state: Residency
    is_transient: bool = False  # brought in by prefill, not yet used by a decode step


class ResidencyTable:
    """The slots of one tier."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self.evictions = 0
        self._policy = policy
        self._entries: dict[ExpertKey, Entry] = {}
        self._loading: set[ExpertKey] = set()
        # Slots in use by a kernel, or that a layer waits for, by holder. Only looked at when a
        # victim is wanted: on a hit, holding costs one entry here and nothing per slot.
        self._held: dict[int, dict[ExpertKey, int]] = {}
        self._free = list(range(num_slots))[::-1]
        # The same facts by slot, as arrays, so that choosing a victim is a few vector operations.
        self._row_of_slot = np.full(num_slots, -1)
        self._expert_of_slot = np.full(num_slots, -1)
        self._resident = np.zeros(num_slots, dtype=bool)
        self._transient = np.zeros(num_slots, dtype=bool)

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: ExpertKey) -> Residency | None:
        """RESIDENT, LOADING, or None for absent."""
        entry = self._entries.get(key)
        return entry.state if entry is not None else None

    def slot_of(self, key: ExpertKey) -> int:
        """The slot of an expert that is not absent."""
        return self._entries[key].slot_id

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    def loading_keys(self) -> list[ExpertKey]:
        return list(self._loading)

    def resident_keys(self) -> list[ExpertKey]:
        return [key for key, entry in self._entries.items() if entry.state is Residency.RESIDENT]

    def census(self, keys: Sequence[ExpertKey]) -> tuple[int, int, int]:
        """How many of `keys` are resident, loading, absent."""
        present = sum(map(self._entries.__contains__, keys))
        loading = sum(map(self._loading.__contains__, keys)) if self._loading else 0
        return present - loading, loading, len(keys) - present

    def next_wave(self, waiting: Sequence[ExpertKey], phase: Phase) -> Sequence[ExpertKey]:
        """The part of `waiting` to hold, load and compute together: all that are present, then as
        many absent ones as there is room for. Raises OutOfSlots when nothing is present and nothing
        can leave.
        """
        absent = [key for key in waiting if key not in self._entries]
        if not absent:
            return waiting
        present = [key for key in waiting if key in self._entries]
        evictable = self._evictable()
        evictable[[self._entries[key].slot_id for key in present]] = False
        room = len(self._free) + int(evictable.sum())
        if phase is Phase.PREFILL:
            spare = len(self._free) + int((evictable & self._transient).sum())
            in_use = int((~evictable & self._transient).sum())
            ring = max(self.num_slots // PREFILL_RING_SHARE, 1)
            room = min(room, max(spare, ring - in_use, 0 if present else 1))
        if not present and room == 0:
            raise OutOfSlots(
                f"all {self.num_slots} slots are held or loading, none for {absent[0]}"
            )
        return present + absent[:room]

    @contextmanager
    def holding(self, keys: Sequence[ExpertKey], phase: Phase) -> Iterator[Held]:
        """Hold the experts that are here and reserve slots for the rest. Raises OutOfSlots."""
        absent: list[ExpertKey] = []
        slot_ids: dict[ExpertKey, int] = {}
        self._held[id(slot_ids)] = slot_ids
        try:
            for key in keys:  # present ones first: a reservation must not evict one of them
                entry = self._entries.get(key)
                if entry is None:
                    absent.append(key)
                    continue
                slot_ids[key] = entry.slot_id
                if entry.is_transient and phase is Phase.DECODE:
                    entry.is_transient = False
                    self._transient[entry.slot_id] = False
            self._reserve(absent, slot_ids, phase)
            yield Held(absent, slot_ids)
        finally:
            self._held.pop(id(slot_ids), None)

    def _reserve(self, keys: list[ExpertKey], slot_ids: dict[ExpertKey, int], phase: Phase) -> None:
        """A slot for every key, held at once, or for none."""
        begun = []
        try:
            for key in keys:
                slot_ids[key] = self.begin_load(key, phase)
                begun.append(key)
        except OutOfSlots:
            for key in begun:
                self.cancel_load(key)
            raise

    def begin_load(self, key: ExpertKey, phase: Phase) -> int:
        """Reserve a slot for `key`, evicting if none is free. Raises OutOfSlots."""
        assert key not in self._entries, key  # callers look up first
        if not self._free:
            self._evict_one()
        slot_id = self._free.pop()
        is_transient = phase is Phase.PREFILL
        self._entries[key] = Entry(slot_id, Residency.LOADING, is_transient=is_transient)
        self._loading.add(key)
        self._row_of_slot[slot_id], self._expert_of_slot[slot_id] = key
        self._transient[slot_id] = is_transient
        return slot_id

    def finish_load(self, key: ExpertKey) -> None:
        """The bytes of `key` are in its slot."""
        entry = self._entries[key]
        assert entry.state is Residency.LOADING, (key, entry)
        entry.state = Residency.RESIDENT
        self._loading.remove(key)
        self._resident[entry.slot_id] = True

    def cancel_load(self, key: ExpertKey) -> None:
        """The load of `key` failed: its slot is free again. Holders let go without harm."""
        entry = self._entries.pop(key)
        assert entry.state is Residency.LOADING, (key, entry)
        self._loading.remove(key)
        self._forget_slot(entry.slot_id)

    def _evictable(self) -> NDArray[np.bool_]:
        """By slot: RESIDENT and held by nobody."""
        evictable: NDArray[np.bool_] = self._resident.copy()
        for slot_ids in self._held.values():
            evictable[list(slot_ids.values())] = False
        return evictable

    def _evict_one(self) -> None:
        """The lowest-scored resident that is not held, transient ones before all others."""
        evictable = self._evictable()
        candidates = evictable & self._transient
        if not candidates.any():
            candidates = evictable
        slots = candidates.nonzero()[0]
        if not len(slots):
            raise OutOfSlots(f"all {self.num_slots} slots are held or loading")
        scores = self._policy.scores()[self._row_of_slot[slots], self._expert_of_slot[slots]]
        slot_id = int(slots[scores.argmin()])
        del self._entries[
            ExpertKey(int(self._row_of_slot[slot_id]), int(self._expert_of_slot[slot_id]))
        ]
        self._forget_slot(slot_id)
        self.evictions += 1

    def _forget_slot(self, slot_id: int) -> None:
        self._free.append(slot_id)
        self._resident[slot_id] = self._transient[slot_id] = False
        self._row_of_slot[slot_id] = self._expert_of_slot[slot_id] = -1

    def recover(self) -> None:
        """After a step was interrupted anywhere, this table included: nobody holds anything any
        more, and what can be derived from the entries is derived anew.
        """
        used = {entry.slot_id for entry in self._entries.values()}
        self._held.clear()
        self._free = [slot for slot in reversed(range(self.num_slots)) if slot not in used]
        self._row_of_slot[:] = self._expert_of_slot[:] = -1
        self._resident[:] = self._transient[:] = False
        for key, entry in self._entries.items():
            self._row_of_slot[entry.slot_id], self._expert_of_slot[entry.slot_id] = key
            self._transient[entry.slot_id] = entry.is_transient
            self._resident[entry.slot_id] = entry.state is Residency.RESIDENT
        self._loading = {k for k, e in self._entries.items() if e.state is Residency.LOADING}

    def check_invariants(self) -> None:
        """Every slot is free or has exactly one owner, and the arrays say what the entries say."""
        used = [entry.slot_id for entry in self._entries.values()]
        assert sorted(used + self._free) == list(range(self.num_slots)), (used, self._free)
        for key, entry in self._entries.items():
            slot = entry.slot_id
            assert (key in self._loading) == (entry.state is Residency.LOADING), (key, entry)
            assert (self._row_of_slot[slot], self._expert_of_slot[slot]) == key, (key, entry)
            assert self._transient[slot] == entry.is_transient, (key, entry)
            assert self._resident[slot] == (entry.state is Residency.RESIDENT), (key, entry)
        assert not self._resident[self._free].any(), self._free
