"""The part of a decode step's misses on a device that the CPU computes, from HOST, while the link
copies the others.

    n misses that HOST has     k computed where they lie       k * cpu_s seconds
                               n - k copied and computed       (n - k) * copy_s seconds

k makes the longer of the two shortest; for both, what an expert took at start-up while the other
was at work, as copies use the host's memory, too. Those with the lowest scores are computed here:
they would be the next to leave a slot. Sums are in float32, and int4 weights are not rounded before
they are multiplied, so results are those of the device but for rounding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch

from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase, Residency
from moe_infinity.kernels import has_packed_kernels, host_float32
from moe_infinity.kernels.dispatch import RoutedRows
from moe_infinity.kernels.fused_rows import FUSED_ROWS
from moe_infinity.memory.device import DeviceSlots, SourceSlots
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.models.computing import Work, fused_row
from moe_infinity.models.planning import Plan

MEASURED_EXPERTS, MEASURED_ROUNDS = 8, 5


class CpuShare:
    """Chooses which misses of a decode step the CPU computes, and computes them. One per model."""

    def __init__(self, plan: Plan, tiers: Sequence[SlotTier]) -> None:
        """Measures, while no slot is in use yet. Raises ConfigError without a device, numba, or
        experts that it could compute.
        """
        if len(tiers) == 1:
            raise ConfigError("split_misses is for a GPU, torch finds none")
        if not has_packed_kernels():
            raise ConfigError("split_misses needs numba\nhint: pip install 'moe-infinity[cpu]'")
        self._device, self._host = tiers
        pairs = zip(plan.rows, plan.recipes, strict=True)
        self._fused = [fused_row(row, recipes) for row, recipes in pairs]
        if None in self._fused:
            raise ConfigError(
                "split_misses: no kernel of ours computes experts of this kind on a CPU\n"
                "hint: leave it out"
            )
        self.num_computed = 0
        self.cpu_s, self.copy_s = self._measure()
        times = f"{1e3 * self.cpu_s:.2f} ms by the CPU, {1e3 * self.copy_s:.2f} ms by the link"
        self.how = f"misses split: {times}"  # for the report

    def _measure(self) -> tuple[float, float]:
        """Seconds for one expert, computed and copied."""
        host, device, fused = self._host.slots, self._device.slots, self._fused[0]
        assert isinstance(host, SourceSlots), host
        assert isinstance(device, DeviceSlots), device
        assert fused is not None, self._fused
        slot_ids = range(min(MEASURED_EXPERTS, host.num_slots, device.num_slots))
        for slot_id in slot_ids:  # in memory, and page-locked, from now on
            torch.frombuffer(host.bytes_of(slot_id), dtype=torch.uint8).zero_()
        sources = [host.tensor_of(slot_id, device.slot_bytes) for slot_id in slot_ids]
        locked = [host.is_locked(slot_id) for slot_id in slot_ids]
        x_PD = host_float32(len(slot_ids), fused.down.num_rows).zero_()
        cpu_s, copy_s = [], []
        for _ in range(MEASURED_ROUNDS):
            copies = [
                device.fill(slot_id, source, is_locked=is_locked)
                for slot_id, source, is_locked in zip(slot_ids, sources, locked, strict=True)
            ]
            started = time.perf_counter()
            fused(x_PD, range(len(slot_ids) + 1), [source.data_ptr() for source in sources])
            cpu_s.append((time.perf_counter() - started) / len(slot_ids))
            for copy in copies:
                copy.synchronize()
                copy_s.append(copy.took_s)
        return statistics.median(cpu_s), statistics.median(copy_s)

    def num_for_cpu(self, num_misses: int) -> int:
        """0 where it does not pay."""

        def waiting_s(num_computed: int) -> float:
            return max(num_computed * self.cpu_s, (num_misses - num_computed) * self.copy_s)

        return min(range(num_misses + 1), key=waiting_s)

    @contextmanager
    def sharing(
        self, moe_row: int, work: Work, waiting: Sequence[ExpertKey]
    ) -> Iterator[Sequence[ExpertKey]]:
        """Gives those that the device is to compute. The others are computed here once it has been
        told to.
        """
        is_few = np.max(work.counts, initial=0) <= FUSED_ROWS
        mine = self._choose(moe_row, waiting) if is_few else []
        if not mine or not isinstance(work, RoutedRows):
            yield waiting
            return
        inputs = [work.inputs_of(key.expert_idx) for key in mine]
        x_PD = torch.cat(inputs).cpu()  # now: later on it would wait for the device's part
        starts = list(accumulate(map(len, inputs), initial=0))
        fused, slots = self._fused[moe_row], self._host.slots
        assert fused is not None, moe_row
        with self._host.table.holding(mine, Phase.DECODE) as held:
            yield [key for key in waiting if key not in held.slot_ids]
            addresses = [slots.address_of(held.slot_ids[key]) for key in mine]
            out_PD = fused(x_PD, starts, addresses).to(inputs[0].device)
        for key, out_RD in zip(mine, out_PD.tensor_split(starts[1:]), strict=False):
            work.add(key.expert_idx, out_RD)
        self.num_computed += len(mine)

    def _choose(self, moe_row: int, waiting: Sequence[ExpertKey]) -> list[ExpertKey]:
        device, host = self._device.table, self._host.table
        misses = [
            key
            for key in waiting
            if device.lookup(key) is None and host.lookup(key) is Residency.RESIDENT
        ]
        # A slot of HOST stays free for what the others need from disk.
        num_mine = min(self.num_for_cpu(len(misses)), self._host.slots.num_slots - 1)
        if not num_mine:
            return []
        scores_E = self._device.policy.scores()[moe_row]
        return sorted(misses, key=lambda key: scores_E[key.expert_idx])[:num_mine]
