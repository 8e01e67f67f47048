"""Models whose decode steps a fake device decides, and what their tokens are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.engine.device import ComputeDevice
from moe_infinity.engine.engine import ExpertEngine
from moe_infinity.engine.expert_kernels import slot_layer
from moe_infinity.experimental.gpu.fused_modules import FusedModules
from moe_infinity.experimental.gpu.graphed_step import GraphedStep
from moe_infinity.experimental.gpu.kernels import reference as slot_reference
from moe_infinity.experimental.gpu.kernels.slot_mlp import SlotMlp
from tests.experimental.gpu.fake_cuda import FakeCudaDevice, fake_device
from tests.experimental.gpu.on_device import LONG_PROMPT, greedy
from tests.kernels.slot_moe import slot_moe

FAST: dict[str, Any] = {"experts_implementation": "fast"}
STATIC: dict[str, Any] = {"cache_implementation": "static"}
CACHES = [pytest.param({}, id="dynamic"), pytest.param(STATIC, id="static")]


@contextmanager
def on_device(checkpoint: Path, device_memory: str, host_memory: str, **more: Any) -> Iterator[MoE]:
    """If HOST has room for all experts it has them, and the device decides."""
    budgets = {"device_memory": device_memory, "host_memory": host_memory}
    options = {"preload": "off", **budgets, **FAST, **more}
    with fake_device(FakeCudaDevice()), MoE(checkpoint, options) as moe:
        if host_memory == "100%":
            moe.preload()
        yield moe


def compute_as_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models that are opened from now on do so, on a CPU, with slots for all experts."""

    def attend_as_a_device_does(self: ComputeDevice, model: Any, engine: Any) -> GraphedStep:
        with engine.without_experts():
            return GraphedStep(model, None)

    init, moe_layer = LayerComputer.__init__, ExpertEngine.moe_layer
    mlps: dict[LayerComputer, SlotMlp | None] = {}

    def with_mlp(self: LayerComputer, layer: Any, recipes: Any, *args: Any, **more: Any) -> None:
        init(self, layer, recipes, *args, **more)
        mlps[self] = slot_layer(layer, recipes)

    def computed(
        self: ExpertEngine, moe_layer_idx: int, x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        out = moe_layer(self, moe_layer_idx, x, index, weights)  # loads the experts
        mlp = mlps[self.path.computers[moe_layer_idx]]
        if mlp is None:
            return out
        keys, tier = self.bookkeeping.keys[moe_layer_idx], self.tiers[0]
        addresses = torch.zeros(len(keys), dtype=torch.int64)
        for expert_idx in set(index[index >= 0].tolist()):
            slot_id = tier.table.slot_of(keys[expert_idx])
            addresses[expert_idx] = tier.slots.address_of(slot_id)
        return slot_moe(slot_reference, mlp, x, index, weights, addresses)

    def fused(self: ComputeDevice, model: Any) -> FusedModules:
        return FusedModules(model, self.device)

    monkeypatch.setattr(ComputeDevice, "fused_modules", fused)
    monkeypatch.setattr(ComputeDevice, "graphed_step", attend_as_a_device_does)
    monkeypatch.setattr(ComputeDevice, "small_batch_steps", lambda *_: None)
    monkeypatch.setattr(LayerComputer, "__init__", with_mlp)
    monkeypatch.setattr(ExpertEngine, "moe_layer", computed)


@cache
def tokens_of_a_cpu(
    checkpoint: Path, cache_implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Of the short and the long prompt, with all experts in memory. Attention with another kind of
    cache may give other last bits, so tokens are compared with those of the same kind.
    """
    kind: dict[str, Any] = {"cache_implementation": cache_implementation}
    with pytest.MonkeyPatch.context() as patched:
        compute_as_the_device_does(patched)
        with MoE(checkpoint, device="cpu", host_memory="100%", **FAST) as moe:
            return greedy(moe, **kind), greedy(moe, LONG_PROMPT, **kind)
