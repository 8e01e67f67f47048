"""Small device tables with the memory they point into."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import ExpertKey
from moe_infinity.gpu.device_table import DeviceTable, LayerReport


class World:
    """A table, and the host memory in which every expert lies: its bytes are those of no other."""

    def __init__(
        self,
        device: str,
        *,
        layers: int = 3,
        experts: int = 8,
        slots: int = 6,
        max_pairs: int = 16,
        slot_bytes: int = 48,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = layers * experts, slot_bytes
        self.host = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if device == "cuda":
            self.host = self.host.pin_memory()
        self.slots = torch.zeros(slots, slot_bytes, dtype=torch.uint8, device=device)
        self.table = DeviceTable(
            self.slots,
            num_layers=layers,
            num_experts=experts,
            max_pairs=max_pairs,
        )
        self.keys = [
            ExpertKey(layer, expert) for layer in range(layers) for expert in range(experts)
        ]
        self.upload({})

    def upload(self, slot_of: dict[ExpertKey, int]) -> None:
        """All of them are in host memory."""
        self.table.upload_residency(slot_of, {key: self.address_of(key) for key in self.keys})

    def bytes_of(self, key: ExpertKey) -> Tensor:
        return self.host[key.moe_layer_idx * self.table.num_experts + key.expert_idx]

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

    def places(self, pointers: Tensor) -> list[object]:
        return [self.where(pointer) for pointer in pointers.flatten().tolist()]

    def state(self) -> dict[str, object]:
        """All that a kernel may change, without addresses."""
        table = self.table
        return {
            "slots": table.slot_LE.tolist(),
            "owners": table.owner_S.tolist(),
            "uses": table.uses_E.tolist(),
            "reports": table.reports_LW.tolist(),
            "pointers": self.places(table.pointers_E),
            "copies": self.places(table.copies_2E),
            "bytes": self.slots.tolist(),
        }

    # What the host reads and uploads

    def report(self, moe_layer_idx: int, num_pairs: int) -> LayerReport:
        report = self.table.read_report(moe_layer_idx, num_pairs)
        assert report is not None
        return report

    def reports(self, num_pairs: int) -> list[LayerReport | None]:
        """By layer, of a step that is over."""
        self.table.end_step()
        self.table.wait()
        assert self.table.is_over()
        reports = [
            self.table.read_report(layer, num_pairs) for layer in range(self.table.num_layers)
        ]
        self.table.begin_step()
        self.table.check_invariants()
        return reports

    def misses(self, num_pairs: int) -> list[tuple[ExpertKey, int]]:
        reports = self.reports(num_pairs)
        return [miss for report in reports if report is not None for miss in report.misses.items()]

    def upload_scores(self, *scores: list[float]) -> None:
        """Scores by expert, the same for all layers; one list for each part, or one for all."""
        uploaded = np.array(scores, dtype=np.float64)[None]
        self.upload_all_scores(np.broadcast_to(uploaded, self.table.scores_LHE.shape))

    def upload_all_scores(self, scores_LHE: NDArray[np.float64], first_layer: int = 0) -> None:
        """Heard before the next step begins."""
        self.table.upload_scores(np.ascontiguousarray(scores_LHE), first_layer)
        if self.slots.device.type == "cuda":
            torch.cuda.synchronize()


def step(kernels: Any, world: World, routing: Any) -> list[list[object]]:
    """Where the pairs of each layer are."""
    found = []
    for layer, index_TK in enumerate(routing):
        index = world.index(index_TK)
        by_expert = world.places(kernels.resolve(world.table, layer, index))
        found.append([by_expert[e] if e >= 0 else None for e in index.flatten().tolist()])
        kernels.fill(world.table, index.numel())
    return found


def routings(experts: int = 8, max_tokens: int = 8, max_k: int = 8) -> Any:
    """A step's [T, K] ids of each of three layers, -1 among them."""

    def layer(shape: tuple[int, int]) -> Any:
        ids = st.lists(st.integers(-1, experts - 1), min_size=shape[1], max_size=shape[1])
        return st.lists(st.lists(ids, min_size=shape[0], max_size=shape[0]), min_size=3, max_size=3)

    return st.tuples(st.integers(1, max_tokens), st.integers(1, max_k)).flatmap(layer)


def random_scores(world: World, seed: int) -> NDArray[np.float64]:
    """With equal ones among them."""
    chances = np.random.default_rng(seed)
    return chances.integers(0, 6, world.table.scores_LHE.shape).astype(np.float64)
