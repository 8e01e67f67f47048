"""The residency table against a plain model of it: a dict of entries, driven by random calls.

The model never looks inside the table. Scores are all different, so it knows every victim exactly.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_infinity.cache.policies import EvictionPolicy, Experts, Scores
from moe_infinity.cache.residency import PREFILL_QUOTA_DIVISOR, Held, ResidencyTable
from moe_infinity.errors import OutOfSlots
from moe_infinity.experts import ExpertKey, Ints, Phase, Residency, Step

NUM_LAYERS, NUM_EXPERTS = 2, 4  # few, so that random calls meet the same expert often
KEYS = [ExpertKey(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]

phases = st.sampled_from(Phase)
key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)
rankings = st.permutations(range(len(KEYS)))


class Ranked(EvictionPolicy):
    """A policy whose scores are a ranking that the machine draws."""

    def __init__(self) -> None:
        self.ranking = np.arange(len(KEYS), dtype=np.float64).reshape(NUM_LAYERS, NUM_EXPERTS)

    def begin_step(self, step: Step) -> None:
        raise AssertionError("the table does not tell the policy what happens; the runtime does")

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        raise AssertionError("the table does not tell the policy what is used; the runtime does")

    def scores(self) -> Scores:
        return self.ranking


@dataclass(eq=False)
class Known:
    """What the model knows of one expert that has a slot."""

    slot_id: int
    is_loading: bool
    is_transient: bool
    holds: int = 0


@dataclass(eq=False)
class Holder:
    """An open `holding`, with what it held, by identity: a later load of the same key is another
    entry.
    """

    context: AbstractContextManager[Held]
    entries: list[Known] = field(default_factory=list)


class ResidencyMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 6), ranking=rankings)
    def start(self, num_slots: int, ranking: list[int]) -> None:
        self.policy = Ranked()
        self.num_slots = num_slots
        self.num_withdrawn = 0
        self.filled: set[int] = set()  # slots that have had an expert
        self.table = ResidencyTable(num_slots, self.policy)
        self.model: dict[ExpertKey, Known] = {}
        self.holders: list[Holder] = []
        self.evictions = 0
        self.rank(ranking)

    # The model: what the docstrings of the table promise, written the slow way.

    def score(self, key: ExpertKey) -> float:
        return float(self.policy.ranking[key])

    def evictable(self) -> list[ExpertKey]:
        return [key for key, e in self.model.items() if not e.is_loading and e.holds == 0]

    def num_free(self) -> int:
        return self.num_slots - self.num_withdrawn - len(self.model)

    def loading(self) -> list[ExpertKey]:
        return [key for key, entry in self.model.items() if entry.is_loading]

    def model_begin_load(self, key: ExpertKey, phase: Phase) -> Known:
        """Evict the lowest-scored, transient ones first, if no slot is free. The slot is unknown
        yet.
        """
        if self.num_free() == 0:
            transient = [key for key in self.evictable() if self.model[key].is_transient]
            del self.model[min(transient or self.evictable(), key=self.score)]
            self.evictions += 1
        self.model[key] = Known(-1, is_loading=True, is_transient=phase is Phase.PREFILL)
        return self.model[key]

    def hold(self, keys: list[ExpertKey], phase: Phase) -> None:
        """Enter `holding` with keys that fit, in the table and in the model."""
        holder = Holder(self.table.holding(keys, phase))
        held = holder.context.__enter__()
        absent = [key for key in keys if key not in self.model]
        for key in sorted(keys, key=absent.__contains__):  # stable: present ones first
            is_absent = key in absent
            entry = self.model_begin_load(key, phase) if is_absent else self.model[key]
            entry.slot_id = held.slot_ids[key] if is_absent else entry.slot_id
            entry.holds += 1
            entry.is_transient = entry.is_transient and phase is Phase.PREFILL
            holder.entries.append(entry)
        assert held.absent == absent
        assert held.slot_ids == {key: self.model[key].slot_id for key in keys}
        self.holders.append(holder)

    def let_go(self, holder: Holder) -> None:
        holder.context.__exit__(None, None, None)
        for entry in holder.entries:
            entry.holds -= 1

    # What can happen to a table.

    @rule(ranking=rankings)
    def rank(self, ranking: list[int]) -> None:
        self.policy.ranking = np.array(ranking, dtype=np.float64).reshape(NUM_LAYERS, NUM_EXPERTS)

    @rule(count=st.integers(1, 6))
    def withdraw(self, count: int) -> None:
        given = self.table.withdraw(count)
        count = min(count, self.num_free() + len(self.evictable()))
        assert len(given) == count
        while self.num_free() < count:
            transient = [key for key in self.evictable() if self.model[key].is_transient]
            del self.model[min(transient or self.evictable(), key=self.score)]
            self.evictions += 1
        self.num_withdrawn += count
        self.filled -= {*given}
        assert not {entry.slot_id for entry in self.model.values()} & {*given}

    @rule(count=st.integers(1, 6))
    def restore(self, count: int) -> None:
        self.table.restore(count)
        self.num_withdrawn = max(self.num_withdrawn - count, 0)

    @rule(key=st.sampled_from(KEYS), phase=phases)
    def begin_load(self, key: ExpertKey, phase: Phase) -> None:
        if key in self.model:
            return
        if self.num_free() == 0 and not self.evictable():
            with pytest.raises(OutOfSlots):
                self.table.begin_load(key, phase)
            return
        slot_id = self.table.begin_load(key, phase)
        self.model_begin_load(key, phase).slot_id = slot_id

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def finish_load(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.loading()))
        self.table.finish_load(key)
        self.filled.add(self.model[key].slot_id)
        self.model[key].is_loading = False

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def cancel_load(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.loading()))
        self.table.cancel_load(key)
        del self.model[key]

    @rule(keys=key_lists, phase=phases)
    def hold_what_fits(self, keys: list[ExpertKey], phase: Phase) -> None:
        num_absent = len([key for key in keys if key not in self.model])
        room = self.num_free() + len([key for key in self.evictable() if key not in keys])
        if num_absent <= room:
            self.hold(keys, phase)

    @rule(waiting=key_lists, phase=phases)
    def hold_next_wave(self, waiting: list[ExpertKey], phase: Phase) -> None:
        present = [key for key in waiting if key in self.model]
        absent = [key for key in waiting if key not in self.model]
        spare = [key for key in self.evictable() if key not in present]
        room = self.num_free() + len(spare)
        if not present and room == 0:
            with pytest.raises(OutOfSlots):
                self.table.next_wave(waiting, phase)
            return
        wave = self.table.next_wave(waiting, phase)
        num_loads = len(wave) - len(present)
        assert wave == present + absent[:num_loads], "all present ones first"
        if phase is Phase.DECODE:
            assert num_loads == min(len(absent), room), "as many as there is room for"
        else:
            quota = max(1, self.table.num_slots // PREFILL_QUOTA_DIVISOR)
            streamed = self.num_free() + len([key for key in spare if self.model[key].is_transient])
            assert num_loads <= streamed + quota, "at most the quota from the decode set"
            assert num_loads >= min(len(absent), streamed), "what is free or transient is used"
        assert wave, "a wave makes progress"
        self.hold(wave, phase)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.let_go(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def come_to_rest(self) -> None:
        """As between two layers: all loads end and all let go."""
        while self.holders:
            self.let_go(self.holders.pop())
        for key in self.loading():
            self.table.finish_load(key)
            self.filled.add(self.model[key].slot_id)
            self.model[key].is_loading = False

    # What always holds.

    @invariant()
    def table_is_consistent(self) -> None:
        self.table.check_invariants()

    @invariant()
    def table_says_what_the_model_says(self) -> None:
        for key in KEYS:
            entry = self.model.get(key)
            loading_or_resident = (Residency.RESIDENT, Residency.LOADING)
            expected = loading_or_resident[entry.is_loading] if entry is not None else None
            assert self.table.lookup(key) is expected, key
        resident = {key for key, entry in self.model.items() if not entry.is_loading}
        assert set(self.table.resident_keys()) == resident
        assert set(self.table.loading_keys()) == set(self.loading())
        num_loading = len(self.loading())
        num_absent = len(KEYS) - len(self.model)
        assert self.table.census(KEYS) == (len(resident), num_loading, num_absent)
        assert self.table.evictions == self.evictions
        assert self.table.num_slots == self.num_slots - self.num_withdrawn
        assert self.table.num_unfilled == self.table.num_slots - len(self.filled)
        assert len(self.table) == len(self.model) <= self.table.num_slots

    @invariant()
    def every_expert_stays_in_the_slot_it_was_given_and_shares_it_with_none(self) -> None:
        slot_ids = [entry.slot_id for entry in self.model.values()]
        assert [self.table.slot_of(key) for key in self.model] == slot_ids
        assert len(set(slot_ids)) == len(slot_ids)
        assert all(0 <= slot_id < self.num_slots for slot_id in slot_ids)

    def teardown(self) -> None:
        """Nothing is lost: when all let go and all loads end, every slot can be given away."""
        self.come_to_rest()
        self.table.check_invariants()
        self.table.restore(self.num_slots)
        absent = [ExpertKey(NUM_LAYERS, expert_idx) for expert_idx in range(self.num_slots)]
        assert self.table.next_wave(absent, Phase.DECODE) == absent


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
