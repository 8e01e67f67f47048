"""Decode steps that the device decides: what is stale shows in the tokens, and what fails or is
interrupted leaves the model usable."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.cache.policies import Lru
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.gpu import reports
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.graphed_step import GraphedStep
from moe_infinity.gpu.kernels import reference
from moe_infinity.gpu.reports import ReportPoller
from moe_infinity.kernels.triton import reference as of_experts
from tests.cache_name import CACHE
from tests.gpu.fast_device import (
    CACHES,
    STATIC,
    experts_of,
    on_device,
    tokens_of_the_host,
)
from tests.gpu.recorded_graph import record_graphs, tokens_without_graph
from tests.on_device import LONG_PROMPT, PROMPT, assert_same_tokens, greedy

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(2)]

TIGHT = "30%"  # 7 of 24


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    return tokens_of_the_host(tiny_checkpoint)


def is_wrong(checkpoint: Any, device_memory: str, **cache: Any) -> bool:
    expected = tokens_of_the_host(checkpoint, **cache)
    with on_device(checkpoint, device_memory, policy="lru") as moe:
        return any(not torch.equal(greedy(moe, **cache), expected[0]) for _ in range(2))


# What would be wrong. Each test shows that it would change the tokens.


def test_an_expert_that_left_is_not_found_where_it_was(tiny_checkpoint, monkeypatch):
    assert not is_wrong(tiny_checkpoint, "30%")
    take_slot = reference._take_slot

    def forgetting(table: DeviceTable, moe_layer_idx: int, expert: int) -> int:
        slot_LE = table.slot_LE.clone()
        slot_LE[moe_layer_idx, expert] = take_slot(table, moe_layer_idx, expert)
        table.slot_LE.copy_(slot_LE)
        return int(slot_LE[moe_layer_idx, expert])

    monkeypatch.setattr(reference, "_take_slot", forgetting)
    assert is_wrong(tiny_checkpoint, "30%")


def test_what_a_step_uses_stays_until_its_layer_is_done(tiny_checkpoint, monkeypatch):
    assert not is_wrong(tiny_checkpoint, "5%")
    take_slot = reference._take_slot

    def as_if_unused(table: DeviceTable, moe_layer_idx: int, expert: int) -> int:
        uses_E, table.uses_E = table.uses_E, torch.zeros_like(table.uses_E)
        slot = take_slot(table, moe_layer_idx, expert)
        table.uses_E = uses_E
        return slot

    monkeypatch.setattr(reference, "_take_slot", as_if_unused)
    assert is_wrong(tiny_checkpoint, "5%")


def test_a_slot_is_filled_before_it_is_read(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(reference, "fill", lambda table, num_pairs: None)
    assert is_wrong(tiny_checkpoint, "30%")


# What fails


class Interruption:
    """Stops the n-th call of a function, before it does anything or when it has done all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Any) -> None:
        self.remaining, self.is_late = -1, False
        function = getattr(owner, name)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            self.remaining -= 1
            if self.remaining == 0 and not self.is_late:
                raise error
            out = function(*args, **kwargs)
            if self.remaining == 0:
                raise error
            return out

        monkeypatch.setattr(owner, name, interrupted)


PLACES = [
    (reference, "resolve"), (reference, "fill"),
    (of_experts, "compute_pairs"), (of_experts, "sum_pairs"),
    (reference, "_take_slot"), (DeviceTable, "begin_step"),
    (DeviceTable, "end_step"), (DeviceTable, "wait"), (DeviceTable, "read_report"),
    (DeviceTable, "upload_residency"), (DeviceTable, "upload_scores"),
    (ReportPoller, "_read_new"), (ReportPoller, "_enter"), (ReportPoller, "_count"),
    (Lru, "scores"), (reports, "apply_load"), (reports, "leaving_scores"),
    (ResidencyTable, "note_use"), (Bookkeeping, "note_begin"),
    (reports, "note_layer"), (DeviceSteps, "reset"),
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "cache",
    [pytest.param({}, id="dynamic", marks=pytest.mark.slow), pytest.param(STATIC, id="static")],
)
@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_ctrl_c_anywhere_leaves_the_model_usable(
    tiny_checkpoint, expected, monkeypatch, owner, name, cache
):
    stop = Interruption(monkeypatch, owner, name, KeyboardInterrupt())
    of_this_cache = tokens_of_the_host(tiny_checkpoint, **cache)
    with on_device(tiny_checkpoint, TIGHT, policy="lru") as moe:
        num_stopped = 0
        for n in (1, 4):
            stop.remaining, stop.is_late = n, n % 2 == 0
            try:
                greedy(moe, **cache)
            except KeyboardInterrupt:
                num_stopped += 1
            stop.remaining = -1
            assert torch.equal(greedy(moe, **cache), of_this_cache[0])
            moe.check_invariants()
        assert num_stopped > 0
        assert_same_tokens(moe, expected)


def test_ctrl_c_after_a_graph_was_launched_leaves_nothing_where_it_wrote(
    tiny_checkpoint, monkeypatch
):
    """The step before has reports that were not applied."""
    expected = tokens_without_graph(tiny_checkpoint)
    graphs = record_graphs(monkeypatch)
    stop = Interruption(monkeypatch, DeviceTable, "end_step", KeyboardInterrupt())
    with on_device(tiny_checkpoint, "30%", policy="lru") as moe:
        for n in range(4, 14):
            stop.remaining = n
            with pytest.raises(KeyboardInterrupt):
                greedy(moe)
            moe.check_invariants()
            assert_same_tokens(moe, expected, rounds=1)
    assert graphs


