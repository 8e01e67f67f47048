"""Decode steps that the device decides, on a fake device with the plain twins of its kernels: the
tokens of the same arithmetic on a CPU, whatever the budgets, and a host that knows what happened.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from benchmarks.fake_link import FakeLink, fake_device
from moe_infinity import MoE
from moe_infinity.cache.activation_aware import ActivationAware
from moe_infinity.cache.policies import Lru
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey
from moe_infinity.kernels import (
    has_triton_kernels,
    slot_kernels,
)
from moe_infinity.kernels.device_table import DeviceTable
from moe_infinity.kernels.slot_kernels import SlotKernels
from moe_infinity.models.device_steps import DeviceSteps
from moe_infinity.runtime import ExpertRuntime
from tests.fast_device import (
    CACHES,
    FAST,
    STATIC,
    compute_as_the_device_does,
    on_device,
    tokens_of_a_cpu,
)
from tests.on_device import LONG_PROMPT, PROMPT, SOME_POLICIES, assert_same_tokens, greedy
from tests.server.driving import Client, generated, make_engine, run_all


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    return tokens_of_a_cpu(tiny_checkpoint)


@pytest.mark.grid
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("host_memory", ["34%", "60%", "100%"])  # 8, 14, 24 experts
@pytest.mark.parametrize("device_memory", ["5%", "30%", "100%"])  # 1, 7, 24
def test_no_budget_of_either_tier_changes_a_token(
    tiny_checkpoint, expected, device_memory, host_memory, cache
):
    with on_device(tiny_checkpoint, device_memory, host_memory) as moe:
        for _ in range(2):
            assert torch.equal(greedy(moe, **cache), expected[0])
            moe.check_invariants()
            assert torch.equal(greedy(moe, LONG_PROMPT, **cache), expected[1])
            moe.check_invariants()
        decode = moe.report().decode
        assert decode.steps == 2 * 2 * 15
        assert decode.lookups == decode.steps * 3 * 2


@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_no_policy_changes_a_token(tiny_checkpoint, expected, policy):
    with on_device(tiny_checkpoint, "30%", "60%", policy=policy) as moe:
        assert_same_tokens(moe, expected, rounds=2)
        assert moe.report().decode.hits > 0


def test_a_graph_and_no_graph_give_the_same_tokens_in_any_order(tiny_checkpoint, expected):
    chances = random.Random(0)
    with on_device(tiny_checkpoint, "40%", "50%", policy="lru") as moe:
        for _ in range(8):
            cache, which = chances.choice([{}, STATIC]), chances.randint(0, 1)
            assert torch.equal(greedy(moe, (PROMPT, LONG_PROMPT)[which], **cache), expected[which])
            moe.check_invariants()


def test_a_batch_is_decided_by_the_device_too(tiny_checkpoint):
    batch = {
        "input_ids": torch.tensor([[2, 2, 2, 5, 9, 40], [7, 3, 17, 5, 9, 40]]),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
    }
    kwargs = {"max_new_tokens": 8, "do_sample": False}
    found = []
    for budgets in (("100%", "100%"), ("10%", "40%")):
        with on_device(tiny_checkpoint, *budgets) as moe:
            for cache in ({}, STATIC):
                found.append(moe.generate(**batch, **kwargs, **cache).tolist())
                moe.check_invariants()
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("expert_dtype", ["int8", "fp8"])
def test_packed_experts_are_read_as_they_are_stored(tiny_checkpoint, expert_dtype):
    found = []
    for budgets in (("100%", "100%"), ("10%", "40%")):
        with on_device(tiny_checkpoint, *budgets, expert_dtype=expert_dtype) as moe:
            found.append(greedy(moe, num_tokens=8, **STATIC).tolist())
            assert moe.report().decode.steps == 7
            moe.check_invariants()
    assert found[0] == found[1]


def test_the_server_is_given_the_tokens_of_generate(tiny_checkpoint):
    prompts = [[5, 6, 9, 100, 31], [77, 12, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
    with on_device(tiny_checkpoint, "30%", "50%") as moe:
        expected = [generated(moe, prompt) for prompt in prompts]
        for max_batch in (1, 3):
            engine = make_engine(moe, max_batch=max_batch)
            clients = [Client(engine, prompt) for prompt in prompts]
            run_all(engine, *clients)
            moe.check_invariants()
            if max_batch == 1:  # attention of a batch rounds differently
                assert [client.token_ids for client in clients] == expected
            assert all(client.error is None for client in clients)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not has_triton_kernels(),
    reason="needs triton's interpreter, which reads the memory of a fake device",
)
def test_with_tritons_kernels_no_budget_changes_a_token_either(tiny_checkpoint, monkeypatch):
    from moe_infinity.kernels import triton_experts, triton_resolve

    monkeypatch.setattr(triton_resolve, "FILL_PROGRAMS", 1)  # they run one after the other
    compiled = triton_resolve.resolve, triton_resolve.fill, triton_experts.slot_moe
    monkeypatch.setattr(slot_kernels, "slot_kernels", lambda device: SlotKernels(*compiled))
    found = []
    for budgets in (("100%", "100%"), ("10%", "34%")):
        with on_device(tiny_checkpoint, *budgets) as moe:
            found.append(greedy(moe, num_tokens=5, **STATIC).tolist())
            moe.check_invariants()
    assert found[0] == found[1]


# What the host knows


def counted(moe: MoE) -> tuple[Any, ...]:
    """What was looked up, and what everybody learned of it."""
    decode = moe.report().decode
    eams = [eam.decode.tolist() for eam in moe.request_eams()]
    scores = [policy.scores().tolist() for policy in moe._runtime._policies]
    return decode.hits, decode.misses, decode.steps, moe.report().evictions, eams, scores


@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_with_room_for_all_the_host_counts_what_the_reference_path_counts(
    tiny_checkpoint, policy, monkeypatch
):
    """The reference path with the same arithmetic, so with the same routing."""
    with on_device(tiny_checkpoint, "100%", "100%", policy=policy) as moe:
        greedy(moe)
        greedy(moe, LONG_PROMPT, **STATIC)
        by_device = counted(moe)
    monkeypatch.setattr(DeviceSteps, "begin", lambda self, step: False)
    compute_as_the_device_does(monkeypatch)
    with on_device(tiny_checkpoint, "100%", "100%", policy=policy) as moe:
        greedy(moe)
        greedy(moe, LONG_PROMPT)
        assert counted(moe) == by_device


@pytest.mark.parametrize("device_memory", ["30%", "50%"])
def test_misses_are_those_of_scores_one_step_old(tiny_checkpoint, monkeypatch, device_memory):
    """LRU with few slots differs from the reference path, whose scores know the row before."""
    models: list[Modelled] = []
    begin = DeviceSteps.begin

    def begin_and_look(self: DeviceSteps, step: Any) -> bool:
        is_ours = begin(self, step)
        if is_ours and not models:
            models.append(Modelled(self._runtime))
        return is_ours

    monkeypatch.setattr(DeviceSteps, "begin", begin_and_look)
    with (
        on_device(tiny_checkpoint, device_memory, "100%", policy="lru") as moe,
        moe.recording() as finish,
    ):
        greedy(moe, PROMPT, num_tokens=40, eos_token_id=-1)
        (model,) = models
        for token in finish()[0].experts_TLK[len(PROMPT[0]) :]:
            model.step(token.tolist())
        decode = moe.report().decode
        assert decode.steps == 39
        assert (decode.hits, decode.misses) == (model.hits, model.misses)
        assert 0 < model.hits < decode.lookups


def test_scores_are_those_after_each_part_of_the_rows(tiny_checkpoint, monkeypatch):
    asked: list[int] = []
    offered = []
    scores_after, offer = ActivationAware.scores_after, DeviceTable.offer

    def asking(self: ActivationAware, moe_row: int) -> Any:
        asked.append(moe_row)
        return scores_after(self, moe_row)

    def offering(self: DeviceTable, scores_HLE: Any) -> None:
        offered.append(scores_HLE.copy())
        offer(self, scores_HLE)

    monkeypatch.setattr(DeviceTable, "offer", offering)
    with on_device(tiny_checkpoint, "30%", "100%") as moe:
        greedy(moe)
        monkeypatch.setattr(ActivationAware, "scores_after", asking)
        offered.clear()
        policy = moe._runtime.tiers[0].policy
        moe._runtime.table._transient[:] = False  # their scores are lower
        steps = moe._runtime.device_steps
        assert steps is not None
        steps._offer()
        assert asked == [0, 2]
        assert (offered[0] == [policy.scores_after(0), policy.scores_after(2)]).all()
        assert (offered[0][0] != offered[0][1]).any()


@pytest.mark.parametrize("cache", CACHES)
def test_a_step_that_was_lost_has_the_misses_of_both_its_runs(tiny_checkpoint, monkeypatch, cache):
    missed: list[set[ExpertKey]] = [set()]
    finish_read = DeviceTable.finish_read

    def reading(self: DeviceTable) -> Any:
        report = finish_read(self)
        missed[-1].update(miss.key for miss in report.misses)
        if report.lost_row is None:
            missed.append(set())
        return report

    monkeypatch.setattr(DeviceTable, "finish_read", reading)
    with on_device(tiny_checkpoint, "30%", "34%") as moe:
        greedy(moe, **cache)
        decode = moe.report().decode
        assert decode.misses == sum(map(len, missed))
        assert decode.hits == decode.lookups - decode.misses


class Modelled:
    """Slots whose owners the device replaces; begins with what the prompt left."""

    LAST_ROWS = (0, 2, 2)  # of the part that each of three rows belongs to

    def __init__(self, runtime: ExpertRuntime) -> None:
        table, policy = runtime.table, runtime.tiers[0].policy
        assert isinstance(policy, Lru)
        self.owners: list[ExpertKey | None] = [None] * table.num_slots
        for key, slot in table.resident_slots().items():
            self.owners[slot] = key
        self.transient = {key for key in table.resident_keys() if table.is_transient(key)}
        self.gone: set[ExpertKey] = set()  # in the last step, of which the host has not heard
        self.last_use, self.clock = policy._last_use.copy(), policy._clock
        self.hits = self.misses = 0
        self.before: list[list[int]] = []
        self.offered = self.scores()

    def scores(self) -> Any:
        scores = self.last_use.copy()
        for key in self.transient:
            scores[key] -= 1e6
        return scores

    def step(self, routing: list[list[int]]) -> None:
        self.transient -= self.gone
        self.gone = set()
        for row, experts in enumerate(routing):
            used = [ExpertKey(row, expert) for expert in experts]
            self.hits += sum(key in self.owners for key in used)
            for key in used:
                if key not in self.owners:
                    self.misses += 1
                    self.take_slot(key, used)
        for row, experts in enumerate(self.before):
            self.clock += 1
            self.last_use[row, experts] = self.clock
            self.transient.difference_update(ExpertKey(row, expert) for expert in experts)
        self.before = routing
        self.offered = self.scores()

    def take_slot(self, key: ExpertKey, used: list[ExpertKey]) -> None:
        row = key.moe_row
        leaving = [
            (-1e9 if owner is None else self.offered[owner], slot)
            for slot, owner in enumerate(self.owners)
            if owner is None or not (owner in used or row < owner.moe_row <= self.LAST_ROWS[row])
        ]
        if leaving:
            _, slot = min(leaving)
            if (owner := self.owners[slot]) is not None:
                self.gone.add(owner)
            self.owners[slot] = key


def test_a_recording_has_every_token(tiny_checkpoint):
    with on_device(tiny_checkpoint, "30%", "100%") as moe, moe.recording() as finish:
        greedy(moe, **STATIC)
        (trace,) = finish()
        assert len(trace.experts_TLK) == len(PROMPT[0]) + 15


def test_a_small_host_is_refused_before_the_first_token(tiny_checkpoint):
    refused = pytest.raises(ConfigError, match="host_memory holds 7 experts.* needs 8")
    with refused, on_device(tiny_checkpoint, "30%", "30%"):
        pass


def test_memory_that_cannot_be_page_locked_is_refused_and_says_what_to_do(tiny_checkpoint):
    link = FakeLink(is_locking=False)
    with fake_device(link), MoE(tiny_checkpoint, device_memory="30%", **FAST) as moe:
        for _ in range(2):
            with pytest.raises(ConfigError, match="page-locked .*\nhint: lower host_memory"):
                greedy(moe)


def test_prefetch_leaves_every_step_to_the_host(tiny_checkpoint, caplog):
    with on_device(tiny_checkpoint, "30%", "100%", prefetch=True) as moe:
        assert moe._runtime.device_steps is None
        assert "the host decides in every step" in caplog.text
        greedy(moe, **STATIC)
