"""Who computes where."""

from __future__ import annotations

import pytest
import torch

from moe_infinity.errors import ConfigError
from moe_infinity.experimental.gpu import resolve_reference, slot_kernels
from moe_infinity.experimental.gpu.kernels import reference as slot_reference


def test_host_memory_has_the_plain_reference():
    found = slot_kernels.slot_kernels(torch.device("cpu"))
    assert {kernel.__module__ for kernel in found} == {
        resolve_reference.__name__,
        slot_reference.__name__,
    }


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(slot_kernels, "has_triton_kernels", lambda: False)
    with pytest.raises(ConfigError, match="kernels for cuda:1 need triton, which is not installed"):
        slot_kernels.slot_kernels(torch.device("cuda:1"))


def test_a_gpu_with_triton_has_its_kernels():
    pytest.importorskip("triton", reason="needs triton")
    found = slot_kernels.slot_kernels(torch.device("cuda"))
    assert {kernel.__module__ for kernel in found} == {
        "moe_infinity.experimental.gpu.resolve",
        "moe_infinity.experimental.gpu.kernels.experts",
    }
