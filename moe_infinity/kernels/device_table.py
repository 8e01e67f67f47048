"""Which experts are in device memory, decided by the device itself during a step and by the host
between steps.

    host    free, withdraw, place, bar, admit, set_host_addresses    between steps, in stream order
    device  resolve, fill, slot_moe (slot_kernels.py)                within a step, asking nobody
    host    begin_read, finish_read -> StepReport                    after a step, asynchronously

A slot is in one of three hands, and every one of them knows it:

    reserved --free--> free --resolve takes it for a miss--> resident --withdraw--> reserved
        └---------------------------place (a prefetch has arrived)---^

The device only takes slots that the host has freed, and only together with a log entry; the host
only withdraws experts whose entry it has read. So neither can surprise the other, however late the
host reads. Everything here is enqueued on the current stream, which has to be the one the steps run
on: what a step reads was there when it began. `place` and `bar` want the log of all steps read.

An expert that has no slot is read where its host address says, through the link, if it misses and
no slot is free. Before a host slot is given to another expert, its address is set to 0 (on disk)
and the steps under way are waited for. A step that asks for an expert on disk is *lost*: its row is
reported, and from there on the step computes nothing, takes no slot and counts nothing.

Legend: L MoE rows, E experts of a row, S slots, P (token, k) pairs of a step, N log entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import ExpertKey

ABSENT = -1  # in the place of a slot: takes one when it misses
BARRED = -2  # takes none: read through the link
ON_DISK = -3  # in the log: nowhere to be read

ADDRESS_BYTES = 16  # divide every address: kernels load so many at once
HEAD = 4  # int32s before the counts: entries logged, row the step was lost at + 1, two unused
NUM_LOGGED, LOST = 0, 1
ENTRY = 3  # int32s: row, expert, slot


class Miss(NamedTuple):
    """An activated expert that had no slot, once per row and step."""

    key: ExpertKey
    slot_id: int  # where it is now; ABSENT or BARRED: read through the link; ON_DISK


class StepReport(NamedTuple):
    """What the device did since the last report."""

    misses: list[Miss]  # in the order of rows, then of (token, k) pairs
    num_misses: int  # with those that the log had no room for
    uses_LE: NDArray[np.int32]  # tokens routed to each expert
    routing_LP: NDArray[np.int32]  # the last step's expert ids; -1 where there is no pair
    lost_row: int | None  # of the first expert that was on disk

    def routing(self, moe_row: int, num_tokens: int, top_k: int) -> NDArray[np.int64]:
        """[T, K]: what the last step's tokens were routed to."""
        index_P = self.routing_LP[moe_row, : num_tokens * top_k]
        return index_P.reshape(num_tokens, top_k).astype(np.int64)


