"""Host memory that is filled in the background while a device is served from it."""

from __future__ import annotations

import random
import time

import pytest
import torch

from moe_infinity import MoE
from tests.disk import Disk
from tests.fake_cuda import FakeCudaDevice, fake_device
from tests.on_device import LONG_PROMPT, greedy

pytestmark = pytest.mark.arithmetic


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    with MoE(tiny_checkpoint, exact=True, device="cpu") as moe:
        return greedy(moe), greedy(moe, LONG_PROMPT)


@pytest.mark.parametrize("num_models", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.grid
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("budgets", [("30%", "100%"), ("100%", "100%"), ("30%", "60%")], ids=str)
def test_what_is_being_preloaded_is_waited_for_and_read_once(
    tiny_checkpoint, expected, disk, budgets, prefetch, num_models
):
    chances = random.Random(0)
    disk.act = lambda read: time.sleep(chances.uniform(0, 0.02) if read.kind == "preload" else 0)
    options = dict(zip(("device_memory", "host_memory"), budgets, strict=True))
    options |= {"preload": "idle", "prefetch": prefetch, "exact": True}
    for _ in range(num_models):
        with fake_device(FakeCudaDevice()), MoE(tiny_checkpoint, options) as moe:
            for _ in range(2):
                assert torch.equal(greedy(moe, LONG_PROMPT), expected[1])
                assert torch.equal(greedy(moe), expected[0])
                moe.check_invariants()
            moe.preload()
            assert torch.equal(greedy(moe), expected[0])
            moe.check_invariants()
            if budgets[1] == "100%":
                assert moe.report().bytes_read == moe.engine.stored_expert_bytes


@pytest.mark.parametrize("budgets", [("30%", "100%"), ("30%", "60%")], ids=str)
def test_a_read_that_fails_ends_preloading_and_no_answer(
    tiny_checkpoint, expected, disk, budgets, caplog
):
    options = dict(zip(("device_memory", "host_memory"), budgets, strict=True))
    with (
        fake_device(FakeCudaDevice()),
        MoE(tiny_checkpoint, options | {"preload": "off", "exact": True}) as moe,
    ):
        disk.fail(lambda read: read.kind == "preload")
        moe.preload()
        assert torch.equal(greedy(moe, LONG_PROMPT), expected[1])
        assert torch.equal(greedy(moe), expected[0])
        assert caplog.text.count("preloading of experts ends") == 1
        moe.check_invariants()
