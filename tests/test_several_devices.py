"""A model with experts on two devices, of which the second is watched (two_devices.py): the tokens
of the run without any, whatever the budgets, and nothing computed or copied where it is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fake_link import FakeLink, RealClock, fake_device
from moe_infinity import MoE
from moe_infinity.errors import ConfigError, OutOfMemory
from moe_infinity.kernels.dispatch import RoutedRows
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.device_mover import DeviceMover
from moe_infinity.models.computing import RowComputer
from moe_infinity.models.device import ComputeDevice
from moe_infinity.runtime import ExpertRuntime
from tests.on_device import LONG_PROMPT, PROMPT, assert_same_tokens, greedy
from tests.test_device_faults import BrokenLink, WatchedLink, watch_kernels
from tests.two_devices import BOTH, SecondLink, TwoDevices

pytestmark = pytest.mark.arithmetic

BUDGETS = ["5%,5%", "30%,5%", "5%,30%", "100%,5%", "100%"]  # of 24 experts


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    """Tokens of a run on the CPU, of the short and the long prompt."""
    with MoE(tiny_checkpoint, device="cpu") as moe:
        return greedy(moe), greedy(moe, LONG_PROMPT)


@pytest.fixture
def watch():
    with TwoDevices() as watch:
        yield watch


def slots_of(moe: MoE) -> DeviceSlots:
    slots = moe._runtime.slots
    assert isinstance(slots, DeviceSlots)
    return slots


@pytest.mark.grid
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("host_memory", ["5%", "50%"])
@pytest.mark.parametrize("device_memory", BUDGETS)
def test_no_budget_of_either_device_changes_a_token(
    tiny_checkpoint, expected, watch, device_memory, host_memory, prefetch
):
    clock = RealClock() if prefetch else None
    links = FakeLink(clock=clock, bytes_per_s=1e8), SecondLink(bytes_per_s=3e7)
    options = {"device_memory": device_memory, "host_memory": host_memory, "prefetch": prefetch}
    with fake_device(*links), MoE(tiny_checkpoint, device=BOTH, **options) as moe:
        assert_same_tokens(moe, expected, rounds=2)
        assert slots_of(moe).links in ([*links], [*reversed(links)])
        assert moe.report().as_dict()["tiers"]["device"]["capacity"] == slots_of(moe).num_slots
    assert all(link.num_copies > 0 for link in links)
    assert watch.num_sent > 0
    assert not links[0].locked


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_either_order_of_summation_and_packed_experts_are_as_ever(
    tiny_checkpoint, watch, implementation
):
    for options in ({}, {"expert_dtype": "int8"}):
        options |= {"experts_implementation": implementation}
        with MoE(tiny_checkpoint, device="cpu", **options) as moe:
            tokens = greedy(moe)
        with (
            fake_device(FakeLink(), SecondLink()),
            MoE(tiny_checkpoint, device=BOTH, device_memory="20%,40%", **options) as moe,
        ):
            assert torch.equal(greedy(moe), tokens)


def test_rows_that_stay_on_the_first_device_are_noticed(
    tiny_checkpoint, expected, watch, monkeypatch
):
    def compute(self: RoutedRows, expert_idx: int, mlp: Any, weights: Any) -> None:
        self.add(expert_idx, mlp(weights, self.inputs_of(expert_idx)))

    monkeypatch.setattr(RoutedRows, "compute", compute)
    with (
        fake_device(FakeLink(), SecondLink()),
        MoE(tiny_checkpoint, device=BOTH, device_memory="50%") as moe,
        pytest.raises(AssertionError, match="with tensors on"),
    ):
        greedy(moe)


# Who waits for what


@pytest.mark.parametrize("deaf", [0, 1])
def test_kernels_wait_on_the_link_of_their_slot(tiny_checkpoint, expected, monkeypatch, deaf):
    options = {"device": BOTH, "device_memory": "20%,20%", "host_memory": "10%"}
    for is_deaf in (False, True):
        links = FakeLink(bytes_per_s=1e5), SecondLink(bytes_per_s=1e5)
        if is_deaf:
            monkeypatch.setattr(links[deaf], "let_kernels_wait", lambda copy: None)
        with fake_device(*links), MoE(tiny_checkpoint, **options) as moe:
            assert torch.equal(greedy(moe), expected[0]) != is_deaf


def test_a_slot_is_overwritten_only_after_kernels_of_its_own_device(
    tiny_checkpoint, expected, monkeypatch
):
    links = WatchedLink(), WatchedLink()
    watch_kernels(monkeypatch)
    with (
        fake_device(*links),
        MoE(tiny_checkpoint, device=BOTH, device_memory="20%,10%", host_memory="10%") as moe,
    ):
        assert_same_tokens(moe, expected)
    assert min(link.num_checked for link in links) > 20


def test_waiting_is_that_of_all_devices(tiny_checkpoint):
    links = FakeLink(), SecondLink()
    with fake_device(*links), MoE(tiny_checkpoint, device=BOTH, device_memory="20%") as moe:
        links[0]._stall_s, links[1]._stall_s = 20.0, 3.0
        greedy(moe, num_tokens=1)
        assert 23 < moe.report().stall_s < 24


# Where experts lie


def test_every_layer_has_experts_on_both_devices_and_both_links_bring_them(
    tiny_checkpoint, monkeypatch
):
    links = FakeLink(), SecondLink()
    moe_layer, copies = ExpertRuntime.moe_layer, []

    def counting(self: ExpertRuntime, *args: Any) -> Tensor:
        before = [link.num_copies for link in links]
        out = moe_layer(self, *args)
        copies.append([link.num_copies - n for link, n in zip(links, before, strict=True)])
        return out

    monkeypatch.setattr(ExpertRuntime, "moe_layer", counting)
    with fake_device(*links), MoE(tiny_checkpoint, device=BOTH, device_memory="80%,40%") as moe:
        greedy(moe, LONG_PROMPT, num_tokens=1)
        slots, table = slots_of(moe), moe._runtime.table
        found = Counter(
            (key.moe_row, slots.link_of(slot)) for key, slot in table.resident_slots().items()
        )
    assert len(copies) == 3
    assert [sum(layer) for layer in copies] == [8, 8, 8]
    for row in range(3):
        assert found[row, links[0]] in (5, 6)
        assert found[row, links[1]] in (2, 3)
    assert all(min(layer) >= 2 for layer in copies[:1])


def test_two_links_bring_a_prompts_experts_in_half_the_time(tiny_checkpoint):
    """The second prompt: HOST has all experts then, and no thread's pace counts."""
    took_s = []
    for device, share in (("cuda:0", "40%"), (BOTH, "20%,20%")):
        links = FakeLink(bytes_per_s=1e7), SecondLink(bytes_per_s=1e7)
        budgets = {"device": device, "device_memory": share, "host_memory": "100%"}
        with fake_device(*links), MoE(tiny_checkpoint, **budgets) as moe:
            greedy(moe, LONG_PROMPT, num_tokens=1)
            began_s, began = links[0].clock.now_s, sum(link.num_copies for link in links)
            greedy(moe, LONG_PROMPT, num_tokens=1)
            assert sum(link.num_copies for link in links) > began + 10
            took_s.append(links[0].clock.now_s - began_s)
    assert took_s[1] < 0.6 * took_s[0]


