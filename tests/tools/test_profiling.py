"""A profile's parts add up, and time that is spent somewhere shows there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.tools.profiling import (
    ATTENTION,
    BETWEEN,
    EXPERT_CACHE,
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


def test_time_shows_where_it_was_spent(moe, monkeypatch):
    num_layers = len(moe.engine.bookkeeping.activated)
    least_s = (NUM_TOKENS - 1) * num_layers * SLOW_S
    monkeypatch.setattr(LayerComputer, "compute", slowed(LayerComputer.compute))
    assert profile_of(moe).seconds[EXPERTS] >= least_s
    monkeypatch.undo()

    attention = type(moe.model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", slowed(attention.forward))
    assert profile_of(moe).seconds[ATTENTION] >= least_s
    monkeypatch.undo()

    monkeypatch.setattr(Reader, "read", slowed(Reader.read))
    misses_before = moe.report().decode.misses
    seconds = profile_of(moe).seconds
    assert moe.report().decode.misses > misses_before
    assert seconds[WAITING] >= SLOW_S
    assert seconds[EXPERT_CACHE] < seconds[WAITING]
    monkeypatch.undo()

    seconds = profile_of(moe).seconds
    assert max(seconds[EXPERTS], seconds[ATTENTION], seconds[BETWEEN]) < least_s


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
