"""Replays recorded routing through the tables, policies, predictors and planners of the engine;
only the mover and the clock are models. Loads share one link that carries one expert at a time, and
layers take a fixed time to compute. Demand loads go first; a prefetch under way waits for them and
goes on after.

Every policy and its predictor see the trace once, whatever the number of capacities: what they
learn depends on the routing alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moe_infinity.cache.counters import Counters, PrefetchCounters
from moe_infinity.cache.policies import ACTIVATION_AWARE, EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Ints, Phase, Step, distinct
from moe_infinity.predict.planner import Planner, PredictingPolicy
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder
from moe_infinity.tools.simulator.baselines import Belady, make_policy, next_uses
from moe_infinity.tools.simulator.schedule import RecordedStep

BELADY = "belady"
CLAIRVOYANT = "clairvoyant"  # Belady that also prefetches what it knows will be used
OMNISCIENT = (BELADY, CLAIRVOYANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The rates that a replay's times are made of."""

    bytes_per_s: float  # of the link
    expert_bytes: int
    layer_s: float  # from one layer's routing to the next one's, everything resident

    @property
    def load_s(self) -> float:
        """Seconds to load one expert."""
        return self.expert_bytes / self.bytes_per_s


class Link:
    """The link, and how far the prefetches on it are."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self._queue: dict[ExpertKey, float] = {}  # seconds left, in order

    @property
    def queued_s(self) -> float:
        """Time to finish what was begun."""
        return sum(self._queue.values())

    def begin(self, keys: Iterable[ExpertKey]) -> None:
        """Queue prefetches."""
        for key in keys:
            self._queue[key] = self._load_s

    def run(self, seconds: float) -> list[ExpertKey]:
        """Time passes without demand; gives the prefetches that arrived."""
        arrived = []
        for key, left in list(self._queue.items()):
            if left > seconds:
                self._queue[key] = left - seconds
                break
            seconds -= left
            del self._queue[key]
            arrived.append(key)
        return arrived

    def demand(self, num_absent: int, late: Iterable[ExpertKey]) -> float:
        """Seconds until so many demand loads and these prefetches, already begun, are there."""
        return num_absent * self._load_s + sum(self._queue.pop(key) for key in late)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One thing to find out: this policy with this many slots, on this hardware."""

    policy: str
    num_slots: int
    prefetch: bool
    hardware: Hardware


class Cell:
    """One setup while it is replayed: its table, policy, planner, link and counters."""

    def __init__(self, setup: Setup, policy: EvictionPolicy, keys: list[list[ExpertKey]]) -> None:
        self.setup = setup
        self.policy = policy
        self.table = ResidencyTable(setup.num_slots, policy)
        self.counters = Counters()
        self.link = Link(setup.hardware.load_s)
        self._keys = keys
        self._planner: Planner | None = None
        if setup.prefetch and isinstance(policy, PredictingPolicy):
            self._planner = Planner(self.table, policy)

    def forget_counts(self) -> None:
        """The warm-up is over: count from here."""
        self.counters = Counters()
        self.table.prefetches = PrefetchCounters()
        self.table.evictions = 0

    def begin_step(self, step: Step) -> None:
        """A forward pass begins; the policy knows."""
        self.table.begin_step(step.phase)
        counters = self.counters.of(step.phase)
        counters.steps += 1
        counters.tokens += step.num_counted
        if self._planner is not None and step.phase is Phase.DECODE:
            self._begin_prefetches(self._planner, -1)

    def run_layer(self, moe_layer_idx: int, activated: Ints, phase: Phase) -> None:
        """Do what the engine does with one MoE layer, on the modelled clock."""
        keys = self._keys[moe_layer_idx]
        waiting: Sequence[ExpertKey] = [keys[expert] for expert in activated.tolist()]
        counters = self.counters.of(phase)
        counters.add_lookups(*self.table.census(waiting))
        while waiting:
            wave = self.table.next_wave(waiting, phase)
            with self.table.holding(wave, phase) as held:
                late: list[ExpertKey] = []
                if self.table.num_loading > len(held.absent):
                    coming = set(self.table.loading_keys()).difference(held.absent)
                    late = [key for key in wave if key in coming]
                counters.stall_s += self.link.demand(len(held.absent), late)
                for key in (*held.absent, *late):
                    self.table.finish_load(key)
                if self._planner is not None and phase is Phase.DECODE:
                    self._begin_prefetches(self._planner, moe_layer_idx)
            waiting = [key for key in waiting if key not in held.slot_ids]
        for key in self.link.run(self.setup.hardware.layer_s):
            self.table.finish_load(key)

    def _begin_prefetches(self, planner: Planner, moe_layer_idx: int) -> None:
        hardware = self.setup.hardware
        planned = planner.plan(
            moe_layer_idx,
            load_s=hardware.load_s,
            layer_s=hardware.layer_s,
            queued_s=self.link.queued_s,
        )
        for key in planned:
            self.table.begin_prefetch(key)
        self.link.begin(planned)


