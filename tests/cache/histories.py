"""Histories of uses for tests of policies, and what must hold of every policy after any of them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Phase, Step

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 5, 4, 7
KEYS = [ExpertKey(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]


class Use(NamedTuple):
    """A step and one touch in it."""

    moe_layer_idx: int
    tokens: dict[int, int]  # by expert activated
    phase: Phase = DECODE
    begins_request: bool = False


History = list[Use]

histories = st.lists(
    st.builds(
        Use,
        st.integers(0, NUM_LAYERS - 1),
        st.dictionaries(st.integers(0, NUM_EXPERTS - 1), st.integers(1, 3), min_size=1),
        st.sampled_from(Phase),
        st.booleans(),
    ),
    max_size=20,
)
few_examples = settings(max_examples=60)


def step(phase: Phase = DECODE, *, begins: bool = False) -> Step:
    return Step(phase, 1, 1, begins_B=np.array([begins]))


def replay(policy: EvictionPolicy, history: History) -> None:
    for moe_layer_idx, tokens, phase, begins_request in history:
        policy.begin_step(step(phase, begins=begins_request))
        policy.touch(moe_layer_idx, np.array(list(tokens)), np.array(list(tokens.values())))


def order(policy: EvictionPolicy, moe_layer_idx: int) -> list[int]:
    """The experts of a layer, the first to leave first."""
    return policy.scores()[moe_layer_idx].argsort().tolist()


# What each policy means, in terms of the whole history


def last_use(history: History, key: ExpertKey) -> int:
    """Position in the history, -1 for never."""
    times = [time for time, use in enumerate(history) if is_use(use, key)]
    return max(times, default=-1)


def is_use(use: Use, key: ExpertKey) -> bool:
    return use.moe_layer_idx == key.moe_layer_idx and key.expert_idx in use.tokens


def num_uses(history: History, key: ExpertKey) -> int:
    return sum(is_use(use, key) for use in history)


def uses_in_request_then_recency(history: History, key: ExpertKey) -> tuple[int, int]:
    begins = [time for time, use in enumerate(history) if use.begins_request]
    running = history[max(begins, default=0) :]
    return num_uses([use for use in running if use.phase is DECODE], key), last_use(history, key)


Naive = Callable[[History, ExpertKey], Any]  # the higher, the longer the expert stays


def assert_orders_every_pair_as(naive_of: Naive, policy: EvictionPolicy, history: History) -> None:
    replay(policy, history)
    scores = policy.scores()
    assert scores.shape == (NUM_LAYERS, NUM_EXPERTS)
    naive = {key: naive_of(history, key) for key in KEYS}
    for a, b in combinations(KEYS, 2):
        wanted = (naive[a] > naive[b]) - (naive[a] < naive[b])
        assert np.sign(scores[a] - scores[b]) == wanted, (a, b)


def assert_chooses_a_victim_of(
    naive_of: Naive, policy: EvictionPolicy, history: History, newcomer: ExpertKey
) -> None:
    residents = [key for key in KEYS if key != newcomer]
    table = ResidencyTable(len(residents), policy)
    for key in residents:
        table.begin_load(key, DECODE)
        table.finish_load(key)
    replay(policy, history)
    table.begin_load(newcomer, DECODE)
    (victim,) = set(residents) - set(table.resident_keys())
    assert naive_of(history, victim) == min(naive_of(history, key) for key in residents)


def assert_loops_over_no_experts(policy: EvictionPolicy) -> None:
    """Touches and scores are on the way of every token; building may take its time."""
    source = ast.parse(textwrap.dedent(inspect.getsource(type(policy))))
    methods = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    for method in methods:
        if method.name != "__init__":
            loops = ast.For | ast.While | ast.comprehension
            assert not any(isinstance(node, loops) for node in ast.walk(method)), method.name


def assert_shares_nothing(first: EvictionPolicy, second: EvictionPolicy) -> None:
    untouched = second.scores().copy()
    replay(first, [Use(0, {0: 1}), Use(0, {1: 2}, PREFILL, True), Use(1, {2: 1})])
    assert (second.scores() == untouched).all()