def test_a_second_smaller_device_raises_the_hit_rate(tiny_checkpoint, expected):
    rates = []
    for device, device_memory in (("cuda:0", "30%"), (BOTH, "30%,15%")):
        with (
            fake_device(FakeLink(), SecondLink()),
            MoE(tiny_checkpoint, device=device, device_memory=device_memory) as moe,
        ):
            assert_same_tokens(moe, expected, rounds=2)
            rates.append(moe.report().decode.hit_rate or 0)
    assert rates[1] > rates[0] + 0.1


def test_host_pages_are_locked_once_for_all(tiny_checkpoint, monkeypatch):
    first, second = FakeLink(), SecondLink()
    monkeypatch.setattr(second, "page_lock", lambda memory: pytest.fail("locked again"))
    options = {"device_memory": "20%", "host_memory": "50%"}
    with fake_device(first, second), MoE(tiny_checkpoint, device=BOTH, **options) as moe:
        greedy(moe)
        assert second.num_copies > 0
    assert not first.locked


# What fails


@pytest.mark.parametrize("fails_in", [1, 5])
def test_a_copy_that_fails_on_one_link_is_an_error_and_the_next_call_works(
    tiny_checkpoint, expected, fails_in
):
    first, second = FakeLink(), BrokenLink()
    with (
        fake_device(first, second),
        MoE(tiny_checkpoint, device=BOTH, device_memory="10%", host_memory="30%") as moe,
    ):
        second.fails_in = fails_in
        with pytest.raises(RuntimeError, match="link is broken"):
            greedy(moe)
        assert_same_tokens(moe, expected)


