"""Counters, slots and clock of a replay add up, for any trace and policy."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.cache.policies import ACTIVATION_AWARE
from moe_infinity.experts import Phase, distinct
from moe_infinity.predict.tracefile import SequenceTrace
from moe_infinity.tools.simulator.baselines import SIMULATED_POLICIES
from moe_infinity.tools.simulator.replay import Cell, Hardware, Setup, replay
from moe_infinity.tools.simulator.schedule import interleave, steps_of
from tests.tools.simulator.traces import lengths, one_after_the_other, sequence

LAYERS, EXPERTS, K = 3, 6, 2
LOAD_S, LAYER_S = 0.5, 2.0
HARDWARE = Hardware(bytes_per_s=100.0, expert_bytes=50, layer_s=LAYER_S)
EVERY = (*SIMULATED_POLICIES, "belady", "clairvoyant")
SOME = (ACTIVATION_AWARE, "lru", "clairvoyant", ACTIVATION_AWARE)


def setup(policy: str, num_slots: int = 7, *, prefetch: bool = False) -> Setup:
    return Setup(policy=policy, num_slots=num_slots, prefetch=prefetch, hardware=HARDWARE)


def run(sequences: list[SequenceTrace], *setups: Setup, warmup: int = 0) -> list[Cell]:
    cells = replay(
        steps_of(sequences), setups, num_layers=LAYERS, num_experts=EXPERTS, warmup=warmup
    )
    for cell in cells:
        cell.table.check_invariants()
    return cells


def lookups_of(cell: Cell) -> list[tuple[int, int, int]]:
    both = [cell.counters.of(phase) for phase in Phase]
    return [(c.hits, c.late_hits, c.misses) for c in both]


def state_of(cell: Cell) -> object:
    stalls = [cell.counters.of(phase).stall_s for phase in Phase]
    resident = sorted(cell.table.resident_keys())
    return lookups_of(cell), stalls, cell.table.evictions, cell.table.prefetches, resident


# Any trace


@settings(max_examples=15)
@given(requests=lengths(max_requests=4), num_users=st.integers(1, 3), prefetch=st.booleans())
def test_every_activated_expert_of_every_layer_and_step_is_looked_up_once(
    requests, num_users, prefetch
):
    sequences = interleave(one_after_the_other(requests), num_users)
    wanted = dict.fromkeys(Phase, 0)
    for step_idx in np.unique(np.concatenate([s.steps_T for s in sequences])):
        mine = [(s, s.steps_T == step_idx) for s in sequences]
        experts_TLK = np.concatenate([s.experts_TLK[which] for s, which in mine])
        is_prefill = np.concatenate([s.is_prefill_T[which] for s, which in mine]).any()
        phase = Phase.PREFILL if is_prefill else Phase.DECODE
        wanted[phase] += sum(len(np.unique(experts_TLK[:, layer])) for layer in range(LAYERS))
    for cell in run(sequences, *(setup(name, prefetch=prefetch) for name in EVERY)):
        assert {phase: cell.counters.of(phase).lookups for phase in Phase} == wanted


@settings(max_examples=15)
@given(
    requests=lengths(max_requests=4),
    num_slots=st.integers(1, LAYERS * EXPERTS),
    prefetch=st.booleans(),
    num_users=st.integers(1, 2),
)
def test_no_slot_stays_empty_once_more_was_loaded_than_fits(
    requests, num_slots, prefetch, num_users
):
    sequences = interleave(one_after_the_other(requests), num_users)
    used = {
        (layer, expert)
        for s in sequences
        for layer in range(LAYERS)
        for expert in np.unique(s.experts_TLK[:, layer]).tolist()
    }
    setups = [setup(name, num_slots, prefetch=prefetch) for name in EVERY]
    for cell in run(sequences, *setups):
        assert len(cell.table) >= min(num_slots, len(used))
        assert len(cell.table) <= num_slots
        if not prefetch:
            assert len(cell.table) == min(num_slots, len(used))


@settings(max_examples=15)
@given(requests=lengths(max_requests=4), num_slots=st.integers(2, 12))
def test_without_prefetch_the_stall_is_the_load_time_of_all_misses(requests, num_slots):
    for cell in run(one_after_the_other(requests), *(setup(name, num_slots) for name in EVERY)):
        misses = 0
        for phase in Phase:
            counters = cell.counters.of(phase)
            assert counters.stall_s == pytest.approx(counters.misses * LOAD_S)
            assert counters.late_hits == 0
            misses += counters.misses
        assert cell.table.evictions == misses - len(cell.table)
        assert cell.table.prefetches.begun == 0


@settings(max_examples=15)
@given(
    requests=lengths(max_prompt=0, max_decoded=8, max_requests=4),
    num_slots=st.integers(K, LAYERS * EXPERTS),
)
def test_no_policy_has_more_hits_than_belady(requests, num_slots):
    cells = run(one_after_the_other(requests), *(setup(name, num_slots) for name in EVERY))
    hits = {cell.setup.policy: cell.counters.decode.hits for cell in cells}
    assert max(hits.values()) == hits["belady"]


@settings(max_examples=20)
@given(
    requests=lengths(max_decoded=10),
    num_slots=st.integers(2, LAYERS * EXPERTS - 1),
    num_users=st.integers(1, 2),
    layer_s=st.sampled_from([0.1, 0.5, 5.0]),
)
def test_every_prefetch_is_useful_or_late_or_wasted_or_still_unused(
    requests, num_slots, num_users, layer_s
):
    sequences = interleave(one_after_the_other(requests), num_users)
    hardware = Hardware(bytes_per_s=100.0, expert_bytes=50, layer_s=layer_s)
    setups = [
        Setup(policy=name, num_slots=num_slots, prefetch=True, hardware=hardware)
        for name in (ACTIVATION_AWARE, "moe-infinity-v3", "clairvoyant")
    ]
    for cell in run(sequences, *setups):
        verdicts = cell.table.prefetches
        unused = sum(entry.is_ahead for entry in cell.table._entries.values())
        assert verdicts.begun == verdicts.useful + verdicts.late + verdicts.wasted + unused
        assert (cell.link.queued_s > 0) == (cell.table.num_loading > 0)


@settings(max_examples=4)
@given(
    requests=lengths(max_decoded=8, max_requests=2),
    num_users=st.integers(1, 2),
    prefetch=st.booleans(),
)
def test_a_setup_gives_the_same_alone_and_beside_others(requests, num_users, prefetch):
    """Cells share a predictor, and what it is asked for one is not to be seen by another. But it
    learns from each look ahead: of several cells that prefetch by it, each would learn of more.
    """
    sequences = interleave(one_after_the_other(requests), num_users)
    setups = [
        setup(name, num_slots, prefetch=prefetch and number in (0, 2))
        for number, (name, num_slots) in enumerate((n, s) for s in (8, 13) for n in SOME)
    ]
    for one, cell in zip(setups, run(sequences, *setups), strict=True):
        [alone] = run(sequences, one)
        assert state_of(cell) == state_of(alone)


@pytest.mark.parametrize("num_users", [1, 2])
@pytest.mark.parametrize("name", SIMULATED_POLICIES)
def test_what_the_first_requests_did_is_replayed_and_not_counted(name, num_users):
    sequences = interleave(one_after_the_other([(3, 4), (2, 5), (3, 3), (1, 6)]), num_users)
    begins = int(sequences[2].steps_T[0])
    before = [cut(s, begins) for s in sequences if s.steps_T[0] < begins]
    [first], [whole], [counted] = (
        run(before, setup(name)),
        run(sequences, setup(name)),
        run(sequences, setup(name), warmup=2),
    )
    for phase in Phase:
        a, b, c = (cell.counters.of(phase) for cell in (first, whole, counted))
        for field in ("hits", "misses", "steps", "tokens"):
            assert getattr(c, field) == getattr(b, field) - getattr(a, field), (phase, field)
        assert c.stall_s == pytest.approx(b.stall_s - a.stall_s)
    assert counted.table.evictions == whole.table.evictions - first.table.evictions


def cut(s: SequenceTrace, step: int) -> SequenceTrace:
    """What came before that step."""
    which = s.steps_T < step
    return SequenceTrace(
        s.experts_TLK[which], s.token_ids_T[which], s.is_prefill_T[which], s.steps_T[which]
    )


def test_prefetches_of_the_warm_up_are_not_counted():
    sequences = one_after_the_other([(0, 30), (0, 1)])
    [cell] = run(sequences, setup("clairvoyant", prefetch=True), warmup=1)
    [whole] = run(sequences, setup("clairvoyant", prefetch=True))
    assert whole.table.prefetches.begun > 20
    assert cell.table.prefetches.begun <= 3 * 4


# By hand


def test_lru_has_the_hits_of_a_list_ordered_by_use():
    sequences = one_after_the_other([(0, 100)], top_k=1)  # two of one touch have no order
    [cell] = run(sequences, setup("lru", 9))
    order: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for experts_LK in sequences[0].experts_TLK:
        for layer, experts in enumerate(experts_LK.tolist()):
            hits += sum((layer, expert) in order for expert in experts)
            for expert in experts:
                order[layer, expert] = None
                order.move_to_end((layer, expert))
            while len(order) > 9:
                order.popitem(last=False)
    assert cell.counters.decode.hits == hits
    assert set(cell.table.resident_keys()) == set(order)


def rotating(num_tokens: int) -> list[SequenceTrace]:
    """Pairs of experts in turn, in all layers: nothing fits, everything can be known."""
    pairs = [[(2 * t) % EXPERTS, (2 * t + 1) % EXPERTS] for t in range(num_tokens)]
    return [sequence([[pair] * LAYERS for pair in pairs])]


def test_who_knows_what_comes_and_loads_ahead_waits_less_than_who_only_keeps_it():
    belady, clairvoyant = run(
        rotating(40), setup("belady", 8), setup("clairvoyant", 8, prefetch=True)
    )
    assert clairvoyant.counters.decode.stall_s < belady.counters.decode.stall_s / 4
    assert clairvoyant.table.prefetches.wasted == 0
    assert clairvoyant.counters.decode.hits > belady.counters.decode.hits


def test_who_has_learned_what_comes_loads_it_ahead():
    without, ahead = run(
        rotating(400), setup(ACTIVATION_AWARE, 8), setup(ACTIVATION_AWARE, 8, prefetch=True)
    )
    assert ahead.table.prefetches.useful > 200
    assert ahead.counters.decode.stall_s < without.counters.decode.stall_s / 2


def test_a_prefetch_still_under_way_is_a_late_hit_and_costs_the_rest_of_its_load():
    """A load takes five layers: begun in the step before, it arrives late."""
    hardware = Hardware(bytes_per_s=5.0, expert_bytes=50, layer_s=LAYER_S)
    slow = Setup(policy="clairvoyant", num_slots=8, prefetch=True, hardware=hardware)
    [cell] = run(rotating(40), slow)
    counters = cell.counters.decode
    assert counters.late_hits == cell.table.prefetches.late > 0
    assert counters.stall_s < (counters.misses + counters.late_hits) * hardware.load_s


@pytest.mark.parametrize("name", ["lru", "lfu", "belady", "neighbor"])
def test_a_policy_that_predicts_nothing_loads_nothing_ahead(name):
    prefetch = name != "belady"
    one, other = run(rotating(20), setup(name), setup(name, prefetch=prefetch))
    assert state_of(one) == state_of(other)


def test_what_is_known_of_a_token_helps_only_where_it_is_not_left_out():
    """Ids tell the experts here, and nothing else does."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3, 400)
    experts = [[[2 * i, 2 * i + 1]] * LAYERS for i in ids.tolist()]
    trace, stalls = [sequence(experts, token_ids=ids.tolist())], []
    for without in ((), ("token", "layer")):
        [cell] = replay(
            steps_of(trace), [setup(ACTIVATION_AWARE, 8, prefetch=True)],
            num_layers=LAYERS, num_experts=EXPERTS, without=without,
        )  # fmt: skip
        stalls.append(cell.counters.decode.stall_s)
    assert stalls[0] < 0.9 * stalls[1]


@pytest.mark.parametrize("experts_TK", [[[3, 1]], [[3, 1], [1, 2]], [[5, 0], [0, 5], [5, 0]]])
def test_distinct_experts_are_ascending_and_counted_by_tokens(experts_TK):
    wanted = np.unique(np.array(experts_TK), return_counts=True)
    for got, expected in zip(distinct(np.array(experts_TK)), wanted, strict=True):
        assert got.tolist() == expected.tolist()