@pytest.mark.parametrize("cache", CACHES)
def test_a_step_that_began_and_never_ran_is_forgotten(
    tiny_checkpoint, expected, monkeypatch, cache
):
    stop = Interruption(monkeypatch, GraphedStep, "__call__", KeyboardInterrupt())
    with on_device(tiny_checkpoint, TIGHT, policy="lru") as moe:
        stop.remaining = 3  # the second after the prompt
        with pytest.raises(KeyboardInterrupt):
            greedy(moe, **cache)
        assert_same_tokens(moe, expected)


@torch.no_grad()
def test_prompts_between_steps_that_nobody_settles(tiny_checkpoint):
    """As a caller has it who has no generate()."""

    def logits(moe: MoE) -> list[torch.Tensor]:
        found = []
        for n in range(6):
            out = moe.model(input_ids=PROMPT[:, : 3 + n], use_cache=True)
            found.append(out.logits)
            for step in range(4):
                ids = torch.tensor([[11 * n + step]])
                found.append(moe.model(input_ids=ids, **{CACHE: out.past_key_values}).logits)
        return found

    with on_device(tiny_checkpoint, "100%") as moe:
        expected = logits(moe)
    with on_device(tiny_checkpoint, "30%", policy="lru") as moe:
        assert all(map(torch.equal, logits(moe), expected))
        moe.check_invariants()
        decode = moe.report().decode
        assert (decode.steps, decode.lookups) == (24, 24 * 3 * 2)


@torch.no_grad()
def test_a_layer_that_runs_twice_in_a_step_is_refused(tiny_checkpoint, expected):
    with on_device(tiny_checkpoint, "30%") as moe:
        layer = moe.model.model.layers[1].mlp
        forward = layer.forward
        layer.forward = lambda x: forward(x) + 0 * forward(x.flip(-1))
        experts_of(moe).graphed.note_state()  # as if the model were one like this
        with pytest.raises(UnsupportedModelError, match="MoE layer 1 ran twice in one step"):
            greedy(moe)
        del layer.forward
        experts_of(moe).graphed.note_state()
        assert_same_tokens(moe, expected)


@pytest.mark.parametrize("n", [1, 2])  # before a miss, and after one
def test_ctrl_c_while_the_last_step_is_taken_over(tiny_checkpoint, expected, monkeypatch, n):
    stop = Interruption(monkeypatch, reports, "apply_load", KeyboardInterrupt())
    with on_device(tiny_checkpoint, "60%", policy="lru") as moe:
        greedy(moe)
        stop.remaining = n
        with pytest.raises(KeyboardInterrupt):
            greedy(moe, LONG_PROMPT[:, :3], num_tokens=2)  # one step, applied at the end
        assert_same_tokens(moe, expected)


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_ctrl_c_between_a_step_and_its_frame_is_no_step_that_runs(
    tiny_checkpoint, expected, method
):
    """In contextlib's own code; its traceback is kept, as a notebook does."""
    num_left = 3

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal num_left
        code = frame.f_code
        if not code.co_filename.endswith("contextlib.py") or code.co_name != method:
            return None
        generator = getattr(frame.f_locals["self"], "gen", None)
        if getattr(generator, "__name__", "") != "running":
            return None
        if event == ("return" if method == "__enter__" else "line"):
            num_left -= 1
            if num_left == 0:
                raise KeyboardInterrupt
        return trace

    with on_device(tiny_checkpoint, TIGHT, policy="lru") as moe:
        greedy(moe, num_tokens=4)
        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt) as stopped:
                greedy(moe, num_tokens=8, **STATIC)
        finally:
            sys.settrace(None)
        assert torch.equal(greedy(moe), expected[0])
        assert torch.equal(greedy(moe, LONG_PROMPT), expected[1])
        del stopped


@pytest.mark.sample(9)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("owner", "name"),
    [(reference, "fill"), (DeviceTable, "read_report"), (DeviceTable, "wait"),
     (DeviceTable, "begin_step"), (DeviceTable, "upload_scores"), (Bookkeeping, "note_begin"),
     (ReportPoller, "finish_step"), (reports, "apply_load"), (DeviceSteps, "reset")],
)  # fmt: skip
def test_a_step_whose_token_was_given_counts_whatever_becomes_of_the_next(
    tiny_checkpoint, monkeypatch, cache, owner, name
):
    stop = Interruption(monkeypatch, owner, name, KeyboardInterrupt())
    num_given = 0

    def count(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal num_given
        num_given += kwargs["input_ids"].shape[1] == 1

    with on_device(tiny_checkpoint, "30%", policy="lru") as moe:
        moe.model.register_forward_hook(count, with_kwargs=True)
        moe.model(
            input_ids=torch.arange(100)[None]
        )  # HOST has them all, so each layer is resolved once
        for n in range(1, 21):
            num_given, lookups = 0, moe.report().decode.lookups
            stop.remaining, stop.is_late = n, n % 3 == 0
            with contextlib.suppress(KeyboardInterrupt):
                greedy(moe, **cache)
            stop.remaining = -1
            greedy(moe, num_tokens=1)
            assert 0 <= moe.report().decode.lookups - lookups - 6 * num_given <= 4, n


def test_a_closed_model_runs_no_step(tiny_checkpoint):
    with on_device(tiny_checkpoint, "30%") as moe:
        greedy(moe)
    with pytest.raises(Exception, match="was closed"):
        moe.model(PROMPT)
