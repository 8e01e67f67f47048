"""Which experts are in device memory. The device decides it during a step, the host between steps.

    host    upload_residency                             before the first step that it decides
    device  resolve, fill, experts (device_steps.py)     within a step, without asking the host
    host    read_report -> LayerReport, upload_scores    at any time, also while a step runs

The device may use all slots. A missed expert takes a free slot; if there is none, it replaces the
resident expert whose score is lowest. The device reports which slot each missed expert took, and
the host derives the evicted expert from it. The MoE layers are divided into *parts*, and each part
has its own scores of all experts, as they will be after its last layer. Experts of the layers from
the current one to that last layer stay: the scores assume that those layers have run. So do the
experts of the current layer that the step uses. An expert that finds no slot is read from host
memory, through the link.

The device writes its report of a layer into host memory and goes on. Each word of a report is
NOT_REPORTED until it is written, so the host relies on no order among them; after `wait()` all are
there. Scores are uploaded on a stream of their own. A miss sees the old scores or the new ones,
which changes the expert that is evicted, and no token.

The device decides only while host memory has all experts, whose addresses then stay as they are.
Everything but scores is enqueued on the current stream, which has to be the one that steps run on:
so a step sees what was uploaded before it began.

Legend: L MoE layers, E experts of a layer, S slots, P (token, k) pairs of a step, H parts, W words
of a report.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import ExpertKey

ABSENT = -1  # in place of a slot
FREE = -1  # in place of the owner of a slot
# In place of the slot that an expert took, beside ABSENT for one that is read through the link:
NOT_REPORTED = -2  # also in place of an expert id: the layer has not run yet, or will not run
NOTHING = -4  # no slot taken: a hit, or not used

# With two parts as many experts hit as with scores for each layer. With one part the first layers
# would have nothing to evict. experiments.md, "A device that decides alone".
NUM_PARTS = 2

ADDRESS_BYTES = 16  # every address is a multiple of it: kernels load so many bytes at once


class LayerReport(NamedTuple):
    """The report of the device about one MoE layer of a step."""

    expert_P: NDArray[np.int64]  # the expert of each pair, -1 for none
    misses: dict[ExpertKey, int]  # the slots they took; ABSENT: read through the link


class DeviceTable:
    """The slots of one device, and what kernels and the host know about them."""

    def __init__(
        self,
        slots_SB: Tensor,
        *,
        num_layers: int,
        num_experts: int,
        max_pairs: int,
    ) -> None:
        """`slots_SB`: uint8 [slots, bytes of a slot]. At first all slots are free, and it is not
        known where experts are.
        """
        num_slots, slot_bytes = slots_SB.shape
        assert slot_bytes % ADDRESS_BYTES == slots_SB.data_ptr() % ADDRESS_BYTES == 0, slot_bytes
        assert min(num_slots, max_pairs) >= 1, (num_slots, max_pairs)
        self.slots_SB = slots_SB
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.max_pairs = max_pairs
        device = slots_SB.device
        cells = num_layers, num_experts
        places_S = torch.arange(num_slots, device=device)
        self.slot_LE = torch.full(cells, ABSENT, dtype=torch.int32, device=device)
        self.host_LE = torch.zeros(cells, dtype=torch.int64, device=device)  # addresses
        self.address_S = slots_SB.data_ptr() + slot_bytes * places_S
        self.owner_S = torch.full((num_slots,), FREE, dtype=torch.int32, device=device)  # cells
        num_parts = min(NUM_PARTS, num_layers)
        self.last_layers = [num_layers * (part + 1) // num_parts - 1 for part in range(num_parts)]
        self.scores_LHE = torch.zeros(
            num_layers, num_parts, num_experts, dtype=torch.float64, device=device
        )
        # Of the layer that was resolved last. By expert: how many pairs use it, and its address, 0
        # if it is not used. Of each missed one that took a slot: where from and where to it has to
        # be copied; 0 for the rest.
        self.uses_E = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self.pointers_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.copies_2E = torch.zeros(2, num_experts, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        # In host memory, for each layer: the slots that experts took, and the experts of its pairs.
        shape = (num_layers, num_experts + max_pairs)
        self.reports_LW = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._reports_LW = self.reports_LW.numpy()
        self._staged_scores_LHE = torch.empty(
            self.scores_LHE.shape, dtype=torch.float64, device="cpu", pin_memory=on_gpu
        )
        self._step_end = torch.cuda.Event() if on_gpu else None  # of the step launched last
        self._upload_stream = torch.cuda.Stream(device) if on_gpu else None
        self.begin_step()

    # Of a step

    def begin_step(self) -> None:
        """Clear the reports for the next step. No step is under way."""
        self._reports_LW.fill(NOT_REPORTED)

    def end_step(self) -> None:
        """Mark the end of the step, all of which was launched."""
        if self._step_end is not None:
            self._step_end.record(torch.cuda.current_stream(self.slot_LE.device))

    def is_over(self) -> bool:
        """Return True if the device has finished what was launched before end_step()."""
        return self._step_end is None or self._step_end.query()

    def wait(self) -> None:
        """Wait until is_over()."""
        if self._step_end is not None:
            self._step_end.synchronize()

    def read_report(self, moe_layer_idx: int, num_pairs: int) -> LayerReport | None:
        """Return what the step did in this layer of `num_pairs` pairs; None if not reported yet."""
        words_W = self._reports_LW[moe_layer_idx, : self.num_experts + num_pairs].astype(np.int64)
        if (words_W == NOT_REPORTED).any():
            return None
        slot_E, expert_P = np.split(words_W, [self.num_experts])
        missed = np.nonzero(slot_E != NOTHING)[0].tolist()
        return LayerReport(
            expert_P, {ExpertKey(moe_layer_idx, expert): int(slot_E[expert]) for expert in missed}
        )

    # What the host uploads

    def part_of(self, moe_layer_idx: int) -> int:
        """The part that this layer belongs to."""
        return bisect_left(self.last_layers, moe_layer_idx)

    def upload_residency(
        self, slot_of: Mapping[ExpertKey, int], host_addresses: Mapping[ExpertKey, int]
    ) -> None:
        """Replace everything but the scores: these experts are resident, the other slots are free,
        and experts lie at these addresses in page-locked host memory. No step is under way.
        """
        assert len(set(slot_of.values())) == len(slot_of), slot_of
        assert not any(at % ADDRESS_BYTES for at in host_addresses.values()), host_addresses
        slot_LE = np.full(self.slot_LE.shape, ABSENT, np.int32)
        owner_S = np.full(self.owner_S.shape, FREE, np.int32)
        host_LE = np.zeros(self.host_LE.shape, np.int64)
        for key, slot_id in slot_of.items():
            slot_LE[key] = slot_id
            owner_S[slot_id] = self._cell(key)
        for key, address in host_addresses.items():
            host_LE[key] = address
        self.slot_LE.copy_(torch.from_numpy(slot_LE))
        self.owner_S.copy_(torch.from_numpy(owner_S))
        self.host_LE.copy_(torch.from_numpy(host_LE))
        self.begin_step()

    def upload_scores(self, scores_LHE: NDArray[np.float64], first_layer: int = 0) -> None:
        """Replace the scores of the experts of layers `first_layer`, `first_layer` + 1, ...: one
        score for each part of the model.

        The resident expert with the lowest score is evicted first; one with inf is not evicted. A
        step that is running uses the new scores as soon as they arrive.
        """
        layers = slice(first_layer, first_layer + len(scores_LHE))
        self._staged_scores_LHE[layers] = torch.from_numpy(scores_LHE)
        with torch.cuda.stream(self._upload_stream):  # None, without a GPU: does nothing
            self.scores_LHE[layers].copy_(self._staged_scores_LHE[layers], non_blocking=True)

    def _cell(self, key: ExpertKey) -> int:
        return key.moe_layer_idx * self.num_experts + key.expert_idx

    def resident_slots(self) -> dict[ExpertKey, int]:
        """The experts that have a slot, and the slot. Waits for the device."""
        slot_LE = self.slot_LE.cpu()
        return {
            ExpertKey(layer, expert): int(slot_LE[layer, expert])
            for layer, expert in (slot_LE >= 0).nonzero().tolist()
        }

    def check_invariants(self) -> None:
        """Assert that each slot is free or has one owner, which has that slot. Waits for the
        device.
        """
        by_expert = {self._cell(key): slot_id for key, slot_id in self.resident_slots().items()}
        by_slot = {cell: slot for slot, cell in enumerate(self.owner_S.tolist()) if cell != FREE}
        assert by_expert == by_slot, (by_expert, by_slot)
        assert int(self.slot_LE.min()) >= ABSENT, self.slot_LE
        assert not (self.host_LE % ADDRESS_BYTES).any(), self.host_LE