class DeviceTable:
    """The slots of one device and what kernels and host know about them."""

    def __init__(
        self,
        slots_SB: Tensor,
        *,
        num_rows: int,
        num_experts: int,
        max_pairs: int,
        max_misses: int | None = None,
    ) -> None:
        """`slots_SB`: uint8 [slots, bytes of a slot]. All of them begin reserved, all experts on
        disk. `max_misses`: entries between two reports; by default what one step can have, and a
        miss beyond it is read through the link.
        """
        num_slots, slot_bytes = slots_SB.shape
        assert slot_bytes % ADDRESS_BYTES == slots_SB.data_ptr() % ADDRESS_BYTES == 0, slot_bytes
        assert min(num_slots, max_pairs) >= 1, (num_slots, max_pairs)
        self.slots_SB = slots_SB
        self.num_rows, self.num_experts, self.max_pairs = num_rows, num_experts, max_pairs
        device, cells = slots_SB.device, (num_rows, num_experts)
        places_S = torch.arange(num_slots, device=device)
        self.slot_LE = torch.full(cells, ABSENT, dtype=torch.int32, device=device)
        self.host_LE = torch.zeros(cells, dtype=torch.int64, device=device)  # addresses; 0: on disk
        self.address_S = slots_SB.data_ptr() + slot_bytes * places_S
        self.free_S = torch.zeros(num_slots, dtype=torch.int32, device=device)  # a stack
        self.num_free = torch.zeros(1, dtype=torch.int64, device=device)
        # Of the row that was resolved last: where each pair's expert is, 0 for none, and where it
        # has to be copied from before it is there, 0 for nowhere.
        self.pointers_P = torch.zeros(max_pairs, dtype=torch.int64, device=device)
        self.sources_P = torch.zeros(max_pairs, dtype=torch.int64, device=device)
        if max_misses is None:
            max_misses = num_rows * min(max_pairs, num_experts)
        self.max_misses = max_misses
        # One block, so that one copy brings all of a report.
        sizes = (HEAD, num_rows * num_experts, num_rows * max_pairs, ENTRY * max_misses)
        self._report = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.head, uses, routing, log = self._report.split(sizes)
        self.uses_LE, self.routing_LP = uses.view(cells), routing.view(num_rows, max_pairs)
        self.log_N3 = log.view(max_misses, ENTRY)
        self.routing_LP.fill_(-1)
        self._sizes = sizes
        on_gpu = device.type == "cuda"
        self._read = torch.empty(self._report.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._is_reading = False
        self._places_S = places_S
        self.host_addresses: dict[ExpertKey, int] = {}  # as set_all_host_addresses() told
        self._free: set[int] = set()  # as far as reports tell
        self._reserved = set(range(num_slots))
        self._slot_of: dict[ExpertKey, int] = {}

    # After a step

    def begin_read(self) -> None:
        """Have a report copied when the device comes to it; counts and log begin anew."""
        assert not self._is_reading, "finish_read() comes first"
        self._read.copy_(self._report, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._report.device))
        self._report[: self._sizes[0] + self._sizes[1]].zero_()
        self._is_reading = True

    def finish_read(self) -> StepReport:
        """Wait for the copy that begin_read() asked for."""
        assert self._is_reading, "begin_read() comes first"
        if self._copied is not None:
            self._copied.synchronize()
        self._is_reading = False
        told = self._read.numpy().copy()
        head, uses, routing, log = np.split(told, np.cumsum(self._sizes)[:-1])
        num_misses = int(head[NUM_LOGGED])
        entries = log.reshape(-1, ENTRY)[:num_misses].tolist()
        misses = [Miss(ExpertKey(row, expert), slot_id) for row, expert, slot_id in entries]
        for key, slot_id in misses:
            if slot_id >= 0:
                self._free.remove(slot_id)
                self._slot_of[key] = slot_id
        return StepReport(
            misses,
            num_misses,
            uses.reshape(self.uses_LE.shape),
            routing.reshape(self.routing_LP.shape),
            int(head[LOST]) - 1 if head[LOST] else None,
        )

    # Between steps

    @property
    def resident(self) -> Mapping[ExpertKey, int]:
        """Experts that have a slot, as far as reports tell, and which."""
        return self._slot_of

    @property
    def num_free_known(self) -> int:
        """Free slots as far as reports tell; the device may have taken some of them since."""
        return len(self._free)

    def set_host_addresses(self, addresses: Mapping[ExpertKey, int]) -> None:
        """Where experts lie in page-locked memory; 0: only on disk."""
        assert not any(at % ADDRESS_BYTES for at in addresses.values()), addresses
        self.host_LE.view(-1).index_copy_(
            0, self._cells(addresses), self._to_device(list(addresses.values()))
        )

    def set_all_host_addresses(self, addresses: Mapping[ExpertKey, int]) -> None:
        """The same for all there are: whoever is not named is only on disk."""
        known = self.host_addresses
        changed = dict.fromkeys(known.keys() - addresses.keys(), 0)
        changed |= {key: at for key, at in addresses.items() if known.get(key) != at}
        if changed:
            self.set_host_addresses(changed)
        self.host_addresses = dict(addresses)

    def free(self, slot_ids: Sequence[int]) -> None:
        """Give reserved slots to the device, which takes the last one first."""
        assert len(self._reserved.intersection(slot_ids)) == len(slot_ids), slot_ids
        places = self.num_free + self._places_S[: len(slot_ids)]
        self.free_S.index_copy_(0, places, self._to_device(slot_ids).to(torch.int32))
        self.num_free += len(slot_ids)
        self._reserved.difference_update(slot_ids)
        self._free.update(slot_ids)

    def withdraw(self, keys: Sequence[ExpertKey]) -> list[int]:
        """Take residents out of the table: they are absent from the next step on. Gives their
        slots, reserved: to free, or to fill when the steps under way have ended.
        """
        self.slot_LE.view(-1).index_fill_(0, self._cells(keys), ABSENT)
        slot_ids = [self._slot_of.pop(key) for key in keys]
        self._reserved.update(slot_ids)
        return slot_ids

    def place(self, slot_of: Mapping[ExpertKey, int]) -> None:
        """Experts whose bytes are in reserved slots, or will be when the stream comes to its next
        step, are resident from then on.
        """
        assert not self._is_reading, "finish_read() comes first"
        assert self._slot_of.keys().isdisjoint(slot_of), slot_of
        slot_ids = list(slot_of.values())
        self.slot_LE.view(-1).index_copy_(
            0, self._cells(slot_of), self._to_device(slot_ids).to(torch.int32)
        )
        for key, slot_id in slot_of.items():
            self._reserved.remove(slot_id)
            self._slot_of[key] = slot_id

    def bar(self, keys: Sequence[ExpertKey]) -> None:
        """Absent experts take no slot any more when they miss: not worth one, or on their way."""
        self._set_absent(keys, BARRED)

    def admit(self, keys: Sequence[ExpertKey]) -> None:
        """Absent experts take a slot again when they miss."""
        self._set_absent(keys, ABSENT)

    def is_lost(self) -> bool:
        """Whether the step came to an expert on disk. Waits for what was launched of it."""
        return bool(self.head[LOST])

    def find_again(self) -> None:
        """The row at which the step was lost can be resolved now. Its misses so far stay logged."""
        self.head[LOST] = 0

    def reset(self) -> None:
        """As in the beginning: all slots reserved, all experts on disk. Nothing is under way."""
        self.slot_LE.fill_(ABSENT)
        self.host_LE.zero_()
        self.host_addresses = {}
        self.num_free.zero_()
        self._report.zero_()
        self.routing_LP.fill_(-1)
        self._is_reading = False
        self._free.clear()
        self._slot_of.clear()
        self._reserved = set(range(len(self.slots_SB)))

    def _set_absent(self, keys: Sequence[ExpertKey], state: int) -> None:
        assert not self._is_reading, "finish_read() comes first"
        assert self._slot_of.keys().isdisjoint(keys), keys
        self.slot_LE.view(-1).index_fill_(0, self._cells(keys), state)

    def _cells(self, keys: Iterable[ExpertKey]) -> Tensor:
        return self._to_device([row * self.num_experts + expert for row, expert in keys])

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        """Nobody waits: torch gives page-locked memory away again only after the copy."""
        is_page_locked = self._copied is not None
        told = torch.tensor(numbers, dtype=torch.int64, pin_memory=is_page_locked)
        return told.to(self.slot_LE.device, non_blocking=True)

    def check_invariants(self) -> None:
        """Every slot is in one hand, and the device says so too. Waits for the device; the log of
        all steps has been read.
        """
        slot_LE, num_free = self.slot_LE.cpu(), int(self.num_free)
        told = {
            ExpertKey(row, expert): int(slot_LE[row, expert])
            for row, expert in (slot_LE >= 0).nonzero().tolist()
        }
        assert told == self._slot_of, (told, self._slot_of)
        assert sorted(self.free_S[:num_free].tolist()) == sorted(self._free), self._free
        hands = [*self._free, *self._reserved, *self._slot_of.values()]
        assert sorted(hands) == list(range(len(self.slots_SB))), hands
        assert int(slot_LE.min()) >= BARRED, slot_LE
        assert not (self.host_LE % ADDRESS_BYTES).any(), self.host_LE
