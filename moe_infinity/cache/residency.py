"""Which experts have a slot of one tier, and which one leaves when room is needed.

    absent --begin_load--> LOADING --finish_load--> RESIDENT --evict--> absent
                              └------cancel_load------------------------^

Experts are read-only, so eviction copies nothing back: the copy one tier below remains valid.
What prefill brings in is *transient* until a decode step uses it. Transient experts leave first, so
a long prompt passes through a small prefill quota of slots and does not evict what decoding uses.
Only the thread that holds the engine's lock (`LocalExperts.deciding`) changes this table; read
threads only fill slots. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.counters import PrefetchCounters
from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.errors import OutOfSlots
from moe_infinity.experts import ExpertKey, Phase, Residency

# The prefill quota: a prompt may take a quarter of the slots from what was there before it. With an
# eighth its reads wait for its products, as half of the quota loads while the other half computes.
PREFILL_QUOTA_DIVISOR = 4


class Held(NamedTuple):
    """A slot for every key, and which of them still need a load."""

    absent: list[ExpertKey]  # slots reserved, in LOADING: the caller must load them
    slot_ids: dict[ExpertKey, int]


@dataclass(slots=True)
class Entry:
    """One expert that has a slot."""

    slot_id: int
    state: Residency
    is_transient: bool = False  # brought in by the last prompt, not yet used by a decode step
    is_ahead: bool = False  # brought in by prefetch, not yet used


class ResidencyTable:
    """Which expert has which slot of one tier, and the expert's residency there."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        assert num_slots >= 1, num_slots
        self.evictions = 0
        self.prefetches = PrefetchCounters()
        self._policy = policy
        self._entries: dict[ExpertKey, Entry] = {}
        self._loading: set[ExpertKey] = set()
        # The slots of each holder, by id of its dict: in use by a kernel, or waited for. Consulted
        # only when a victim is chosen, so a hit does not touch the arrays by slot.
        self._held: dict[int, dict[ExpertKey, int]] = {}
        self._free = list(range(num_slots))[::-1]
        self._withdrawn: list[int] = []  # slots that may have no expert for now
        self.least_quota = 1  # slots that a prompt may take from what was there before it
        self._unfilled = set(self._free)  # since they are here or were restored: without memory
        # The same facts by slot, as arrays, so that choosing a victim is a few vector operations.
        self._layer_of_slot = np.full(num_slots, -1)
        self._expert_of_slot = np.full(num_slots, -1)
        self._transient = np.zeros(num_slots, dtype=bool)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_slots(self) -> int:
        """Slots that may have an expert."""
        return len(self._transient) - len(self._withdrawn)

    @property
    def num_withdrawn(self) -> int:
        return len(self._withdrawn)

    @property
    def num_unfilled(self) -> int:
        """Slots that no expert has been in yet, so that the system gave them no memory."""
        return len(self._unfilled)

    @property
    def num_resident(self) -> int:
        return len(self._entries) - len(self._loading)

    def slots_of(self, keys: Iterable[ExpertKey]) -> list[int]:
        """The slots of experts that have one."""
        return [self._entries[key].slot_id for key in keys]

    def lookup(self, key: ExpertKey) -> Residency | None:
        """RESIDENT, LOADING, or None for absent."""
        entry = self._entries.get(key)
        return entry.state if entry is not None else None

    def is_transient(self, key: ExpertKey) -> bool:
        """True for an expert that prefill brought in and no decode step has used yet; it must not
        be absent.
        """
        return self._entries[key].is_transient

    def slot_of(self, key: ExpertKey) -> int:
        """The slot of an expert that is not absent."""
        return self._entries[key].slot_id

    def cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Layers and experts of all that have a slot: indexes of a matrix [layers, experts]."""
        used = self._layer_of_slot >= 0
        return self._layer_of_slot[used], self._expert_of_slot[used]

    @property
    def num_free(self) -> int:
        """Slots that have no expert."""
        return len(self._free)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    def loading_keys(self) -> list[ExpertKey]:
        return list(self._loading)

    def resident_keys(self) -> list[ExpertKey]:
        return [key for key, entry in self._entries.items() if entry.state is Residency.RESIDENT]

    def resident_slots(self) -> dict[ExpertKey, int]:
        return {key: self._entries[key].slot_id for key in self.resident_keys()}

    def census(self, keys: Sequence[ExpertKey]) -> tuple[int, int, int]:
        """Return how many of `keys` are resident, loading and absent."""
        present = sum(map(self._entries.__contains__, keys))
        loading = sum(map(self._loading.__contains__, keys)) if self._loading else 0
        return present - loading, loading, len(keys) - present

    def begin_step(self, phase: Phase, *, least_quota: int = 1) -> None:
        """A forward pass begins. What earlier prompts brought in stays for a prompt like all that
        is there: only what it brings in itself leaves outside the quota, which is `least_quota`
        slots or more.
        """
        self.least_quota = least_quota
        if phase is Phase.PREFILL and self._transient.any():
            for entry in self._entries.values():
                entry.is_transient = False
            self._transient[:] = False

    def next_wave(self, waiting: Sequence[ExpertKey], phase: Phase) -> Sequence[ExpertKey]:
        """The part of `waiting` to hold, load and compute together: all that are present, and as
        many absent ones as there is room for. Raises OutOfSlots if nothing is present and nothing
        can leave.
        """
        absent = [key for key in waiting if key not in self._entries]
        if not absent:
            return waiting
        present = [key for key in waiting if key in self._entries]
        if phase is Phase.DECODE and not self._held:  # the usual case, without looking at slots
            num_loading = sum(map(self._loading.__contains__, present)) if self._loading else 0
            held = len(self._loading) + len(present) - num_loading
            if len(absent) <= self.num_slots - held:
                return present + absent
        room = self.room(phase, present)
        if not present and room == 0:
            room = min(self.room(Phase.DECODE), 1)  # past the quota, as nothing else can go on
        if not present and room == 0:
            raise OutOfSlots(
                f"all {self.num_slots} slots are held or loading, none for {absent[0]}"
            )
        return present + absent[:room]

    def room(self, phase: Phase, present: Sequence[ExpertKey] = ()) -> int:
        """The number of absent experts that a step may bring in now while `present` stay: in
        prefill no more than its quota lets it take from decoding.
        """
        evictable = self._evictable()
        evictable[[self._entries[key].slot_id for key in present]] = False
        room = len(self._free) + int(evictable.sum())
        if phase is Phase.PREFILL:
            spare = len(self._free) + int((evictable & self._transient).sum())
            in_use = int((~evictable & self._transient).sum())
            quota = max(self.num_slots // PREFILL_QUOTA_DIVISOR, self.least_quota)
            room = min(room, max(spare, quota - in_use))
        return room

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
                self._use(entry, phase)
            slot_ids.update(zip(absent, self._reserve(absent, phase), strict=True))
            yield Held(absent, slot_ids)
        finally:
            self._held.pop(id(slot_ids), None)

    def _use(self, entry: Entry, phase: Phase) -> None:
        if entry.is_ahead:
            entry.is_ahead = False
            self.prefetches.add_use(is_late=entry.state is Residency.LOADING)
        if entry.is_transient and phase is Phase.DECODE:
            entry.is_transient = False
            self._transient[entry.slot_id] = False

    def note_use(self, keys: Iterable[ExpertKey]) -> None:
        """Mark those of `keys` that are present as used by a decode step."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                self._use(entry, Phase.DECODE)

    def begin_prefetch(self, key: ExpertKey) -> int:
        """Reserve a slot for `key`, which no layer waits for yet. Raises OutOfSlots."""
        slot_id = self.begin_load(key, Phase.DECODE)
        self._entries[key].is_ahead = True
        self.prefetches.begun += 1
        return slot_id

    def begin_load(self, key: ExpertKey, phase: Phase) -> int:
        """Reserve a slot for `key`, evicting if none is free. Raises OutOfSlots."""
        assert key not in self._entries, key  # callers look up first
        return self._reserve([key], phase)[0]

    def _reserve(self, keys: Sequence[ExpertKey], phase: Phase) -> list[int]:
        """Reserve slots for all of these absent experts, which are LOADING from now on, or for none
        of them. Raises OutOfSlots.
        """
        self._make_room(len(keys))
        is_transient = phase is Phase.PREFILL
        slot_ids = []
        for key in keys:
            slot_id = self._free.pop()
            slot_ids.append(slot_id)
            self._entries[key] = Entry(slot_id, Residency.LOADING, is_transient)
            self._layer_of_slot[slot_id], self._expert_of_slot[slot_id] = key
            if is_transient:
                self._transient[slot_id] = True
        self._loading.update(keys)
        return slot_ids

    def finish_load(self, key: ExpertKey) -> None:
        """Note that the bytes of `key` are in its slot."""
        entry = self._entries[key]
        assert entry.state is Residency.LOADING, (key, entry)
        entry.state = Residency.RESIDENT
        self._loading.remove(key)
        self._unfilled.discard(entry.slot_id)

    def cancel_load(self, key: ExpertKey) -> None:
        """Note that the load of `key` failed: its slot is free again, and every `Held.slot_ids`
        loses it.
        """
        entry = self._entries.pop(key)
        assert entry.state is Residency.LOADING, (key, entry)
        self._loading.remove(key)
        for slot_ids in self._held.values():
            slot_ids.pop(key, None)
        self._free_slots([entry.slot_id])

    def _evictable(self) -> NDArray[np.bool_]:
        """A mask by slot: True for slots whose expert is RESIDENT and not held."""
        evictable = np.ones(len(self._transient), dtype=bool)
        evictable[self._barred_slots()] = False
        return evictable

    def _barred_slots(self) -> list[int]:
        """Slots that are free, withdrawn, loading or held; some may be named twice."""
        barred = [*self._free, *self._withdrawn]
        barred += [self._entries[key].slot_id for key in self._loading]
        for slot_ids in self._held.values():
            barred += slot_ids.values()
        return barred

    def _make_room(self, num_slots: int) -> None:
        """Evict until `num_slots` slots are free. Raises OutOfSlots, in which case nothing is
        evicted.
        """
        wanted = num_slots - len(self._free)
        if wanted <= 0:
            return
        victims = self._victims(wanted)
        if len(victims) < wanted:
            raise OutOfSlots(f"all {self.num_slots} slots are held or loading, {num_slots} wanted")
        self._evict(victims)

    def _evict(self, victims: list[int]) -> None:
        """Evict the experts in these slots."""
        slots = np.array(victims, dtype=np.int64)
        layers = self._layer_of_slot[slots].tolist()
        experts = self._expert_of_slot[slots].tolist()
        for key in map(ExpertKey, layers, experts):
            self.prefetches.wasted += self._entries.pop(key).is_ahead
        self._free_slots(victims)
        self.evictions += len(victims)

    def evict_all(self) -> None:
        """Evict every expert that is neither loading nor held."""
        self._evict(np.flatnonzero(self._evictable()).tolist())

    def withdraw(self, num_slots: int) -> list[int]:
        """Take so many slots out of use, or as many as can be emptied now, and return them."""
        self._evict(self._victims(num_slots - len(self._free)))
        slot_ids = [self._free.pop() for _ in range(min(num_slots, len(self._free)))]
        self._withdrawn += slot_ids
        self._unfilled.difference_update(slot_ids)
        return slot_ids

    def restore(self, num_slots: int) -> None:
        """Put as many of the withdrawn slots into use again, or all of them."""
        for _ in range(min(num_slots, len(self._withdrawn))):
            self._free.append(self._withdrawn.pop())
            self._unfilled.add(self._free[-1])

    def lowest_scores(self, num_slots: int) -> NDArray[np.float64]:
        """The scores of the experts that `num_slots` loads would evict, lowest first: -inf for a
        free or transient slot, inf where nothing can leave.
        """
        scores = np.full(num_slots, np.inf)
        num_free = min(len(self._free), num_slots)
        scores[:num_free] = -np.inf
        victims = self._victims(num_slots - num_free)
        cells = self._layer_of_slot[victims], self._expert_of_slot[victims]
        lowest = np.where(self._transient[victims], -np.inf, self._policy.scores()[cells])
        scores[num_free : num_free + len(victims)] = np.sort(lowest)
        return scores

    def _victims(self, num_slots: int) -> list[int]:
        """The slots to give up first, at most `num_slots`: the lowest-scored residents that are not
        held, transient ones before all others.
        """
        if num_slots <= 0:
            return []
        of_all = self._policy.scores()
        # take() needs a sixth of the time of an index of two arrays. Free slots get an
        # arbitrary score; they are masked below.
        cells = self._layer_of_slot * of_all.shape[1] + self._expert_of_slot
        scores = of_all.take(cells, mode="clip")
        if np.count_nonzero(self._transient):
            evictable = self._evictable()
            order = np.lexsort((scores, ~self._transient, ~evictable))
            slots: list[int] = order[: min(num_slots, int(evictable.sum()))].tolist()
            return slots
        scores[self._barred_slots()] = np.inf
        if num_slots == 1:
            order = scores.argmin(keepdims=True)
        else:
            order = scores.argpartition(min(num_slots, len(scores)) - 1)[:num_slots]
        return [slot for slot in order.tolist() if scores[slot] < np.inf]

    def _free_slots(self, slot_ids: list[int]) -> None:
        self._free += slot_ids
        # Once, as every index would turn a list into one.
        slots = np.array(slot_ids, dtype=np.int64)
        self._layer_of_slot[slots] = -1
        self._expert_of_slot[slots] = -1
        self._transient[slots] = False

    def recover(self) -> None:
        """Put the table in order after a step was interrupted anywhere, this table included.
        Nothing is held any more; all else is computed again from the entries.
        """
        used = {entry.slot_id for entry in self._entries.values()} | {*self._withdrawn}
        self._held.clear()
        self._free = [slot for slot in reversed(range(len(self._transient))) if slot not in used]
        self._layer_of_slot[:] = self._expert_of_slot[:] = -1
        self._transient[:] = False
        for key, entry in self._entries.items():
            self._layer_of_slot[entry.slot_id], self._expert_of_slot[entry.slot_id] = key
            self._transient[entry.slot_id] = entry.is_transient
        self._loading = {k for k, e in self._entries.items() if e.state is Residency.LOADING}

    def check_invariants(self) -> None:
        """Every slot is free or has exactly one owner, and the arrays say what the entries say."""
        used = [entry.slot_id for entry in self._entries.values()]
        slots = sorted(used + self._free + self._withdrawn)
        assert slots == list(range(len(self._transient))), (used, self._free, self._withdrawn)
        for key, entry in self._entries.items():
            slot = entry.slot_id
            assert (key in self._loading) == (entry.state is Residency.LOADING), (key, entry)
            assert (self._layer_of_slot[slot], self._expert_of_slot[slot]) == key, (key, entry)
            assert self._transient[slot] == entry.is_transient, (key, entry)
        assert (self._layer_of_slot[self._free] == -1).all(), self._free
