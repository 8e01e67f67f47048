"""A profile's parts add up, and time that is spent somewhere shows there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.tools import profiling as tools_profiling
from moe_infinity.tools.profiling import (
    ATTENTION,
    BETWEEN,
    DENSE,
    EXPERTS,
    WAITING,
    profiling,
)

SLOW_S = 0.01
NUM_TOKENS = 5  # of which the prompt's step gives the first


def slowed(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_S)
        return function(*args, **kwargs)

    return run


def profile_of(moe: MoE) -> Any:
    with profiling(moe) as profile:
        started = time.perf_counter()
        moe.generate(torch.arange(5, 15)[None], max_new_tokens=NUM_TOKENS, do_sample=False)
        took_s = time.perf_counter() - started
    assert 0 < profile.total_s < took_s
    assert min(profile.seconds.values()) >= 0
    assert profile.num_steps == NUM_TOKENS - 1
    return profile


@pytest.fixture
def moe(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="50%", policy="lru") as moe:
        yield moe


class Clock:
    """Takes the place of the module `time` in a profile: it moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def moved_by(self, function: Any) -> Any:
        """The function, but each call takes SLOW_S."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.now += SLOW_S
            return function(*args, **kwargs)

        return run


def test_time_shows_where_it_was_spent(moe, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tools_profiling, "time", clock)
    num_layers = len(moe.engine.bookkeeping.activated)
    least_s = (NUM_TOKENS - 1) * num_layers * SLOW_S
    attention = type(moe.model.model.layers[0].self_attn)
    for owner, name, part in (
        (LayerComputer, "compute", EXPERTS),
        (attention, "forward", ATTENTION),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, clock.moved_by(getattr(owner, name)))
            with profiling(moe) as profile:
                moe.generate(torch.arange(5, 15)[None], max_new_tokens=NUM_TOKENS, do_sample=False)
        assert profile.seconds[part] >= least_s * (1 - 1e-9)
        others = {EXPERTS, ATTENTION, DENSE, BETWEEN} - {part}
        assert [profile.seconds[other] for other in others] == [0.0] * 3


def test_time_of_reads_is_waiting(moe, monkeypatch):
    monkeypatch.setattr(Reader, "read", slowed(Reader.read))
    misses_before = moe.report().decode.misses
    seconds = profile_of(moe).seconds
    assert moe.report().decode.misses > misses_before
    assert seconds[WAITING] >= SLOW_S


def test_a_model_is_left_as_it_was(moe):
    forwards = [vars(module).get("forward") for module in moe.model.modules()]
    hooks = len(moe.model._forward_hooks), len(moe.model._forward_pre_hooks)
    with pytest.raises(RuntimeError, match="on purpose"), profiling(moe) as profile:
        raise RuntimeError("on purpose")
    assert str(profile) == "profile: no decode steps"
    assert forwards == [vars(module).get("forward") for module in moe.model.modules()]
    assert hooks == (len(moe.model._forward_hooks), len(moe.model._forward_pre_hooks))
    assert "moe_layer" not in vars(moe.engine)


def test_the_command_prints_it(tiny_checkpoint, command):
    arguments = ["run", str(tiny_checkpoint), "-p", "a b", "--max-new-tokens", "4"]
    done = command(*arguments, "--profile")
    assert done.code == 0
    assert done.said("profile of")
    assert done.said(ATTENTION)
    assert not command(*arguments).said("profile of")
