"""Misses on a device split between the link and the CPU: what the CPU computes is what the device
would have but for rounding, and it takes its share only where that is sooner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.fake_link import FakeLink, fake_device
from moe_infinity import MoE
from moe_infinity.errors import ConfigError
from moe_infinity.kernels.dispatch import NO_EXPERT, RoutedRows
from moe_infinity.models import cpu_share
from moe_infinity.models.cpu_share import CpuShare
from tests.closeness import distance, logits_of_steps
from tests.on_device import LONG_PROMPT, PROMPT, greedy
from tests.test_device_faults import BrokenLink

pytestmark = pytest.mark.arithmetic

pytest.importorskip("numba", reason="needs numba")
AT_ONCE, HALF, NEVER = (0.0, 1.0), (1.0, 1.0), (99.0, 1.0)  # seconds: CPU, link
TIMES = {"all by the CPU": AT_ONCE, "half and half": HALF, "never": NEVER}
# Two layers of sums over 64 numbers in float32, in another order.
TOLERANCE = 64 * torch.finfo(torch.float32).eps


@contextmanager
def split(
    checkpoint: Path, times: tuple[float, float], **options: Any
) -> Iterator[tuple[MoE, CpuShare, FakeLink]]:
    """A device whose CPU and link take these seconds for an expert."""
    budgets = {"device_memory": "30%", "host_memory": "100%"}
    with (
        fake_device(FakeLink()) as link,
        MoE(checkpoint, split_misses=True, dtype="float32", **budgets | options) as moe,
    ):
        share = moe._runtime.cpu_share
        assert share is not None
        share.cpu_s, share.copy_s = times
        yield moe, share, link
        moe.check_invariants()


IDS = torch.cat([PROMPT, LONG_PROMPT[:, :24]], dim=1)


def steps_of(moe: MoE, ids: Tensor = IDS) -> Tensor:
    return logits_of_steps(moe.model, ids, num_prompt=PROMPT.shape[1] + 1)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint) -> Tensor:
    with MoE(tiny_checkpoint, device="cpu", dtype="float32") as moe:
        return steps_of(moe)


@pytest.mark.parametrize("times", TIMES.values(), ids=list(TIMES))
def test_logits_are_those_of_the_device_but_for_rounding(tiny_checkpoint, expected, times):
    with split(tiny_checkpoint, times) as (moe, share, _):
        found = steps_of(moe)
        assert (share.num_computed > 0) == (times != NEVER)
        assert moe.report().decode.misses >= share.num_computed
    assert distance(found, expected) < TOLERANCE
    assert torch.equal(found, expected) == (times == NEVER)


def test_the_tolerance_rejects_another_expert(tiny_checkpoint, expected):
    with split(tiny_checkpoint, AT_ONCE) as (moe, share, _):
        right, elsewhere = share._fused[1], moe._runtime.tiers[1].slots.address_of(0)
        assert right is not None

        def wrong(x_PD: Tensor, starts: list[int], addresses: list[int]) -> Tensor:
            return right(x_PD, starts, [elsewhere] * len(addresses))

        share._fused[1] = wrong  # type: ignore[call-overload]
        found = steps_of(moe)
    assert distance(found, expected) > 10 * TOLERANCE


def test_the_share_makes_the_longer_wait_shortest():
    share = CpuShare.__new__(CpuShare)
    found = {}
    for times in ((1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (4.1, 1.0), (0.1, 1.0)):
        share.cpu_s, share.copy_s = times
        found[times] = [share.num_for_cpu(num_misses) for num_misses in (0, 1, 2, 4, 8)]
    assert found == {
        (1.0, 1.0): [0, 0, 1, 2, 4],
        (1.0, 3.0): [0, 1, 2, 3, 6],
        (3.0, 1.0): [0, 0, 0, 1, 2],
        (4.1, 1.0): [0, 0, 0, 0, 1],
        (0.1, 1.0): [0, 1, 2, 4, 8],
    }


def test_what_the_cpu_computes_is_not_copied_and_takes_no_slot(tiny_checkpoint):
    with split(tiny_checkpoint, AT_ONCE) as (moe, share, link), torch.no_grad():
        moe.model(LONG_PROMPT)  # brings all experts to HOST
        assert len(moe._runtime.tiers[1].table) == moe._runtime.total_experts
        cache = moe.model(PROMPT, use_cache=True).past_key_values
        copied, residents = link.num_copies, set(moe._runtime.table.resident_keys())
        for token_id in (5, 77, 31):
            moe.model(torch.tensor([[token_id]]), past_key_values=cache)
        assert moe.report().decode.misses == share.num_computed > 0
        assert link.num_copies == copied
        assert set(moe._runtime.table.resident_keys()) == residents


def test_the_best_of_the_misses_are_those_that_are_copied(tiny_checkpoint):
    with split(tiny_checkpoint, HALF, device_memory="10%") as (moe, share, _), torch.no_grad():
        moe.model(LONG_PROMPT)
        runtime = moe._runtime
        keys = [key for key in runtime._keys[1] if runtime.table.lookup(key) is None][:4]
        scores_RE = runtime.tiers[0].policy.scores()
        by_score = sorted(keys, key=lambda key: scores_RE[key])
        assert share._choose(1, keys) == by_score[:2]


@pytest.mark.grid
@pytest.mark.parametrize("device_memory", ["5%", "40%", "100%"])
@pytest.mark.parametrize("host_memory", ["5%", "40%", "100%"])
def test_no_budget_changes_more_than_rounding(
    tiny_checkpoint, expected, device_memory, host_memory
):
    options = {"device_memory": device_memory, "host_memory": host_memory}
    for more in ({}, {"prefetch": True}):
        with split(tiny_checkpoint, HALF, **options, **more) as (moe, _, _):
            for _ in range(2):
                assert distance(steps_of(moe), expected) < TOLERANCE
                moe.check_invariants()


def test_a_batch_of_sequences_is_shared_too(tiny_checkpoint):
    ids = torch.cat([IDS, IDS.flip(1), IDS.roll(3, 1)])
    with MoE(tiny_checkpoint, device="cpu", dtype="float32") as moe:
        expected = steps_of(moe, ids)
    with split(tiny_checkpoint, HALF) as (moe, share, _):
        assert distance(steps_of(moe, ids), expected) < TOLERANCE
        assert share.num_computed > 0


def test_an_error_while_it_computes_is_told_and_the_next_call_works(
    tiny_checkpoint, expected, monkeypatch
):
    with split(tiny_checkpoint, AT_ONCE) as (moe, share, _):
        right = list(share._fused)
        share._fused[2] = None
        with pytest.raises(AssertionError):
            greedy(moe)
        moe.check_invariants()
        share._fused[:] = right
        assert distance(steps_of(moe), expected) < TOLERANCE


def test_a_host_of_one_slot_is_left_to_what_must_be_read(tiny_checkpoint):
    """With the only slot held for the CPU nothing could be read from disk."""
    link = BrokenLink()
    budgets = {"device_memory": 4 * 6144, "host_memory": 8192}
    with fake_device(link), torch.no_grad():
        options: dict[str, Any] = {**budgets, "dtype": "float32", "split_misses": True}
        with MoE(tiny_checkpoint, **options) as moe:
            share = moe._runtime.cpu_share
            assert share is not None
            share.cpu_s, share.copy_s = AT_ONCE
            cache = moe.model(PROMPT, use_cache=True).past_key_values
            for fails_in in (1, -1):  # what was read for a copy that failed is in HOST alone
                link.fails_in = fails_in
                with nullcontext() if fails_in < 0 else pytest.raises(RuntimeError, match="broken"):
                    moe.model(torch.tensor([[77]]), past_key_values=cache)
            assert moe._runtime.tiers[1].slots.num_slots == 1


def test_both_are_measured_when_the_model_is_loaded(tiny_checkpoint):
    options: dict[str, Any] = {"device_memory": "30%", "split_misses": True}
    link = FakeLink(bytes_per_s=1e6)
    with fake_device(link), MoE(tiny_checkpoint, **options) as moe:
        share, slot_bytes = moe._runtime.cpu_share, moe._runtime.slots.slot_bytes
        assert share is not None
        assert share.copy_s == pytest.approx(link.load_s(slot_bytes))
        assert 0 < share.cpu_s < 1
        assert moe.report().experts.endswith("ms by the link")


def test_the_host_decides_and_says_so(tiny_checkpoint, caplog):
    with split(tiny_checkpoint, HALF, experts_implementation="fast") as (moe, _, _):
        assert moe._runtime.device_steps is None
    assert "with split_misses" in caplog.text


def test_it_is_refused_where_there_is_nothing_to_split(tiny_checkpoint):
    for options in ({"device": "cpu"}, {}):  # no test sees a GPU, if there is one
        with pytest.raises(ConfigError, match="for a GPU"):
            MoE(tiny_checkpoint, split_misses=True, **options)


def test_it_is_refused_without_numba_and_for_experts_it_cannot_compute(
    tiny_checkpoint, monkeypatch
):
    monkeypatch.setattr(cpu_share, "has_packed_kernels", lambda: False)
    with fake_device(FakeLink()), pytest.raises(ConfigError, match="needs numba"):
        MoE(tiny_checkpoint, device_memory="30%", split_misses=True)
    monkeypatch.undo()
    monkeypatch.setattr(cpu_share, "fused_row", lambda row, recipes: None)
    with fake_device(FakeLink()), pytest.raises(ConfigError, match="no kernel of ours"):
        MoE(tiny_checkpoint, device_memory="30%", split_misses=True)


def test_a_row_may_have_no_experts_to_share(tiny_checkpoint):
    """Of two tokens that LongCat routes to nothing but the identity."""
    work = RoutedRows(np.full((2, 2), NO_EXPERT), is_eager=True)
    with split(tiny_checkpoint, AT_ONCE) as (_, share, _), share.sharing(0, work, []) as of_device:
        assert not of_device
