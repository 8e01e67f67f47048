"""Which experts are in device memory, decided by the device itself during a step and by the host
between steps.

    host    tell, set_host_addresses                     between steps, in stream order
    device  resolve, fill, slot_moe (slot_kernels.py)    within a step, asking nobody
    host    told -> RowReport, offer                     at any time, while a step runs, too

All slots are the device's. A miss takes a free one or, without asking, that of the resident the
host has scored lowest; who left the host learns from being told who took which slot. For each
*part* of the rows there are scores, as they will be after its last row. Experts of the rows up to
there stay, since the scores say that they have passed; of its own row those the step has used.
What finds no slot is read where its host address says, through the link.

The device writes what it did in a row into host memory, and goes on. Each of these words says
NOT_TOLD until it is written, so that the host needs no order among them; after `wait()` all are
there. Scores reach the device on a stream of their own: a miss finds those of before or those
of after, which changes who leaves and no token.

Everything else is enqueued on the current stream, which has to be the one the steps run on: what a
step reads was there when it began. Before a host slot is given to another expert, the steps under
way are waited for, and before the next one its address is set to 0 (on disk). A step that asks for
an expert on disk is *lost*: its row is told, and the rows after it compute nothing, take no slot
and count nothing.

Legend: L MoE rows, E experts of a row, S slots, P (token, k) pairs of a step, H parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import ExpertKey

ABSENT = -1  # in the place of a slot
FREE = -1  # in the place of an owner
# In the place of the slot that a pair took, beside ABSENT for what is read through the link:
NOT_TOLD = -2  # also in the place of an expert id: the row was not resolved yet, or never will
ON_DISK = -3  # nowhere to be read
NOTHING = -4  # was there, or is an earlier pair's, or no expert

# Two halves hit as often as scores for each row; one part would leave no victims to its first
# rows. experiments.md, "A device that decides alone".
NUM_PARTS = 2

ADDRESS_BYTES = 16  # divide every address: kernels load so many at once


class RowReport(NamedTuple):
    """What the device did in one row of a step."""

    expert_P: NDArray[np.int64]  # what each pair was routed to, -1 for no expert
    misses: dict[ExpertKey, int]  # slots they took; ABSENT: read through the link; ON_DISK

    @property
    def is_lost(self) -> bool:
        return ON_DISK in self.misses.values()


class DeviceTable:
    """The slots of one device and what kernels and host know about them."""

    def __init__(
        self,
        slots_SB: Tensor,
        *,
        num_rows: int,
        num_experts: int,
        max_pairs: int,
    ) -> None:
        """`slots_SB`: uint8 [slots, bytes of a slot]. All of them begin free, all experts on
        disk.
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
        self.scores_LHE = torch.zeros(
            num_rows, num_parts, num_experts, dtype=torch.float64, device=device
        )
        # Of the row that was resolved last: where each pair's expert is, 0 for none, and where it
        # has to be copied from before it is there, 0 for nowhere.
        self.pointers_P = torch.zeros(max_pairs, dtype=torch.int64, device=device)
        self.sources_P = torch.zeros(max_pairs, dtype=torch.int64, device=device)
        # Whether the step is lost, and the tokens that it routed to each expert.
        self.lost = torch.zeros(1, dtype=torch.int32, device=device)
        self.uses_LE = torch.zeros(cells, dtype=torch.int32, device=device)
        # In host memory, of each row what its pairs were routed to, and the slots that they took.
        on_gpu = device.type == "cuda"
        shape = (num_rows, 2, max_pairs)
        self.told_L2P = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._told_L2P = self.told_L2P.numpy()
        self._offered_LHE = torch.empty(
            self.scores_LHE.shape, dtype=torch.float64, device="cpu", pin_memory=on_gpu
        )
        self._is_over = torch.cuda.Event() if on_gpu else None  # the step launched last
        self._offering = torch.cuda.Stream(device) if on_gpu else None
        self.host_addresses: dict[ExpertKey, int] = {}  # as set_all_host_addresses() told
        self.begin_step()

    # Of a step

    def begin_step(self) -> None:
        """No step is under way: from now on the host is told of the next one."""
        self._told_L2P.fill(NOT_TOLD)

    def end_step(self) -> None:
        """All of it was launched."""
        if self._is_over is not None:
            self._is_over.record(torch.cuda.current_stream(self.lost.device))
        self.lost.zero_()
        self.uses_LE.zero_()

    def is_over(self) -> bool:
        """Whether the device has finished with what was launched before end_step()."""
        return self._is_over is None or self._is_over.query()

    def wait(self) -> None:
        """Until is_over()."""
        if self._is_over is not None:
            self._is_over.synchronize()

    def told(self, moe_layer_idx: int, num_pairs: int) -> RowReport | None:
        """What the step did in this row; None if it has not come there, as far as we know."""
        told_2P = self._told_L2P[moe_layer_idx, :, :num_pairs].astype(np.int64)
        if (told_2P == NOT_TOLD).any():
            return None
        expert_P, slot_P = told_2P
        missed = slot_P != NOTHING
        pairs = zip(expert_P[missed].tolist(), slot_P[missed].tolist(), strict=True)
        return RowReport(
            expert_P, {ExpertKey(moe_layer_idx, expert): slot for expert, slot in pairs}
        )

    # What the host tells

    def part_of(self, moe_layer_idx: int) -> int:
        """Which of the scores are for this row."""
        return bisect_left(self.last_rows, moe_layer_idx)

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
        self.lost.zero_()
        self.uses_LE.zero_()
        self.begin_step()

    def offer(self, scores_LHE: NDArray[np.float64], first_row: int = 0) -> None:
        """Of rows from there on, for each part: the lowest resident leaves first, as soon as the
        device hears of it; inf: it stays.
        """
        rows = slice(first_row, first_row + len(scores_LHE))
        self._offered_LHE[rows] = torch.from_numpy(scores_LHE)
        with nullcontext() if self._offering is None else torch.cuda.stream(self._offering):
            self.scores_LHE[rows].copy_(self._offered_LHE[rows], non_blocking=True)

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
        return bool(self.lost)

    def find_again(self, moe_layer_idx: int) -> None:
        """The row at which the step was lost can be resolved now, and is told anew."""
        self.lost.zero_()
        self._told_L2P[moe_layer_idx] = NOT_TOLD

    def _cell(self, key: ExpertKey) -> int:
        return key.moe_layer_idx * self.num_experts + key.expert_idx

    def _to_device(self, numbers: Iterable[int]) -> Tensor:
        told = self._page_locked(torch.tensor(list(numbers), dtype=torch.int64, device="cpu"))
        return told.to(self.slot_LE.device, non_blocking=True)

    def _page_locked(self, told: Tensor) -> Tensor:
        """Nobody waits for the copy: torch gives such memory away again only after it."""
        return told if self._is_over is None else told.pin_memory()

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