@pytest.mark.parametrize("at", [2, 5, 13])
def test_an_interrupt_leaves_nothing_behind_on_either_device(
    tiny_checkpoint, expected, watch, monkeypatch, at
):
    options = {"device": BOTH, "device_memory": "20%,20%", "host_memory": "30%"}
    links = FakeLink(bytes_per_s=1e6), SecondLink(bytes_per_s=1e5)
    with fake_device(*links), MoE(tiny_checkpoint, prefetch=True, **options) as moe:
        greedy(moe)
        begin, calls = DeviceMover._begin_copy, []

        def interrupted(self: DeviceMover, key: Any) -> None:
            calls.append(key)
            begin(self, key)
            if len(calls) == at:
                raise KeyboardInterrupt

        monkeypatch.setattr(DeviceMover, "_begin_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            greedy(moe, num_tokens=100)
        monkeypatch.undo()
        assert_same_tokens(moe, expected)


def test_a_device_that_holds_no_expert_is_named(tiny_checkpoint):
    small = SecondLink(total_bytes=3000)
    with fake_device(FakeLink(), small):
        for device_memory in (None, "25%,1%", "25%,1KiB"):
            with pytest.raises(ConfigError, match=r"holds no expert(.|\n)*cuda:1 has"):
                MoE(tiny_checkpoint, device=BOTH, device_memory=device_memory)


def test_dense_weights_are_counted_on_the_first_device_alone(tiny_checkpoint):
    with MoE(tiny_checkpoint, device="cpu") as moe:
        dense_bytes = sum(param.nbytes for param in moe.model.parameters())
    room = 10 * 3072
    links = FakeLink(total_bytes=dense_bytes + room), SecondLink(total_bytes=room)
    with fake_device(*links), MoE(tiny_checkpoint, device=BOTH) as moe:
        counts = Counter(map(slots_of(moe).link_of, range(slots_of(moe).num_slots)))
    assert list(counts.values()) == [8, 8]


def test_without_memory_left_the_numbers_of_all_devices_are_given(tiny_checkpoint, monkeypatch):
    def run(*args: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 MiB")

    monkeypatch.setattr(RowComputer, "run", run)
    with (
        fake_device(FakeLink(), SecondLink()),
        MoE(tiny_checkpoint, device=BOTH, device_memory="25%") as moe,
        pytest.raises(OutOfMemory, match=r"free on cpu, .* free on cuda:1, 12 expert slots"),
    ):
        greedy(moe, PROMPT)


def test_where_the_device_would_decide_the_host_does(tiny_checkpoint, caplog):
    options = {"device_memory": "50%", "experts_implementation": "fast"}
    with fake_device(FakeLink(), FakeLink()), MoE(tiny_checkpoint, device=BOTH, **options) as moe:
        assert moe._runtime.device_steps is None
        greedy(moe)
    assert "with several devices the host decides" in caplog.text


def test_experts_with_a_dense_norm_after_them_are_refused(tiny_checkpoint, monkeypatch):
    make_slots = ComputeDevice._make_slots

    def with_norm(self: ComputeDevice, plan: Any, dense_bytes: int) -> DeviceSlots:
        plan.rows[1].module.has_post_expert_norm = True
        return make_slots(self, plan, dense_bytes)

    monkeypatch.setattr(ComputeDevice, "_make_slots", with_norm)
    with (
        fake_device(FakeLink(), SecondLink()),
        pytest.raises(ConfigError, match="norm after each expert"),
    ):
        MoE(tiny_checkpoint, device=BOTH)
