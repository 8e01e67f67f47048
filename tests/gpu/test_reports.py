"""How soon the host applies the reports of a device that decides: what it knows when an expert is
evicted, and that no token depends on it. A fake device reports a layer when the test says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_infinity.cache.policies import Lru
from moe_infinity.experts import ExpertKey
from moe_infinity.gpu import reports
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.graphed_step import WARM_UP_STEPS
from moe_infinity.gpu.reports import ReportPoller
from moe_infinity.memory.tiers import SlotTier
from tests.gpu.fast_device import CACHES, STATIC, on_device, tokens_of_the_host
from tests.gpu.recorded_graph import record_graphs, tokens_without_graph
from tests.on_device import PROMPT, assert_same_tokens, greedy

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(2)]

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    return tokens_of_the_host(tiny_checkpoint)


def report_if(monkeypatch: pytest.MonkeyPatch, is_reported: Callable[[int], bool]) -> None:
    """A layer is reported if so, and when the step is over."""
    read_report, read_new = DeviceTable.read_report, ReportPoller._read_new
    is_done = [False]

    def reading_one(self: DeviceTable, moe_layer_idx: int, num_pairs: int) -> Any:
        return (
            read_report(self, moe_layer_idx, num_pairs)
            if is_done[0] or is_reported(moe_layer_idx)
            else None
        )

    def reading_new(self: ReportPoller, polled: Any, *, is_over: bool) -> Any:
        is_done[0] = is_over
        return read_new(self, polled, is_over=is_over)

    monkeypatch.setattr(DeviceTable, "read_report", reading_one)
    monkeypatch.setattr(ReportPoller, "_read_new", reading_new)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("policy", ["activation-aware", "lru"])
def test_however_late_the_host_polls_no_token_changes(
    tiny_checkpoint, expected, monkeypatch, policy, cache
):
    chances = random.Random(0)
    of_this_cache = tokens_of_the_host(tiny_checkpoint, **cache)
    report_if(monkeypatch, lambda moe_layer_idx: chances.random() < 0.5)
    with on_device(tiny_checkpoint, "30%", policy=policy) as moe:
        for _ in range(3):
            assert_same_tokens(moe, expected, rounds=1)
            assert torch.equal(greedy(moe, **cache), of_this_cache[0])
            moe.check_invariants()
        decode = moe.report().decode
        assert decode.lookups == decode.steps * NUM_LAYERS * 2


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("device_memory", ["30%", "50%"])
def test_misses_are_those_of_scores_after_the_applied_reports(
    tiny_checkpoint, monkeypatch, device_memory, lag
):
    models: list[Modelled] = []
    begin = DeviceSteps.begin_step

    def begin_and_look(self: DeviceSteps, step: Any) -> bool:
        is_ours = begin(self, step)
        if is_ours and not models:
            models.append(Modelled(self._bookkeeping.tiers[0], lag))
        return is_ours

    monkeypatch.setattr(DeviceSteps, "begin_step", begin_and_look)
    compute, at = DeviceSteps.run_layer, [0]

    def computing(self: DeviceSteps, moe_layer_idx: int, *args: Any) -> Any:
        at[0] = moe_layer_idx
        return compute(self, moe_layer_idx, *args)

    monkeypatch.setattr(DeviceSteps, "run_layer", computing)
    report_if(monkeypatch, lambda moe_layer_idx: moe_layer_idx < at[0] - lag)
    with on_device(tiny_checkpoint, device_memory, policy="lru") as moe:
        moe.model(torch.arange(100)[None])
        with moe.recording() as finish:
            greedy(moe, PROMPT, num_tokens=40, eos_token_id=-1)
        (model,) = models
        for token in finish()[0].experts_TLK[len(PROMPT[0]) :]:
            model.step(token.tolist())
        decode = moe.report().decode
        assert decode.steps == 39
        assert (decode.hits, decode.misses) == (model.hits, model.misses)
        assert 0 < model.hits < decode.lookups


class Modelled:
    """Slots whose owners the device replaces; begins with what the prompt left."""

    LAST_LAYERS = (0, 2, 2)  # of the part that each of three layers belongs to

    def __init__(self, tier: SlotTier, lag: int) -> None:
        self.lag = lag
        table, policy = tier.table, tier.policy
        assert isinstance(policy, Lru)
        self.owners: list[ExpertKey | None] = [None] * table.num_slots
        for key, slot in table.resident_slots().items():
            self.owners[slot] = key
        self.transient = {key for key in table.resident_keys() if table.is_transient(key)}
        self.last_use, self.clock = policy._last_use.copy(), policy._clock
        self.hits = self.misses = 0
        # Of each layer, what it used and who left for it, before the host has applied it.
        self.unapplied: list[tuple[list[ExpertKey], set[ExpertKey | None]]] = []
        self.uploaded = self.scores()

    def scores(self) -> Any:
        scores = self.last_use.copy()
        for key in self.transient:
            scores[key] -= 1e6
        return scores

    def step(self, routing: list[list[int]]) -> None:
        while self.unapplied:
            self.apply()
        self.uploaded = self.scores()
        for layer, experts in enumerate(routing):
            if len(self.unapplied) > self.lag:
                applied_layer = self.apply()
                self.uploaded[applied_layer] = self.scores()[applied_layer]
            used = [ExpertKey(layer, expert) for expert in experts]
            gone: set[ExpertKey | None] = set()
            self.hits += sum(key in self.owners for key in used)
            for key in sorted(used):
                if key not in self.owners:
                    self.misses += 1
                    gone.add(self.take_slot(key, used))
            self.unapplied.append((used, gone))

    def apply(self) -> int:
        used, gone = self.unapplied.pop(0)
        self.clock += 1
        self.transient = self.transient - gone - set(used)
        for key in used:
            self.last_use[key] = self.clock
        return used[0].moe_layer_idx

    def take_slot(self, key: ExpertKey, used: list[ExpertKey]) -> ExpertKey | None:
        layer = key.moe_layer_idx
        leaving = [
            (-1e9 if owner is None else self.uploaded[owner], slot)
            for slot, owner in enumerate(self.owners)
            if owner is None
            or not (owner in used or layer < owner.moe_layer_idx <= self.LAST_LAYERS[layer])
        ]
        if not leaving:
            return None
        _, slot = min(leaving)
        owner, self.owners[slot] = self.owners[slot], key
        return owner


# While a graph runs


def keep_busy(
    monkeypatch: pytest.MonkeyPatch, num_looks: int, *, layers_a_look: int = 1
) -> list[tuple[int, int]]:
    """Steps that report `layers_a_look` more layers each time the host looks whether they are over,
    and are over after `num_looks`. Returns, for each step, the number of layers that were counted
    when it was launched, and when polling ended.
    """
    looks, num_counted, counted = [0], [0], list[tuple[int, int]]()
    poll_reports, run_layer = ReportPoller.poll_reports, DeviceSteps.run_layer
    begin_step, apply_next = ReportPoller.begin_step, ReportPoller._apply_next

    def begin(poller: ReportPoller, step: Any) -> None:
        begin_step(poller, step)
        num_counted[0] = 0

    def apply(poller: ReportPoller) -> bool:
        is_applied = apply_next(poller)
        num_counted[0] += is_applied
        return is_applied

    def is_over(table: DeviceTable) -> bool:
        looks[0] += 1
        return looks[0] > num_looks

    def computing(steps: DeviceSteps, *args: Any) -> Any:
        looks[0] = NUM_LAYERS
        return run_layer(steps, *args)

    def poll_and_note(poller: ReportPoller) -> None:
        looks[0] = 0
        num_before = num_counted[0]
        poll_reports(poller)
        counted.append((num_before, num_counted[0]))

    monkeypatch.setattr(DeviceTable, "is_over", is_over)
    monkeypatch.setattr(ReportPoller, "poll_reports", poll_and_note)
    monkeypatch.setattr(ReportPoller, "begin_step", begin)
    monkeypatch.setattr(ReportPoller, "_apply_next", apply)
    monkeypatch.setattr(DeviceSteps, "run_layer", computing)
    report_if(monkeypatch, lambda moe_layer_idx: moe_layer_idx < looks[0] * layers_a_look)
    return counted


@pytest.mark.parametrize(
    ("num_looks", "layers_a_look", "num_counted"), [(0, 1, 0), (2, 1, 2), (9, 1, 3), (9, 3, 1)]
)
def test_a_graph_is_polled_until_its_last_layer(
    tiny_checkpoint, monkeypatch, num_looks, layers_a_look, num_counted
):
    """Reports that come faster than they are applied are applied later."""
    expected = tokens_without_graph(tiny_checkpoint)
    graphs = record_graphs(monkeypatch)
    with on_device(tiny_checkpoint, "30%") as moe:
        counted = keep_busy(monkeypatch, num_looks, layers_a_look=layers_a_look)
        assert torch.equal(greedy(moe), expected[0])
        assert len(graphs) == 1
        assert counted[WARM_UP_STEPS:] == (15 - WARM_UP_STEPS) * [(0, num_counted)]
        moe.check_invariants()  # applies the rest
        decode = moe.report().decode
        assert decode.lookups == decode.steps * NUM_LAYERS * 2 == 15 * NUM_LAYERS * 2


def test_a_device_that_reports_nothing_is_not_polled_for_ever(
    tiny_checkpoint, expected, monkeypatch
):
    monkeypatch.setattr(reports, "POLL_TIMEOUT_S", 0.05)
    with on_device(tiny_checkpoint, "30%") as moe:
        counted = keep_busy(monkeypatch, 1 << 30, layers_a_look=0)
        assert torch.equal(greedy(moe, num_tokens=4), expected[0][:, : len(PROMPT[0]) + 4])
        assert len(counted) == 3
        moe.check_invariants()
        assert moe.report().decode.lookups == 3 * NUM_LAYERS * 2


def test_ctrl_c_while_a_step_is_polled_leaves_the_model_usable(
    tiny_checkpoint, expected, monkeypatch
):
    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    with on_device(tiny_checkpoint, "30%") as moe:
        assert torch.equal(greedy(moe), expected[0])
        with monkeypatch.context() as patched:
            patched.setattr("moe_infinity.gpu.reports.time.sleep", press)
            keep_busy(patched, 1 << 30, layers_a_look=0)
            with pytest.raises(KeyboardInterrupt):
                greedy(moe, **STATIC)
        assert_same_tokens(moe, expected)
