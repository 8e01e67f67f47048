"""Models whose decode steps a fake device decides, and what their tokens are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.engine import DeviceExperts
from tests.fake_cuda import FakeCudaDevice, fake_device
from tests.on_device import LONG_PROMPT, greedy

GRAPHS: dict[str, Any] = {"gpu_engine": "graphs", "host_memory": "100%"}
STATIC: dict[str, Any] = {"cache_implementation": "static"}
CACHES = [pytest.param({}, id="dynamic"), pytest.param(STATIC, id="static")]


@contextmanager
def on_device(checkpoint: Path, device_memory: str, **more: Any) -> Iterator[MoE]:
    """The device decides from the first step on, as HOST is filled before it."""
    options = {"preload": "off", "device_memory": device_memory, **GRAPHS, **more}
    with fake_device(FakeCudaDevice()), MoE(checkpoint, options) as moe:
        moe.preload()
        yield moe


def experts_of(moe: MoE) -> DeviceExperts:
    experts = moe._experts
    assert isinstance(experts, DeviceExperts)
    return experts


def let_the_host_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step, with the same kernels."""

    def begin(self: DeviceSteps, step: Any) -> bool:
        self.reset()
        self.leave_to_host()
        return False

    monkeypatch.setattr(DeviceSteps, "begin_step", begin)


@cache
def tokens_of_the_host(
    checkpoint: Path, cache_implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Of the short and the long prompt, with all experts resident. Attention with another kind of
    cache may give other last bits, so tokens are compared with those of the same kind.
    """
    kind: dict[str, Any] = {"cache_implementation": cache_implementation}
    with pytest.MonkeyPatch.context() as patched:
        let_the_host_decide(patched)
        with on_device(checkpoint, "100%") as moe:
            return greedy(moe, **kind), greedy(moe, LONG_PROMPT, **kind)
