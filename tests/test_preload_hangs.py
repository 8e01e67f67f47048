"""Preloading from a disk that hangs ends, and nobody waits for it for ever."""

from __future__ import annotations

import threading

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.engine import preloader as preloader_module
from moe_infinity.memory import mover as mover_module
from tests.disk import Disk
from tests.on_demand import ON_DEMAND

pytestmark = pytest.mark.timeout(60)
INPUTS = {"input_ids": torch.tensor([[5, 6, 9]]), "attention_mask": torch.ones(1, 3).long()}


def tokens_of(moe: MoE) -> list[int]:
    ids: list[int] = moe.generate(**INPUTS, do_sample=False, max_new_tokens=8)[0].tolist()
    return ids


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def test_a_disk_that_hangs_ends_preloading_and_the_wait_for_it(
    tiny_checkpoint, disk, monkeypatch, caplog
):
    with MoE(tiny_checkpoint, host_memory="100%", **ON_DEMAND) as moe:
        expected = tokens_of(moe)
    awake = threading.Event()
    disk.act = lambda read: read.kind != "preload" or awake.wait(3)
    with MoE(tiny_checkpoint, host_memory="100%", preload="wait") as moe:
        with monkeypatch.context() as patch:
            for module in (mover_module, preloader_module):
                patch.setattr(module, "LOAD_TIMEOUT_S", 0.3, raising=False)
            moe.preload()
        (warning,) = [text for text in caplog.messages if "preloading of experts ends" in text]
        assert "none arrived" in warning
        assert moe.is_ready
        awake.set()
        assert tokens_of(moe) == expected
        moe.check_invariants()
