"""Which experts are in device memory, decided by the device itself during a step and by the host
between steps.

    host    tell, offer, set_host_addresses              between steps, in stream order
    device  resolve, fill, slot_moe (slot_kernels.py)    within a step, asking nobody
    host    begin_read, finish_read -> StepReport        after a step, asynchronously

All slots are the device's. A miss takes a free one or, without asking, that of the resident the
host has scored lowest; who left the host learns from the log, which says who took which slot. For
each *part* of the rows there are scores, as they will be after its last row. Experts of the rows up
to there stay, since the scores say that they have passed; of its own row those the step has used.
What finds no slot is read where its host address says, through the link.

Everything here is enqueued on the current stream, which has to be the one the steps run on: what a
step reads was there when it began. Before a host slot is given to another expert, the steps under
way are waited for, and before the next one its address is set to 0 (on disk). A step that asks for
an expert on disk is *lost*: its row is reported, and the rows after it compute nothing, take no
slot and count nothing.

Legend: L MoE rows, E experts of a row, S slots, P (token, k) pairs of a step, N log entries,
H parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import ExpertKey

ABSENT = -1  # in the place of a slot
ON_DISK = -2  # in the log: nowhere to be read
FREE = -1  # in the place of an owner
NOT_RUN = -2  # in the place of a row's expert ids

# Two halves hit as often as scores for each row; one part would leave no victims to its first
# rows. experiments.md, "A device that decides alone".
NUM_PARTS = 2

ADDRESS_BYTES = 16  # divide every address: kernels load so many at once
HEAD = 4  # int32s at the beginning: entries logged, row the step was lost at + 1, two unused
NUM_LOGGED, LOST = 0, 1
ENTRY = 3  # int32s: row, expert, slot


class Miss(NamedTuple):
    """An activated expert that had no slot, once each time its row was resolved."""

    key: ExpertKey
    slot_id: int  # the one it took; ABSENT: read through the link; ON_DISK


class StepReport(NamedTuple):
    """What the device did since the last report."""

    misses: list[Miss]  # in the order of rows, then of (token, k) pairs
    routing_LP: NDArray[np.int32]  # the last step's expert ids, -1 for none; NOT_RUN beyond them
    lost_row: int | None  # of the first expert that was on disk

    def routing(self, moe_row: int, num_tokens: int, top_k: int) -> NDArray[np.int64] | None:
        """[T, K]: what the last step's tokens were routed to; None if the row was not in it."""
        index_P = self.routing_LP[moe_row, : num_tokens * top_k]
        if index_P[0] == NOT_RUN:
            return None
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
        """`slots_SB`: uint8 [slots, bytes of a slot]. All of them begin free, all experts on disk.
        `max_misses`: entries between two reports; by default what one step can have, and a miss
        beyond it is read through the link.
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
        self.owner_S = torch.full((num_slots,), FREE, dtype=torch.int32, device=device)  # cells
        num_parts = min(NUM_PARTS, num_rows)
        self.last_rows = [num_rows * (part + 1) // num_parts - 1 for part in range(num_parts)]
        self.scores_HLE = torch.zeros(num_parts, *cells, dtype=torch.float64, device=device)
        # Of the row that was resolved last: where each pair's expert is, 0 for none, and where it
        # has to be copied from before it is there, 0 for nowhere.
        self.pointers_P = torch.zeros(max_pairs, dtype=torch.int64, device=device)
        self.sources_P = torch.zeros(max_pairs, dtype=torch.int64, device=device)
        if max_misses is None:
            max_misses = num_rows * min(max_pairs, num_experts)
        self.max_misses = max_misses
        # One block, so that one copy brings all of a report.
        sizes = (HEAD, num_rows * max_pairs, ENTRY * max_misses)
        self._report = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.head, routing, log = self._report.split(sizes)
        self.routing_LP = routing.view(num_rows, max_pairs)
        # Tokens that the step routed to each expert.
        self.uses_LE = torch.zeros(cells, dtype=torch.int32, device=device)
        self.log_N3 = log.view(max_misses, ENTRY)
        self.routing_LP.fill_(NOT_RUN)
        self._sizes = sizes
        on_gpu = device.type == "cuda"
        self._read = torch.empty(self._report.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._is_reading = False
        self.host_addresses: dict[ExpertKey, int] = {}  # as set_all_host_addresses() told

    # After a step

    def begin_read(self) -> None:
        """Have a report copied when the device comes to it; it begins anew, and so do uses."""
        assert not self._is_reading, "finish_read() comes first"
        self._read.copy_(self._report, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._report.device))
        self.head.zero_()
        self.routing_LP.fill_(NOT_RUN)
        self.uses_LE.zero_()
        self._is_reading = True

    def finish_read(self) -> StepReport:
        """Wait for the copy that begin_read() asked for."""
        assert self._is_reading, "begin_read() comes first"
        if self._copied is not None:
            self._copied.synchronize()
        self._is_reading = False
        told = self._read.numpy().copy()
        head, routing, log = np.split(told, np.cumsum(self._sizes)[:-1])
        entries = log.reshape(-1, ENTRY)[: head[NUM_LOGGED]].tolist()
        misses = [Miss(ExpertKey(row, expert), slot_id) for row, expert, slot_id in entries]
        return StepReport(
            misses,
            routing.reshape(self.routing_LP.shape),
            int(head[LOST]) - 1 if head[LOST] else None,
        )

    # Between steps

    def part_of(self, moe_row: int) -> int:
        """Which of the scores are for this row."""
        return bisect_left(self.last_rows, moe_row)

    def tell(self, slot_of: Mapping[ExpertKey, int]) -> None:
        """All anew, but for the scores: these experts are resident, the other slots free, all
        experts on disk, and no step has run. Nothing is under way.
        """
        assert len(set(slot_of.values())) == len(slot_of), slot_of
        slot_LE = np.full(self.slot_LE.shape, ABSENT, np.int32)
        owner_S = np.full(self.owner_S.shape, FREE, np.int32)
        for key, slot_id in slot_of.items():
            slot_LE[key] = slot_id
            owner_S[slot_id] = self._cell(key)
        self.slot_LE.copy_(torch.from_numpy(slot_LE))
        self.owner_S.copy_(torch.from_numpy(owner_S))
        self.host_LE.zero_()
        self.host_addresses = {}
        self._report.zero_()
        self.uses_LE.zero_()
        self.routing_LP.fill_(NOT_RUN)
        self._is_reading = False

    def offer(self, scores_HLE: NDArray[np.float64]) -> None:
        """For each part: the lowest resident leaves first, from the next step on; inf: it stays."""
        self.scores_HLE.copy_(self._page_locked(torch.from_numpy(scores_HLE)), non_blocking=True)

    def set_host_addresses(self, addresses: Mapping[ExpertKey, int]) -> None:
        """Where experts lie in page-locked memory; 0: only on disk."""
        assert not any(at % ADDRESS_BYTES for at in addresses.values()), addresses
        self.host_LE.view(-1).index_copy_(
            0, self._to_device(map(self._cell, addresses)), self._to_device(addresses.values())
        )

    def set_all_host_addresses(self, addresses: Mapping[ExpertKey, int]) -> None:
        """The same for all there are: whoever is not named is only on disk."""
        known = self.host_addresses
        changed = dict.fromkeys(known.keys() - addresses.keys(), 0)
        changed |= {key: at for key, at in addresses.items() if known.get(key) != at}
        if changed:
            self.set_host_addresses(changed)
        self.host_addresses = dict(addresses)

    def is_lost(self) -> bool:
        """Whether the step came to an expert on disk. Waits for what was launched of it."""
        return bool(self.head[LOST])

    def find_again(self) -> None:
        """The row at which the step was lost can be resolved now. Its misses so far stay logged."""
        self.head[LOST] = 0

    def _cell(self, key: ExpertKey) -> int:
        return key.moe_row * self.num_experts + key.expert_idx

    def _to_device(self, numbers: Iterable[int]) -> Tensor:
        told = self._page_locked(torch.tensor(list(numbers), dtype=torch.int64))
        return told.to(self.slot_LE.device, non_blocking=True)

    def _page_locked(self, told: Tensor) -> Tensor:
        """Nobody waits for the copy: torch gives such memory away again only after it."""
        return told if self._copied is None else told.pin_memory()

    def resident_slots(self) -> dict[ExpertKey, int]:
        """Experts that have a slot. Waits for the device."""
        slot_LE = self.slot_LE.cpu()
        return {
            ExpertKey(row, expert): int(slot_LE[row, expert])
            for row, expert in (slot_LE >= 0).nonzero().tolist()
        }

    def check_invariants(self) -> None:
        """Every slot is free or has one owner, who knows. Waits for the device."""
        owners = {self._cell(key): slot_id for key, slot_id in self.resident_slots().items()}
        told = {cell: slot for slot, cell in enumerate(self.owner_S.tolist()) if cell != FREE}
        assert owners == told, (owners, told)
        assert int(self.slot_LE.min()) >= ABSENT, self.slot_LE
        assert not (self.host_LE % ADDRESS_BYTES).any(), self.host_LE
