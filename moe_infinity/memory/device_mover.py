"""DISK -> HOST -> DEVICE for the residency table of a device.

    in HOST      its copy begins at once
    on DISK      a HOST slot is reserved, the mover of that tier reads, the copy begins on arrival

One thread decides, as in mover.py: it begins copies and never waits for one; kernels do. An expert
counts as RESIDENT from the moment on that all kernels launched later see its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import OutOfSlots
from moe_infinity.experts import ExpertKey, Phase, Residency
from moe_infinity.memory.cuda import Copy
from moe_infinity.memory.device import DeviceSlots, SourceSlots
from moe_infinity.memory.mover import LOAD_TIME_RATE, Mover

logger = logging.getLogger(__name__)


class DeviceMover:
    """Used as a Mover is. `host_table`, `host_slots` and `host_mover` are the tier below; a load
    copies `copied_bytes[row]` bytes.
    """

    def __init__(
        self,
        table: ResidencyTable,
        slots: DeviceSlots,
        host_table: ResidencyTable,
        host_slots: SourceSlots,
        host_mover: Mover,
        *,
        copied_bytes: Sequence[int],
    ) -> None:
        self._table = table
        self._slots = slots
        self._host_table = host_table
        self._host_slots = host_slots
        self._host_mover = host_mover
        self._copied_bytes = copied_bytes
        self._loading: dict[ExpertKey, Copy | None] = {}  # None: not yet in HOST
        self._ahead: set[ExpertKey] = set()  # of these, prefetches no layer has asked for yet
        self.failed: set[ExpertKey] = set()  # prefetches that failed; until a demand load succeeds
        self.load_s = 0.0  # what a prefetch kept the slower of its links busy for, lately

    def load_now(self, keys: Iterable[ExpertKey], slot_ids: Mapping[ExpertKey, int]) -> None:
        """Start loads the current layer waits for. The slots are reserved already."""
        self._loading.update(dict.fromkeys(keys))
        self._bring(list(keys))

    def load_ahead(self, slot_ids: Mapping[ExpertKey, int]) -> None:
        """Begin loads no layer waits for yet; those that find no HOST slot are dropped."""
        self._ahead.update(slot_ids)
        self._loading.update(dict.fromkeys(slot_ids))
        for key in slot_ids:
            if self._host_table.lookup(key) is Residency.RESIDENT:
                self._begin_copy(key)
                continue
            try:
                host_slot_id = self._host_table.begin_load(key, self._phase_of(key))
            except OutOfSlots:
                self._cancel(key)
            else:
                self._host_mover.load_ahead({key: host_slot_id})

    def stream(self, keys: Iterable[ExpertKey]) -> Sequence[ExpertKey]:
        """Bring the experts that a long prompt will need next, as many as its ring has room for;
        gives those. One slot stays, for a row that needs none of them.
        """
        absent = [key for key in keys if self._table.lookup(key) is None]
        try:
            coming = self._table.next_wave(absent, Phase.PREFILL)
        except OutOfSlots:
            return []
        coming = coming[: max(0, self._table.num_slots - self._table.num_loading - 1)]
        self.load_ahead({key: self._table.begin_load(key, Phase.PREFILL) for key in coming})
        return coming

    def num_read(self, keys: Iterable[ExpertKey]) -> int:
        """How many of these loads, just begun, read from disk."""
        return len(self._on_disk(keys))

    def settle(self) -> float:
        """Take note of the prefetches that arrived; seconds until the others will have."""
        queued_s = self._host_mover.settle()
        for key in self._on_disk(self._ahead):
            state = self._host_table.lookup(key)
            if state is Residency.RESIDENT:
                self._note_time(self._host_mover.load_s)
                self._begin_copy(key)
            elif state is None:  # its read failed
                self.failed.add(key)
                self._cancel(key)
        num_copying = 0
        for key, copy in list(self._loading.items()):
            if copy is None or key not in self._ahead:
                continue
            if copy.query():
                self._note_time(copy.took_s)
                self._finish(key)
            else:
                num_copying += 1
        return queued_s + num_copying * self.load_s

    def arrivals(
        self, keys: Sequence[ExpertKey], counters: PhaseCounters
    ) -> Iterator[Sequence[ExpertKey]]:
        """Every key as kernels can be launched that read it: residents first, then those that are
        being copied, then those that come from disk. What the caller launches before he asks for
        more is taken to read the slots of what he was given.

        Raises what a failed read or copy raised (its slot is free again), or LoadTimeout.
        """
        counters.stall_s += self._slots.link.take_stall_s()
        slot_ids = {key: self._table.slot_of(key) for key in keys}
        for arrived in self._groups(keys, counters):
            yield arrived
            self._slots.mark_read([slot_ids[key] for key in arrived])

    def _groups(
        self, keys: Sequence[ExpertKey], counters: PhaseCounters
    ) -> Iterator[Sequence[ExpertKey]]:
        if not self._loading:  # every one a hit
            yield keys
            return
        if self._ahead:
            self._ahead.difference_update(keys)  # first: what is wanted must not be dropped
            self.settle()
        wanted = set(keys)
        resident = [key for key in keys if self._table.lookup(key) is Residency.RESIDENT]
        if resident:
            yield resident
        yield from self._copied(wanted)
        while waiting := self._on_disk(keys):
            coming = self._bring(waiting)
            yield from self._copied(wanted)
            for arrived in self._host_mover.arrivals(coming, counters):
                for key in self._on_disk(arrived):
                    self._begin_copy(key)
                yield from self._copied(wanted)

    def _copied(self, wanted: set[ExpertKey]) -> Iterator[Sequence[ExpertKey]]:
        """Those wanted whose copies have begun, one by one: each may compute while the next one
        is copied.
        """
        copied = [key for key, copy in self._loading.items() if copy is not None]
        for key in copied:
            if key in wanted:
                self._finish(key)
                yield [key]

    def _on_disk(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Those that are LOADING and not yet in HOST."""
        loading = self._loading
        return [key for key in keys if key in loading and loading[key] is None]

    def _bring(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Begin to copy what HOST has, and to read as many others as it has room for; gives those
        to wait for, whoever they are, before more can be done.
        """
        phase = self._phase_of(keys[0])
        try:
            wave = self._host_table.next_wave(keys, phase)
        except OutOfSlots:  # prefetches have them all
            if not (coming := self._host_table.loading_keys()):
                raise
            return coming
        with self._host_table.holding(wave, phase) as held:
            self._host_mover.load_now(held.absent, held.slot_ids)
            for key in wave:
                if self._host_table.lookup(key) is Residency.RESIDENT:
                    self._begin_copy(key)
        return self._on_disk(wave)

    def _phase_of(self, key: ExpertKey) -> Phase:
        """What prefill brings in is as transient in HOST as it is on the device."""
        return Phase.PREFILL if self._table.is_transient(key) else Phase.DECODE

    def _begin_copy(self, key: ExpertKey) -> None:
        """From HOST, where it is RESIDENT."""
        host_slot_id = self._host_table.slot_of(key)
        source = self._host_slots.tensor_of(host_slot_id, self._copied_bytes[key.moe_layer_idx])
        is_locked = self._host_slots.is_locked(host_slot_id)
        try:
            copy = self._slots.fill(self._table.slot_of(key), source, is_locked=is_locked)
        except Exception:
            self._cancel(key)
            raise
        self._host_slots.note_copy(host_slot_id, copy)
        self._loading[key] = copy

    def _finish(self, key: ExpertKey) -> None:
        """Kernels launched from now on see the expert."""
        copy = self._loading.pop(key)
        assert copy is not None, key
        if not copy.query():
            self._slots.link.let_kernels_wait(copy)
        self._table.finish_load(key)
        self._ahead.discard(key)
        self.failed.discard(key)

    def _cancel(self, key: ExpertKey) -> None:
        del self._loading[key]
        self._ahead.discard(key)
        self._table.cancel_load(key)

    def _note_time(self, took_s: float) -> None:
        self.load_s += (took_s - self.load_s) * (LOAD_TIME_RATE if self.load_s else 1)

    def recover(self) -> None:
        """After a step was interrupted: wait for what was begun, keep what arrived, and give back
        the slots of what did not.
        """
        self._host_table.recover()
        self._host_mover.recover()
        self._slots.link.synchronize()
        for key in self._table.loading_keys():
            arrived = self._loading.get(key) is not None
            (self._table.finish_load if arrived else self._table.cancel_load)(key)
        self._loading.clear()
        self._ahead.clear()

    def close(self) -> None:
        """Wait for what is under way."""
        self._host_mover.close()
        self._slots.link.synchronize()
        self._host_slots.close()
