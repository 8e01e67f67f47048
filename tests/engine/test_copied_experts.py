"""`device="mps"`: experts are copied from host memory to where the rest of the model is.

There is no such device here. A stand-in computes on the CPU by the same path, and the meta device
shows that weights come to their rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_infinity import ConfigError, MoE, OffloadConfig
from moe_infinity.engine import device
from moe_infinity.engine.compute import _copying
from moe_infinity.engine.torch_backend import TorchBackend, TorchWork
from moe_infinity.experts import Routing
from tests.closeness import logits_of_steps

IDS = torch.arange(3, 15).view(1, 12)


def test_a_torch_without_mps_is_an_error(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="device 'mps' asked for, .*finds none\nhint: device='cpu'"
    ):
        MoE(tiny_checkpoint, device="mps")


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("host_memory", ["25%", "100%"])
def test_copied_experts_have_the_bits_of_transformers(
    tiny_checkpoint, host_memory, is_exact, monkeypatch
):
    """On the stand-in, which computes as the CPU does."""
    with MoE(tiny_checkpoint, device="cpu", exact=True) as moe, torch.no_grad():
        expected = logits_of_steps(moe.model, IDS)
    monkeypatch.setattr(device, "_mps", lambda: torch.device("cpu"))
    monkeypatch.setattr(device.ComputeDevice, "small_batch_steps", lambda *_: None)  # as on mps
    with (
        MoE(tiny_checkpoint, device="mps", host_memory=host_memory, exact=is_exact) as moe,
        torch.no_grad(),
    ):
        assert torch.equal(logits_of_steps(moe.model, IDS), expected)
        assert moe.report().tiers[0].tier == "host"
        assert "exact" in moe.report().experts


def test_packed_experts_are_unpacked_before_they_are_copied(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(device, "_mps", lambda: torch.device("cpu"))
    with MoE(tiny_checkpoint, device="cpu", expert_dtype="int8", exact=True) as moe:
        expected = moe.generate(IDS, max_new_tokens=8)
    with MoE(tiny_checkpoint, device="mps", expert_dtype="int8", exact=True) as moe:
        assert torch.equal(moe.generate(IDS, max_new_tokens=8), expected)


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("weighs_input", [False, True])
def test_a_layer_is_computed_where_its_rows_are(is_eager, weighs_input):
    chosen = torch.tensor([[0, 2], [2, 1]], dtype=torch.int64, device="cpu")
    x_TD = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    shares_TK = torch.empty(2, 2, dtype=torch.bfloat16, device="meta")
    slot = {"up": torch.empty(8, 8, dtype=torch.bfloat16, device="cpu")}

    def work_of(mlp: Any) -> Any:
        backend = TorchBackend(
            mlp, lambda slot_id: slot, is_eager=is_eager, weighs_input=weighs_input
        )
        return TorchWork(backend, x_TD, Routing.of(chosen, shares_TK))

    work = work_of(_copying(product))
    work.compute([0, 1, 2], [0, 1, 2])
    assert work.sum().device.type == "meta"
    with pytest.raises(AssertionError):
        work_of(product).compute([0], [0])


def product(weights: Any, x_RD: torch.Tensor) -> torch.Tensor:
    assert weights["up"].device == x_RD.device
    return x_RD @ weights["up"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_memory": "1GiB"}, "with device='mps' use host_memory"),
        ({"experts_implementation": "fast"}, "none of our kernels runs on mps"),
    ],
)
def test_what_needs_our_kernels_or_a_gpu_of_cuda_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        OffloadConfig(device="mps", **options)


def test_steps_of_few_tokens_are_computed_by_the_model_itself(monkeypatch):
    """Our kernels for them read the memory of the CPU."""
    monkeypatch.setattr(device, "_mps", lambda: torch.device("mps"))
    there = device.ComputeDevice(OffloadConfig(device="mps"))
    assert there.device.type == "mps"
    assert there.small_batch_steps(None, None, None) is None
