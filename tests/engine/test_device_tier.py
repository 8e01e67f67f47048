"""A model with a DEVICE tier where the host decides, on a fake device that copies as late as it
may: the tokens of the run without one, whatever the budgets, and no slot read or overwritten too
early.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES
from moe_infinity.engine.engine import LocalExperts
from moe_infinity.memory.device import NUM_STAGING_BUFFERS
from moe_infinity.memory.device_mover import DeviceMover
from tests.conftest import make_model, save_tokenizer
from tests.fake_cuda import FakeCudaDevice, RealClock, fake_device
from tests.on_device import (
    BUDGETS,
    LONG_PROMPT,
    PROMPT,
    SOME_POLICIES,
    assert_same_tokens,
    greedy,
)

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    """Tokens of a run on the CPU, of the short and the long prompt."""
    with MoE(tiny_checkpoint, exact=True, device="cpu") as moe:
        return greedy(moe), greedy(moe, LONG_PROMPT)


@pytest.mark.grid
@pytest.mark.parametrize("host_memory", BUDGETS)
@pytest.mark.parametrize("device_memory", BUDGETS)
def test_no_budget_of_either_tier_changes_a_token(
    tiny_checkpoint, expected, device_memory, host_memory
):
    with (
        fake_device(FakeCudaDevice()) as cuda_device,
        MoE(
            tiny_checkpoint, exact=True, device_memory=device_memory, host_memory=host_memory
        ) as moe,
    ):
        assert_same_tokens(moe, expected, rounds=2)
        assert isinstance(moe.engine.tiers[0].mover, DeviceMover)
        assert cuda_device.num_copies > 0
    assert not cuda_device.locked


@pytest.mark.parametrize("host_memory", ["5%", "100%"])
def test_where_no_page_can_be_locked_copies_go_through_staging_buffers(
    tiny_checkpoint, expected, host_memory
):
    options = {"device_memory": "30%", "host_memory": host_memory}
    with (
        fake_device(FakeCudaDevice(is_locking=False)) as cuda_device,
        MoE(tiny_checkpoint, exact=True, **options) as moe,
    ):
        assert_same_tokens(moe, expected)
        assert len(cuda_device.locked) <= NUM_STAGING_BUFFERS


@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_no_policy_changes_a_token(tiny_checkpoint, expected, policy):
    budgets = {"device_memory": "25%", "host_memory": "50%"}
    with (
        fake_device(FakeCudaDevice()),
        MoE(tiny_checkpoint, exact=True, policy=policy, **budgets) as moe,
    ):
        assert_same_tokens(moe, expected)


@pytest.mark.parametrize(
    ("device_memory", "host_memory", "early_router"),
    [
        ("5%", "5%", False), ("40%", "5%", False), ("40%", "40%", True), ("40%", "100%", False),
        ("70%", "30%", True), ("70%", "100%", True),
    ],
)  # fmt: skip
def test_prefetch_through_both_tiers_changes_no_token(
    tiny_checkpoint, expected, device_memory, host_memory, early_router
):
    cuda_device = FakeCudaDevice(clock=RealClock(), bytes_per_s=1e8)
    options = {"device_memory": device_memory, "host_memory": host_memory}
    with (
        fake_device(cuda_device),
        MoE(
            tiny_checkpoint, exact=True, prefetch=True, early_router=early_router, **options
        ) as moe,
    ):
        assert_same_tokens(moe, expected, rounds=2)
        if device_memory == "40%":
            assert moe.report().prefetches.begun > 0


@pytest.mark.parametrize("num_models", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_random_budgets_policies_and_speeds_change_no_token(tiny_checkpoint, expected, num_models):
    """The seed is fixed: what it finds, it finds again."""
    chances = random.Random(0)
    for _ in range(num_models):
        options: dict[str, Any] = {
            "device_memory": f"{chances.randint(5, 100)}%",
            "host_memory": f"{chances.randint(6, 100)}%",
            "policy": chances.choice(POLICIES),
            "num_read_threads": chances.randint(1, 4),
        }
        options["prefetch"] = options["policy"] == ACTIVATION_AWARE
        speed: dict[str, Any] = {
            "bytes_per_s": 10 ** chances.uniform(5, 9),
            "is_locking": chances.random() < 0.7,
        }
        with (
            fake_device(FakeCudaDevice(**speed)),
            MoE(tiny_checkpoint, exact=True, **options) as moe,
        ):
            assert_same_tokens(moe, expected, rounds=1)


def test_batches_sampling_and_chunks_of_a_prompt_are_as_ever(tiny_checkpoint, stock_model):
    batch = {
        "input_ids": torch.tensor([[0, 0, 0, 5, 9, 40], [7, 3, 17, 5, 9, 40]]),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
    }
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    with (
        fake_device(FakeCudaDevice()),
        MoE(tiny_checkpoint, exact=True, device_memory="30%", host_memory="60%") as moe,
    ):
        assert torch.equal(moe.generate(**batch, **kwargs), stock_model.generate(**batch, **kwargs))
        chunked = {"prefill_chunk_size": 32}
        assert torch.equal(
            greedy(moe, LONG_PROMPT, **chunked), greedy(stock_model, LONG_PROMPT, **chunked)
        )
        assert moe.report().prefill.steps == 1 + 3


def test_packed_experts_are_copied_as_they_are_stored(tiny_checkpoint):
    """Both unpack them as they compute."""
    options: dict[str, Any] = {"expert_dtype": "int8", "exact": True}
    with MoE(tiny_checkpoint, **options) as moe:
        tokens = greedy(moe)
    with (
        fake_device(FakeCudaDevice()) as cuda_device,
        MoE(tiny_checkpoint, device_memory="30%", host_memory="60%", **options) as moe,
    ):
        assert torch.equal(greedy(moe), tokens)
        assert cuda_device.copied_bytes < 0.7 * 3072 * cuda_device.num_copies


# What it reports, and prefill


def test_the_report_shows_both_tiers_and_what_came_from_disk(tiny_checkpoint):
    with (
        fake_device(FakeCudaDevice()) as cuda_device,
        MoE(tiny_checkpoint, exact=True, device_memory="30%", host_memory="100%") as moe,
    ):
        greedy(moe)
        greedy(moe)
        report = moe.report()
        tiers = report.as_dict()["tiers"]
        assert list(tiers) == ["device", "host", "disk"]
        assert tiers["device"]["capacity"] == 7
        assert tiers["host"]["capacity"] == 24
        assert report.bytes_read == tiers["host"]["experts"] * 3072  # each one once
        assert report.prefill.misses + report.decode.misses == cuda_device.num_copies
        assert report.stall_s > 0
        assert "device " in str(report)


def test_a_long_prompt_streams_the_next_layer_before_it_is_routed(tiny_checkpoint, monkeypatch):
    """The link is busy while attention computes: prompts take less time by the modelled clock."""
    layer, took_s = LocalExperts.layer, []

    def after_attention(self: LocalExperts, *args: Any) -> Tensor:
        cuda_device.clock.advance_to(cuda_device.clock.now_s + 1e-4)
        return layer(self, *args)

    monkeypatch.setattr(LocalExperts, "layer", after_attention)
    for is_streaming in (True, False):
        options = {"exact": True, "device_memory": "70%", "host_memory": "100%"}
        with (
            fake_device(FakeCudaDevice(bytes_per_s=3e8)) as cuda_device,
            MoE(tiny_checkpoint, options | {"stream_layers": is_streaming}) as moe,
        ):
            greedy(moe, LONG_PROMPT, num_tokens=1)  # from disk, which has no modelled clock
            began_s = cuda_device.clock.now_s
            for _ in range(2):
                greedy(moe, LONG_PROMPT, num_tokens=1)
            assert (moe.report().prefill.late_hits > 0) == is_streaming
        took_s.append(cuda_device.clock.now_s - began_s)
    assert took_s[0] < 0.95 * took_s[1]


def test_a_short_prompt_loads_only_what_it_activates(tiny_checkpoint):
    with (
        fake_device(FakeCudaDevice()) as cuda_device,
        MoE(tiny_checkpoint, exact=True, device_memory="100%") as moe,
    ):
        greedy(moe, PROMPT[:, :2], num_tokens=1)
        assert cuda_device.num_copies == moe.report().prefill.misses


def test_a_long_prompt_leaves_what_decoding_uses(tiny_checkpoint):
    budgets = {"device_memory": "80%", "host_memory": "100%"}
    with (
        fake_device(FakeCudaDevice()),
        MoE(tiny_checkpoint, exact=True, policy="lru", **budgets) as moe,
    ):
        greedy(moe, PROMPT, num_tokens=60)
        table = moe.engine.tiers[0].table
        used = {key for key in table.resident_keys() if not table.is_transient(key)}
        greedy(moe, LONG_PROMPT, num_tokens=1)
        prefill_quota = table.num_slots // 8
        assert len(used - set(table.resident_keys())) <= prefill_quota


@pytest.mark.parametrize(("num_experts", "top_k", "num_slots"), [(4, 1, 2), (4, 2, 2), (9, 2, 1)])
def test_a_layer_that_needs_none_of_the_experts_streamed_ahead_finds_a_slot(
    tmp_path, num_experts, top_k, num_slots
):
    model = make_model(num_hidden_layers=5, num_experts=num_experts, num_experts_per_tok=top_k)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    share = f"{100 * (num_slots + 0.01) / (5 * num_experts):.3f}%"
    budgets = {"device_memory": share, "host_memory": "100%"}
    with fake_device(FakeCudaDevice()), MoE(tmp_path, exact=True, policy="lru", **budgets) as moe:
        for _ in range(4):
            greedy(moe)
        greedy(moe, torch.arange(3, 60).view(1, -1))
        moe.check_invariants()
