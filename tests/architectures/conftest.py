"""What tests of decoder layers watch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from moe_infinity.kernels.cpu.decoder_steps import DecoderSteps


@pytest.fixture
def calls(monkeypatch):
    """The number of sequences of every call for one layer without its experts."""
    seen: list[int] = []
    attend = DecoderSteps.attend

    def counted(self: DecoderSteps, layer: int, x_BD: Tensor, *args: Any) -> Any:
        seen.append(len(x_BD))
        return attend(self, layer, x_BD, *args)

    monkeypatch.setattr(DecoderSteps, "attend", counted)
    return seen


@pytest.fixture
def runs(monkeypatch):
    """The number of layers of every call for layers with their experts."""
    seen: list[int] = []
    run = DecoderSteps.run

    def counted(self: DecoderSteps, first: int, x: Tensor, angles: Any, cached: Any, *args: Any):
        seen.append(len(cached))
        return run(self, first, x, angles, cached, *args)

    monkeypatch.setattr(DecoderSteps, "run", counted)
    return seen
