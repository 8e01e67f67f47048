"""DISK -> HOST -> DEVICE for the residency table of a device.

    in HOST      its copy begins at once
    on DISK      a HOST slot is reserved, the mover of that tier reads, the copy begins on arrival

One thread decides, as in mover.py. It begins copies and never waits for one: kernels wait. An
expert counts as RESIDENT as soon as all kernels launched from then on see its bytes.
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

COPIED_GROUPS = 4  # of the experts that one layer waits for: each is computed by itself

logger = logging.getLogger(__name__)


class DeviceMover:
    """Has the methods of Mover. `host_table`, `host_slots` and `host_mover` are the tier below; an
    expert has `copied_bytes[moe_layer_idx]` bytes.
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
        self._preloaded: set[ExpertKey] = set()  # of these, those that came to HOST by themselves
        self.failed: set[ExpertKey] = set()  # prefetches that failed; until a demand load succeeds
        # Moving average of the seconds of a prefetch: of its copy, or of its read from disk.
        self.load_s = 0.0

    def load_now(self, keys: Iterable[ExpertKey], slot_ids: Mapping[ExpertKey, int]) -> None:
        """Start loads that the current layer waits for. Their slots are already reserved."""
        keys = list(keys)
        self._note_loading(keys)
        self._begin_loads(keys)

    def load_ahead(self, slot_ids: Mapping[ExpertKey, int]) -> None:
        """Begin loads that no layer waits for yet; drops those that find no HOST slot."""
        self._ahead.update(slot_ids)
        self._note_loading(slot_ids)
        for key in slot_ids:
            state = self._host_table.lookup(key)
            if state is Residency.RESIDENT:
                self._begin_copy(key)
            if state is not None:  # or it is preloaded, and `settle` begins its copy
                continue
            try:
                host_slot_id = self._host_table.begin_load(key, self._phase_of(key))
            except OutOfSlots:
                self._cancel(key)
            else:
                self._host_mover.load_ahead({key: host_slot_id})

    def stream(self, keys: Iterable[ExpertKey]) -> Sequence[ExpertKey]:
        """Begin to load experts that a long prompt will need next; returns those that were begun.

        They are as many as the prefill quota has room for. One slot is left, for an MoE layer that
        needs none of them.
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
        """How many of these loads, which have just begun, read from disk."""
        return len([key for key in self._on_disk(keys) if key not in self._preloaded])

    def _note_loading(self, keys: Iterable[ExpertKey]) -> None:
        for key in keys:
            self._loading[key] = None
            if self._host_table.lookup(key) is Residency.LOADING:
                self._preloaded.add(key)

    def record_arrivals(self) -> float:
        """Enter the prefetches that have arrived; returns seconds until the others will have."""
        queued_s = self._host_mover.record_arrivals()
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
        """Yield every key once kernels that read it may be launched, and nothing now and then.

        Residents come first, then experts that are being copied, then those from disk. Kernels that
        read the yielded experts have to be launched before the next ones are asked for. Raises what
        a failed read or copy raised, with its slot free again, or LoadTimeout.
        """
        counters.stall_s += self._slots.cuda_device.take_stall_s()
        slot_ids = {key: self._table.slot_of(key) for key in keys}
        for arrived in self._groups(keys, counters):
            yield arrived
            self._slots.mark_read([slot_ids[key] for key in arrived])

    def _groups(
        self, keys: Sequence[ExpertKey], counters: PhaseCounters
    ) -> Iterator[Sequence[ExpertKey]]:
        if not self._loading:  # all are hits
            yield keys
            return
        if self._ahead:
            # First: record_arrivals() drops prefetches that failed.
            self._ahead.difference_update(keys)
            self.record_arrivals()
        wanted = set(keys)
        resident = [key for key in keys if self._table.lookup(key) is Residency.RESIDENT]
        if resident:
            yield resident
        yield from self._copied(wanted)
        while waiting := self._on_disk(keys):
            coming = self._begin_loads(waiting)
            yield from self._copied(wanted)
            for arrived in self._host_mover.arrivals(coming, counters):
                if not arrived:
                    yield arrived
                for key in self._on_disk(arrived):
                    self._begin_copy(key)
                yield from self._copied(wanted)

    def _copied(self, wanted: set[ExpertKey]) -> Iterator[Sequence[ExpertKey]]:
        """Yield those wanted whose copies have begun, in a few groups, so that one computes while
        the next is copied.
        """
        copied = [k for k, copy in self._loading.items() if copy is not None and k in wanted]
        size = -(-len(copied) // COPIED_GROUPS) or 1
        for first in range(0, len(copied), size):
            group = copied[first : first + size]
            for key in group:
                self._finish(key)
            yield group

    def _on_disk(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys` that are LOADING and not yet in HOST."""
        loading = self._loading
        return [key for key in keys if key in loading and loading[key] is None]

    def _begin_loads(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Begin to copy those that are in HOST, and to read as many others as HOST has room for.

        Returns the loads into HOST to wait for before more can begin. If prefetches have all slots
        of HOST, these are the prefetches.
        """
        phase = self._phase_of(keys[0])
        try:
            wave = self._host_table.next_wave(keys, phase)
        except OutOfSlots:  # prefetches have all slots
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
        """The phase whose quota the expert takes its HOST slot from: as on the device."""
        return Phase.PREFILL if self._table.is_transient(key) else Phase.DECODE

    def _begin_copy(self, key: ExpertKey) -> None:
        """Begin its copy from HOST, where it is RESIDENT."""
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
        """Make the expert RESIDENT: kernels launched from now on wait for its copy."""
        copy = self._loading.pop(key)
        assert copy is not None, key
        if not copy.query():
            self._slots.cuda_device.let_kernels_wait(copy)
        self._table.finish_load(key)
        self._ahead.discard(key)
        self._preloaded.discard(key)
        self.failed.discard(key)

    def _cancel(self, key: ExpertKey) -> None:
        del self._loading[key]
        self._ahead.discard(key)
        self._preloaded.discard(key)
        self._table.cancel_load(key)

    def _note_time(self, took_s: float) -> None:
        self.load_s += (took_s - self.load_s) * (LOAD_TIME_RATE if self.load_s else 1)

    def recover(self) -> None:
        """After a step was interrupted: wait for the loads that were begun, keep the experts that
        arrived, and free the slots of the others.
        """
        self._host_table.recover()
        self._host_mover.recover()
        self._slots.cuda_device.synchronize()
        for key in self._table.loading_keys():
            arrived = self._loading.get(key) is not None
            (self._table.finish_load if arrived else self._table.cancel_load)(key)
        self._loading.clear()
        self._ahead.clear()
        self._preloaded.clear()

    def close(self) -> None:
        """Wait for reads and copies under way, and unlock HOST."""
        self._host_mover.close()
        self._slots.cuda_device.synchronize()
        self._host_slots.close()
