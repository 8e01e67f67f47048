"""Small device tables with the memory they point into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_infinity.experts import ExpertKey
from moe_infinity.kernels.device_table import DeviceTable


class World:
    """A table, and the host memory in which every expert lies: bytes that tell who they are."""

    def __init__(
        self,
        device: str,
        *,
        rows: int = 3,
        experts: int = 8,
        slots: int = 6,
        max_pairs: int = 16,
        slot_bytes: int = 48,
        max_misses: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = rows * experts, slot_bytes
        self.host = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if device == "cuda":
            self.host = self.host.pin_memory()
        self.slots = torch.zeros(slots, slot_bytes, dtype=torch.uint8, device=device)
        self.table = DeviceTable(
            self.slots,
            num_rows=rows,
            num_experts=experts,
            max_pairs=max_pairs,
            max_misses=max_misses,
        )
        self.keys = [ExpertKey(row, expert) for row in range(rows) for expert in range(experts)]
        self.tell({})

    def tell(self, slot_of: dict[ExpertKey, int]) -> None:
        """All of them are in host memory."""
        self.table.tell(slot_of)
        self.table.set_host_addresses({key: self.address_of(key) for key in self.keys})

    def bytes_of(self, key: ExpertKey) -> Tensor:
        return self.host[key.moe_row * self.table.num_experts + key.expert_idx]

    def address_of(self, key: ExpertKey) -> int:
        return self.bytes_of(key).data_ptr()

    def index(self, index_TK: Any) -> Tensor:
        return torch.tensor(index_TK).to(self.slots.device)

    def where(self, pointer: int) -> object:
        """A slot id, the expert whose host memory it is, or None."""
        slot, rest = divmod(pointer - self.slots.data_ptr(), self.slots.shape[1])
        if 0 <= slot < len(self.slots):
            assert rest == 0, pointer
            return slot
        at = {self.address_of(key): key for key in self.keys}
        return at[pointer] if pointer else None

    def places(self, pointers_TK: Tensor) -> list[object]:
        return [self.where(pointer) for pointer in pointers_TK.flatten().tolist()]

    def state(self) -> dict[str, object]:
        """All that a kernel may change, without addresses."""
        table = self.table
        num_logged = int(table.head[0])
        return {
            "slots": table.slot_LE.tolist(),
            "owners": table.owner_S.tolist(),
            "head": table.head.tolist(),
            "uses": table.uses_LE.tolist(),
            "routing": table.routing_LP.tolist(),
            "log": table.log_N3[: min(num_logged, table.max_misses)].tolist(),
            "sources": self.places(table.sources_P),
            "bytes": self.slots.tolist(),
        }
