"""What steps that the device decides need of the engine that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moe_infinity.experts import ExpertKey, Ints, Step
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.predict.recorder import Recorder


class StepBookkeeping(Protocol):
    """The bookkeeping of one model, whose tiers are DEVICE and HOST. See engine/bookkeeping.py."""

    total_experts: int
    recorder: Recorder

    @property
    def tiers(self) -> Sequence[SlotTier]:
        """DEVICE, then HOST."""

    def note_begin(self, step: Step) -> None:
        """A forward pass begins."""

    def note_layer(self, moe_layer_idx: int, index_TK: Ints, missed: set[ExpertKey]) -> None:
        """An MoE layer of the step that began last has run, with this routing and these misses."""