class Machine:
    """The tables, policies and predictor of one machine, fed with recorded steps. Its cells see the
    same steps.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        predictor: Predictor | None,
        *,
        num_layers: int,
        num_experts: int,
    ) -> None:
        self.cells = cells
        self._predictor = predictor
        self._policies = list({id(cell.policy): cell.policy for cell in cells}.values())
        self._recorder = Recorder(num_layers, num_experts)

    def run(self, step: Step, experts_LTK: Ints) -> None:
        """One forward pass."""
        predictor = self._predictor
        if predictor is not None:
            predictor.begin_step(step, self._recorder.begin_step(step))
        for policy in self._policies:
            policy.begin_step(step)
        for cell in self.cells:
            cell.begin_step(step)
        for moe_layer_idx, top_k_index_TK in enumerate(experts_LTK):
            if predictor is not None:
                self._recorder.record(moe_layer_idx, top_k_index_TK)
                predictor.observe(moe_layer_idx, top_k_index_TK)
            activated, counts = distinct(top_k_index_TK)
            for policy in self._policies:
                policy.touch(moe_layer_idx, activated, counts)
            for cell in self.cells:
                cell.run_layer(moe_layer_idx, activated, step.phase)


def replay(
    steps: Iterable[RecordedStep],
    setups: Sequence[Setup],
    *,
    num_layers: int,
    num_experts: int,
    warmup: int = 0,
    without: Sequence[str] = (),
    on_step: Callable[[], None] = lambda: None,
) -> list[Cell]:
    """Run the steps through every setup; what the first `warmup` requests did is not counted."""
    if any(setup.policy in OMNISCIENT for setup in setups):
        steps = list(steps)  # others never look back, nor ahead
    predictor = None
    if any(setup.policy == ACTIVATION_AWARE for setup in setups):
        predictor = Predictor(num_layers, num_experts, without=without)
    policies = _policies(steps, setups, predictor, num_layers=num_layers, num_experts=num_experts)
    keys = keys_of(num_layers, num_experts)
    cells = [Cell(setup, policy, keys) for setup, policy in zip(setups, policies, strict=True)]
    machine = Machine(cells, predictor, num_layers=num_layers, num_experts=num_experts)
    is_counting = warmup == 0
    for recorded in steps:
        if not is_counting and recorded.num_begun > warmup:
            is_counting = True
            for cell in cells:
                cell.forget_counts()
        machine.run(recorded.step, recorded.experts_LTK)
        on_step()
    return cells


def keys_of(num_layers: int, num_experts: int) -> list[list[ExpertKey]]:
    """Return the keys of all experts by MoE layer."""
    return [
        [ExpertKey(moe_layer_idx, expert) for expert in range(num_experts)]
        for moe_layer_idx in range(num_layers)
    ]


def _policies(
    steps: Iterable[RecordedStep],
    setups: Sequence[Setup],
    predictor: Predictor | None,
    *,
    num_layers: int,
    num_experts: int,
) -> Iterator[EvictionPolicy]:
    """One for each setup. Capacities share it unless it depends on them or on a plan; the future is
    only looked up if someone knows it.
    """
    future: list[Ints] | None = None
    shared: dict[tuple[str, int | None], EvictionPolicy] = {}
    for setup in setups:
        is_own = setup.prefetch or setup.policy == "per-layer-lru"
        name = setup.policy, setup.num_slots if is_own else None
        if name not in shared and setup.policy in OMNISCIENT:
            if future is None:
                touches = [
                    (moe_layer_idx, distinct(top_k_index_TK)[0])
                    for recorded in steps
                    for moe_layer_idx, top_k_index_TK in enumerate(recorded.experts_LTK)
                ]
                future = next_uses(touches, num_layers=num_layers, num_experts=num_experts)
            shared[name] = Belady(future, num_layers=num_layers, num_experts=num_experts)
        elif name not in shared:
            shared[name] = make_policy(
                setup.policy,
                num_layers=num_layers,
                num_experts=num_experts,
                num_slots=setup.num_slots,
                chances=predictor,
            )
        yield shared[name]
