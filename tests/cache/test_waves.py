"""How a layer shares the slots with the rest: waves when they are few, a quota for prefill."""

from __future__ import annotations

import numpy as np
import pytest

from moe_infinity.cache.policies import Lru
from moe_infinity.cache.residency import PREFILL_QUOTA_DIVISOR, ResidencyTable
from moe_infinity.experts import ExpertKey, Phase, Residency

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NUM_LAYERS, NUM_EXPERTS = 4, 32
A, B, C, D, E = (ExpertKey(0, expert_idx) for expert_idx in range(5))


@pytest.fixture
def policy() -> Lru:
    return Lru(NUM_LAYERS, NUM_EXPERTS, num_slots=1)


@pytest.fixture
def table(policy: Lru) -> ResidencyTable:
    """Two slots."""
    return ResidencyTable(2, policy)


def load(table: ResidencyTable, *keys: ExpertKey, phase: Phase = DECODE) -> None:
    for key in keys:
        table.begin_load(key, phase)
        table.finish_load(key)
    table.check_invariants()


def use(policy: Lru, *keys: ExpertKey) -> None:
    for key in keys:
        policy.touch(key.moe_layer_idx, np.array([key.expert_idx]))


def run_layer(table: ResidencyTable, keys: list[ExpertKey], phase: Phase) -> list[int]:
    """What the runtime does with one layer; the number of experts in each wave."""
    waves, waiting = [], keys
    while waiting:
        wave = table.next_wave(waiting, phase)
        waves.append(len(wave))
        with table.holding(wave, phase) as held:
            table.check_invariants()
            for key in held.absent:
                table.finish_load(key)
        table.check_invariants()
        waiting = [key for key in waiting if key not in held.slot_ids]
    return waves


def decode_set(table: ResidencyTable) -> list[ExpertKey]:
    """Fill every slot with experts that decoding uses: layers 1, 2, ... in order."""
    keys = [
        ExpertKey(1 + slot // NUM_EXPERTS, slot % NUM_EXPERTS) for slot in range(table.num_slots)
    ]
    load(table, *keys)
    return keys


# A layer may activate more experts than there are slots


def test_a_wave_holds_all_present_experts_first(table):
    load(table, C, D)
    assert table.next_wave([A, B, C, D], DECODE) == [C, D]


def test_an_expert_on_its_way_counts_as_present(table):
    table.begin_load(D, DECODE)
    assert table.next_wave([A, B, C, D], DECODE) == [D, A]


def test_experts_that_are_all_present_are_one_wave(table):
    load(table, A, B)
    assert list(table.next_wave([B, A], PREFILL)) == [B, A]


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("num_slots", [1, 2, 3, 7])
def test_a_budget_smaller_than_one_layers_experts_works_in_waves(policy, num_slots, phase):
    table = ResidencyTable(num_slots, policy)
    keys = [ExpertKey(0, expert_idx) for expert_idx in range(8)]
    for _ in range(3):
        assert sum(run_layer(table, keys, phase)) == len(keys)
        assert len(table) == num_slots


def test_a_wave_takes_no_slot_that_someone_else_holds(table):
    load(table, A)
    with table.holding([A], DECODE):
        assert table.next_wave([B, C, D], DECODE) == [B]


# Prefill must not flush the decode set


def test_prefill_takes_at_most_the_ring_from_the_decode_set(policy):
    table = ResidencyTable(64, policy)
    decoding = decode_set(table)
    for moe_layer_idx in (0, 3):
        keys = [ExpertKey(moe_layer_idx, expert_idx) for expert_idx in range(NUM_EXPERTS)]
        run_layer(table, keys, PREFILL)
    kept = set(decoding) & set(table.resident_keys())
    assert len(decoding) - len(kept) == 64 // PREFILL_QUOTA_DIVISOR


def test_prompt_after_prompt_takes_no_more_than_the_ring(policy):
    """Its slots are reused, also when what the last prompt left in it is activated again."""
    table = ResidencyTable(64, policy)
    decoding = decode_set(table)
    keys = [ExpertKey(0, expert_idx) for expert_idx in range(NUM_EXPERTS)]
    for _ in range(6):
        run_layer(table, keys, PREFILL)
    kept = set(decoding) & set(table.resident_keys())
    assert len(decoding) - len(kept) <= 64 // PREFILL_QUOTA_DIVISOR


def test_prefill_makes_progress_with_fewer_slots_than_a_ring_needs(policy):
    table = ResidencyTable(3, policy)
    decoding = decode_set(table)
    assert run_layer(table, [A, B, C, D], PREFILL) == [1, 1, 1, 1]
    assert len(set(decoding) & set(table.resident_keys())) == 2


def test_prefill_uses_every_slot_nobody_decodes_with(policy):
    table = ResidencyTable(16, policy)
    load(table, E)
    waves = run_layer(table, [ExpertKey(2, expert_idx) for expert_idx in range(20)], PREFILL)
    assert waves[0] >= 15


def test_what_prefill_brought_in_leaves_first_whatever_its_score(table, policy):
    load(table, A)
    load(table, B, phase=PREFILL)
    use(policy, A, B)  # A has the lower score
    load(table, C)
    assert table.lookup(A) is Residency.RESIDENT
    assert table.lookup(B) is None


@pytest.mark.parametrize("is_loading", [True, False], ids=["loading", "resident"])
def test_a_decode_use_makes_a_transient_expert_permanent(table, policy, is_loading):
    table.begin_load(A, PREFILL)
    if not is_loading:
        table.finish_load(A)
    with table.holding([A], DECODE):
        if is_loading:
            table.finish_load(A)
    load(table, B, phase=PREFILL)
    use(policy, A, B)
    load(table, C)
    assert table.lookup(A) is Residency.RESIDENT
    assert table.lookup(B) is None


def test_a_prefill_use_does_not_make_an_expert_of_the_decode_set_transient(table, policy):
    load(table, A)
    with table.holding([A], PREFILL):
        pass
    load(table, B, phase=PREFILL)
    use(policy, A, B)
    load(table, C)
    assert table.lookup(A) is Residency.RESIDENT
