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
from moe_infinity.engine.expert_kernels import slot_layer
from moe_infinity.engine.layer import ExpertRuntime
from moe_infinity.experts import Phase
from moe_infinity.kernels.cuda import reference as slot_reference
from tests.cuda.fake_cuda import FakeCudaDevice, fake_device
from tests.cuda.on_device import LONG_PROMPT, greedy

FAST: dict[str, Any] = {"experts_implementation": "fast"}
STATIC: dict[str, Any] = {"cache_implementation": "static"}
CACHES = [pytest.param({}, id="dynamic"), pytest.param(STATIC, id="static")]


@contextmanager
def on_device(checkpoint: Path, device_memory: str, host_memory: str, **more: Any) -> Iterator[MoE]:
    budgets = {"device_memory": device_memory, "host_memory": host_memory}
    with fake_device(FakeCudaDevice()), MoE(checkpoint, **budgets, **FAST, **more) as moe:
        yield moe


def bring_every_expert(moe: MoE) -> None:
    """To HOST, so that no step can be lost."""
    steps = moe.engine.device_steps
    assert steps is not None
    for row, keys in enumerate(moe.engine._keys):
        steps._bring(row, torch.arange(len(keys)))
    assert not steps.can_lose


def compute_as_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the reference path, from slots; they have room for all."""
    moe_layer = ExpertRuntime.moe_layer

    def layer(self: ExpertRuntime, row: int, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = moe_layer(self, row, x, index, weights)  # brings the experts
        if self.recorder.step.phase is Phase.PREFILL:
            return out
        mlp = slot_layer(self._rows[row], self._recipes[row])
        ids = [self.table.slot_of(self._keys[row][e]) for e in index.flatten().tolist()]
        addresses = torch.tensor([self.slots.address_of(slot) for slot in ids]).view(index.shape)
        assert mlp is not None
        return slot_reference.slot_moe(mlp, x, addresses, weights)

    monkeypatch.setattr(ExpertRuntime, "moe_layer", layer)


@cache
def tokens_of_a_cpu(
    checkpoint: Path, cache_implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """That has everything, of the short and the long prompt. Attention with another kind of cache
    may give other last bits, so tokens are compared with those of the same kind.
    """
    kind: dict[str, Any] = {"cache_implementation": cache_implementation}
    with (
        pytest.MonkeyPatch.context() as patched,
        MoE(checkpoint, device="cpu", host_memory="100%", **FAST) as moe,
    ):
        compute_as_the_device_does(patched)
        return greedy(moe, **kind), greedy(moe, LONG_PROMPT, **kind)
