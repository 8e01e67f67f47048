"""Slots whose experts stay where the page cache has them, for models of which all experts fit.

Nothing is copied: a model that is in the page cache computes at once, and its bytes are in memory
once, not twice. The price: a file that is shortened while it is in use ends the process (SIGBUS).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_infinity.experts import ExpertKey
from moe_infinity.memory.host import Slots
from moe_infinity.system.memory import huge_pages

PlaceOf = Callable[[ExpertKey], memoryview | None]


class MappedSlots(Slots):
    """A slot is the place of an expert in its file or, where `place_of` knows none, memory of its
    own. Which expert, is settled when the slot is filled.
    """

    def __init__(self, num_slots: int, slot_bytes: int, place_of: PlaceOf) -> None:
        super().__init__(num_slots, slot_bytes, torch.device("cpu"))
        self._place_of = place_of
        self._tensors: dict[int, Tensor] = {}

    def bytes_for(self, slot_id: int, key: ExpertKey) -> memoryview:
        """What is to be filled, so that the slot has this expert."""
        place = self._place_of(key)
        if place is None:
            place = huge_pages(self.slot_bytes)
        self._tensors[slot_id] = torch.frombuffer(place, dtype=torch.uint8)
        return place

    def address_of(self, slot_id: int) -> int:
        return self._tensors[slot_id].data_ptr()

    def tensor_of(self, slot_id: int, num_bytes: int) -> Tensor:
        return self._tensors[slot_id][:num_bytes]
