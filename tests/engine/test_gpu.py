"""What only a GPU can show. Run by hand: `pytest -m gpu`; benchmarks/gpu_check.py measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.errors import ConfigError, OutOfMemory
from moe_infinity.memory.cuda import TorchCudaDevice
from moe_infinity.memory.device import PAGE_BYTES, DeviceSlots, SourceSlots
from moe_infinity.memory.device_mover import DeviceMover
from tests.closeness import distance, logits_of_steps
from tests.on_device import BUDGETS, LONG_PROMPT, PROMPT, greedy
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SLOT_BYTES = 256 * PAGE_BYTES


@pytest.mark.parametrize("how", [{"exact": True}, {"experts_implementation": "fast"}], ids=str)
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("host_memory", BUDGETS)
@pytest.mark.parametrize("device_memory", BUDGETS)
def test_no_budget_of_either_tier_changes_a_token(
    tiny_checkpoint, device_memory, host_memory, prefetch, how
):
    """By torch, and by the kernel of experts."""
    with MoE(tiny_checkpoint, device="cuda", device_memory="100%", **how) as moe:
        expected = [greedy(moe, prompt) for prompt in (PROMPT, LONG_PROMPT)]
    options = {"device_memory": device_memory, "host_memory": host_memory, "prefetch": prefetch}
    with MoE(tiny_checkpoint, device="cuda", **how, **options) as moe:
        assert isinstance(moe.engine.tiers[0].mover, DeviceMover)
        for _ in range(3):
            for prompt, tokens in zip((PROMPT, LONG_PROMPT), expected, strict=True):
                assert torch.equal(greedy(moe, prompt), tokens)
                moe.check_invariants()


def test_the_result_is_where_the_model_computes(tiny_checkpoint):
    with MoE(tiny_checkpoint, device="cuda:0") as moe:
        assert greedy(moe).device == torch.device("cuda", 0)
        assert {param.device.type for param in moe.model.parameters()} == {"cuda"}


def test_a_device_that_is_not_there_is_refused_with_how_many_there_are(tiny_checkpoint):
    with pytest.raises(ConfigError, match="finds .* CUDA devices"):
        MoE(tiny_checkpoint, device="cuda:77")


@pytest.mark.parametrize("is_locking", [True, False], ids=["page-locked", "staged"])
def test_bytes_arrive_in_order_though_nobody_waits(monkeypatch, is_locking):
    """Many experts through few slots of both tiers, read by kernels that are slower than copies."""
    cuda_device = TorchCudaDevice(torch.device("cuda", 0))
    if not is_locking:
        monkeypatch.setattr(cuda_device, "page_lock", lambda memory: False)
    host, device = SourceSlots(cuda_device, 3, SLOT_BYTES), DeviceSlots(cuda_device, 2, SLOT_BYTES)
    sums = []
    for value in range(60):
        host_slot, slot = value % 3, value % 2
        host.bytes_of(host_slot)[:] = bytes([value]) * SLOT_BYTES
        source = host.tensor_of(host_slot, SLOT_BYTES)
        assert source.is_pinned() == is_locking
        copy = device.fill(slot, source, is_locked=host.is_locked(host_slot))
        host.note_copy(host_slot, copy)
        cuda_device.let_kernels_wait(copy)
        torch.cuda._sleep(1_000_000)
        sums.append(device.tensor_of(slot, SLOT_BYTES).sum())
        device.mark_read([slot])
    assert [int(total) for total in sums] == [value * SLOT_BYTES for value in range(60)]
    assert cuda_device.take_stall_s() >= 0
    cuda_device.synchronize()
    host.close()


def test_a_copy_from_locked_pages_does_not_stop_the_cpu():
    cuda_device = TorchCudaDevice(torch.device("cuda", 0))
    host, device = SourceSlots(cuda_device, 1, 64 << 20), DeviceSlots(cuda_device, 1, 64 << 20)
    host.bytes_of(0)[:8] = b"12345678"
    copy = device.fill(0, host.tensor_of(0, 64 << 20), is_locked=host.is_locked(0))
    assert not copy.query()
    copy.synchronize()
    assert 1e-4 < copy.took_s < 1.0
    host.close()


def test_a_device_without_memory_left_is_answered_with_the_numbers(tiny_checkpoint, monkeypatch):
    with MoE(tiny_checkpoint, exact=True, device="cuda", device_memory="50%") as moe:
        tokens = greedy(moe)
        with monkeypatch.context() as patch:

            def run(*_: object) -> None:
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

            patch.setattr(LayerComputer, "compute", run)
            with pytest.raises(OutOfMemory, match="12 expert slots"):
                greedy(moe)
        assert torch.equal(greedy(moe), tokens)


def test_packed_experts_are_unpacked_on_the_device(tiny_checkpoint):
    options: dict[str, Any] = {"device": "cuda", "expert_dtype": "int8", "exact": True}
    with MoE(tiny_checkpoint, device_memory="100%", **options) as moe:
        tokens = greedy(moe)
    with MoE(tiny_checkpoint, device_memory="20%", **options) as moe:
        assert torch.equal(greedy(moe), tokens)


@pytest.mark.parametrize("folder", ["aria", "gpt_oss", "llama4", "mixtral", "nemotron_h"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_agrees_with_torch_when_it_is_tried(folder, dtype, tmp_path):
    """And in float32 the logits are nearly those of torch."""
    tiny_model(architectures_in(folder)[-1]).save_pretrained(tmp_path)
    ids = torch.cat([PROMPT, LONG_PROMPT[:, :16]], dim=1).cuda()
    found = []
    by_kernel = {"experts_implementation": "fast", "gpu_engine": "host"}
    for options in (by_kernel, {"exact": True}):
        with MoE(tmp_path, device="cuda", device_memory="30%", dtype=dtype, **options) as moe:
            assert ("by one kernel" in moe.report().experts) == ("exact" not in options)
            found.append(logits_of_steps(moe.model, ids, PROMPT.shape[1]))
    if dtype == "float32":
        assert distance(*found) < 1e-3
