"""The rules of the residency table, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from moe_infinity.cache.policies import Lru
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import OutOfSlots
from moe_infinity.experts import ExpertKey, Phase, Residency

DECODE = Phase.DECODE
A, B, C, D, E = (ExpertKey(0, expert_idx) for expert_idx in range(5))


@pytest.fixture
def policy() -> Lru:
    return Lru(num_layers=1, num_experts=5, num_slots=1)


@pytest.fixture
def table(policy: Lru) -> ResidencyTable:
    """Two slots."""
    return ResidencyTable(2, policy)


def load(table: ResidencyTable, *keys: ExpertKey) -> None:
    for key in keys:
        table.begin_load(key, DECODE)
        table.finish_load(key)
    table.check_invariants()


def use(policy: Lru, *keys: ExpertKey) -> None:
    for key in keys:
        policy.touch(key.moe_layer_idx, np.array([key.expert_idx]))


# States of an expert


def test_an_expert_is_absent_then_loading_then_resident(table):
    assert table.lookup(A) is None
    slot_id = table.begin_load(A, DECODE)
    assert table.lookup(A) is Residency.LOADING
    assert (table.loading_keys(), table.resident_keys()) == ([A], [])
    table.finish_load(A)
    assert table.lookup(A) is Residency.RESIDENT
    assert (table.loading_keys(), table.resident_keys()) == ([], [A])
    assert table.slot_of(A) == slot_id
    assert len(table) == 1


def test_a_census_counts_resident_loading_and_absent_apart(table):
    load(table, A)
    table.begin_load(B, DECODE)
    assert table.census([A, B, C, D, E]) == (1, 1, 3)


def test_slots_are_free_or_have_an_expert_that_is_resident_or_loading(table):
    load(table, A)
    table.begin_load(B, Phase.DECODE)
    assert (table.num_free, table.num_resident, table.num_loading) == (table.num_slots - 2, 1, 1)
    assert table.slots_of([B, A]) == [table.slot_of(B), table.slot_of(A)]


def test_only_a_load_that_began_can_finish_or_be_cancelled(table):
    load(table, A)
    for mistake in (lambda: table.begin_load(A, DECODE), lambda: table.finish_load(A)):
        with pytest.raises(AssertionError):
            mistake()
    with pytest.raises(KeyError):
        table.finish_load(B)
    table.check_invariants()


# Eviction


def test_no_expert_leaves_while_a_slot_is_free(table):
    load(table, A, B)
    assert table.evictions == 0
    assert set(table.resident_keys()) == {A, B}


def test_the_expert_with_the_lowest_score_leaves(table, policy):
    load(table, A, B)
    use(policy, B, A)
    load(table, C)
    assert table.lookup(B) is None
    assert set(table.resident_keys()) == {A, C}
    assert table.evictions == 1


def test_a_victim_hands_its_slot_to_the_newcomer(table, policy):
    load(table, A, B)
    use(policy, A, B)
    slot_of_a = table.slot_of(A)
    assert table.begin_load(C, DECODE) == slot_of_a


def test_a_held_expert_is_never_a_victim(table, policy):
    load(table, A, B)
    use(policy, A, B)  # A has the lowest score
    with table.holding([A], DECODE):
        load(table, C)
        assert table.lookup(A) is Residency.RESIDENT
        assert table.lookup(B) is None


def test_an_expert_held_twice_may_leave_only_after_both_let_go(table):
    load(table, A, B)
    with table.holding([A, B], DECODE):
        with table.holding([A], DECODE):
            pass
        with pytest.raises(OutOfSlots):
            table.begin_load(C, DECODE)
    load(table, C)


def test_a_loading_expert_is_never_a_victim(table):
    table.begin_load(A, DECODE)
    load(table, B)
    table.begin_load(C, DECODE)
    assert table.lookup(A) is Residency.LOADING
    assert table.lookup(B) is None


def test_reserving_a_slot_never_evicts_an_expert_of_the_same_layer(table, policy):
    load(table, A, B)
    use(policy, A, B)  # both slots are full; A would be the victim
    with table.holding([C, A], DECODE) as held:
        assert held.absent == [C]
        assert table.lookup(A) is Residency.RESIDENT
        assert table.lookup(B) is None
        assert held.slot_ids == {A: table.slot_of(A), C: table.slot_of(C)}
        table.finish_load(C)
    table.check_invariants()


# When nothing can leave


@pytest.mark.parametrize("is_loading", [True, False], ids=["loading", "held"])
def test_there_are_no_slots_when_all_are_held_or_loading(table, is_loading):
    with table.holding([A, B], DECODE):
        if not is_loading:
            table.finish_load(A)
            table.finish_load(B)
        for phase in Phase:
            with pytest.raises(OutOfSlots, match="all 2 slots are held or loading"):
                table.begin_load(C, phase)
            with pytest.raises(OutOfSlots, match="all 2 slots are held or loading"):
                table.next_wave([C, D], phase)
        table.check_invariants()


def test_a_holding_that_runs_out_of_slots_keeps_neither_holds_nor_slots(table):
    """Nobody will load what it had reserved: such a slot would be lost for good."""
    load(table, A)
    with pytest.raises(OutOfSlots), table.holding([A, B, C], DECODE):
        pass
    table.check_invariants()
    assert table.census([A, B, C]) == (1, 0, 2)
    load(table, D, E)  # A is held no more, and B's slot is free


def test_a_layer_that_fails_lets_go_of_what_it_held(table):
    load(table, A, B)
    with pytest.raises(RuntimeError, match="kernel"), table.holding([A, B], DECODE):
        raise RuntimeError("kernel")
    load(table, C, D)


# A load that fails


def test_a_cancelled_load_gives_its_slot_back(table):
    table.begin_load(A, DECODE)
    table.cancel_load(A)
    table.check_invariants()
    assert table.lookup(A) is None
    load(table, B, C)
    assert table.evictions == 0


def test_a_load_cancelled_while_held_harms_no_one(table):
    with table.holding([A], DECODE):
        table.cancel_load(A)
        table.check_invariants()
    table.check_invariants()
    assert len(table) == 0


def test_who_held_a_cancelled_load_does_not_keep_its_slot_from_others(table):
    """Once the slot counted as held by both, and could not be given away when one let go."""
    first = table.holding([A], DECODE)
    first.__enter__()
    table.cancel_load(A)
    load(table, B, C)  # both slots
    with table.holding([D, E], DECODE) as held:
        assert held.absent == [D, E]
    assert table.evictions == 2
    first.__exit__(None, None, None)


def test_who_held_a_cancelled_load_does_not_let_go_of_the_next_one(table):
    first = table.holding([A], DECODE)
    first.__enter__()
    table.cancel_load(A)
    with table.holding([A], DECODE):
        table.finish_load(A)
        first.__exit__(None, None, None)
        table.check_invariants()
        load(table, B)
        load(table, C)  # evicts B: A is held still
        assert table.lookup(A) is Residency.RESIDENT


def test_what_a_prompt_brought_belongs_to_decode_once_a_step_used_it(table):
    table.begin_load(A, Phase.PREFILL)
    table.finish_load(A)
    assert table.is_transient(A)
    table.note_use([A, B])  # B has left already
    assert not table.is_transient(A)
    assert table.lookup(B) is None
    table.check_invariants()


# check_invariants


def break_slot(table: ResidencyTable) -> None:
    table._free.append(table.slot_of(A))


def break_loading(table: ResidencyTable) -> None:
    table._loading.add(A)


def break_owner(table: ResidencyTable) -> None:
    table._expert_of_slot[table.slot_of(A)] = 7


def break_transient(table: ResidencyTable) -> None:
    table._transient[table.slot_of(A)] = True


def break_free_slot(table: ResidencyTable) -> None:
    table._layer_of_slot[table._free] = 0


DAMAGES = [
    break_slot,
    break_loading,
    break_owner,
    break_transient,
    break_free_slot,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_invariants_notices_damage(table, damage):
    load(table, A)
    damage(table)
    with pytest.raises(AssertionError):
        table.check_invariants()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_table_recovers_from_a_step_that_was_interrupted_anywhere(table, damage):
    load(table, A)
    table.begin_load(B, DECODE)
    slot_ids = [table.slot_of(A), table.slot_of(B)]
    damage(table)
    table.recover()
    table.check_invariants()
    assert (table.resident_keys(), table.loading_keys()) == ([A], [B])
    assert [table.slot_of(A), table.slot_of(B)] == slot_ids
    table.cancel_load(B)
    load(table, C, D)  # every slot can be given away again
    assert set(table.resident_keys()) == {C, D}


def test_a_table_has_at_least_one_slot(policy):
    with pytest.raises(AssertionError):
        ResidencyTable(0, policy)
