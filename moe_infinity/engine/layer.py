"""The work of one MoE layer in one step. This is the architecture:

    router (transformers, untouched) -> top_k_index, top_k_weights
    moe_layer   1 record    the routing, learn, predict           trace, prefetch
                2 look up   every activated expert, and hold it   cache.residency
                3 load      the absent ones                       memory.mover, device_mover
                4 plan      the layers ahead                      prefetch.planner
                5 compute   residents first, others on arrival    kernels
                6 release   the holds

If a layer activates more experts than there are slots, steps 2-6 run in waves. The sum over experts
has a fixed order, so the result depends neither on budget nor policy nor on which expert arrives
first. With a GPU and experts_implementation="fast" a step of few tokens is the device's: it does
2, 3 and 5 alone (cuda/device_steps.py), and 1 is done as it tells of its rows (`note_row`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Event

import numpy as np
from torch import Tensor

from moe_infinity.architectures.early_router import EarlyGate
from moe_infinity.cache.counters import Counters, PhaseCounters
from moe_infinity.cache.policies import ACTIVATION_AWARE, make_policy
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.config import OffloadConfig
from moe_infinity.cuda.device_steps import DeviceSteps
from moe_infinity.engine.compute import LayerComputer, Work
from moe_infinity.engine.routing import NO_EXPERT
from moe_infinity.errors import Cancelled, ClosedError
from moe_infinity.experts import ExpertKey, Ints, Phase
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.device_mover import DeviceMover
from moe_infinity.memory.tiers import make_tiers
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.prefetcher import Prefetcher
from moe_infinity.predict.recorder import Recorder, Step
from moe_infinity.predict.tracefile import SequenceTrace

STREAMED_SHARE = 0.75  # of a row's experts activated by a prompt: then it will need the next row's


class ExpertRuntime:
    """Owns the slots of one model and everything that decides about them. Used by one thread at a
    time.
    """

    def __init__(
        self,
        plan: Plan,
        reader: Reader,
        config: OffloadConfig,
        device_slots: DeviceSlots | None,  # None: experts compute on the CPU
    ) -> None:
        rows = self._rows = plan.layers
        num_experts = max(row.num_experts for row in rows)
        self.total_experts = sum(row.num_experts for row in rows)
        self.predictor: Predictor | None = None
        if config.policy == ACTIVATION_AWARE:
            self.predictor = Predictor(len(rows), num_experts, without=config.without)
        self._reader = reader
        self._recipes = plan.recipes
        self.tiers = make_tiers(
            config,
            device_slots,
            layer_slot_bytes=[recipes.layout.slot_bytes for recipes in plan.recipes],
            num_experts=self.total_experts,
            make_policy=partial(
                make_policy,
                config.policy,
                num_rows=len(rows),
                num_experts=num_experts,
                chances=self.predictor,
            ),
            fills=(self._read_expert, self._read_expert_ahead),
        )
        compute_tier = self.tiers[0]
        self.slots, self.table = compute_tier.slots, compute_tier.table
        self._mover, self._policies = compute_tier.mover, [tier.policy for tier in self.tiers]
        # Set by whoever has the model:
        self.early_gate: EarlyGate | None = None
        self.device_steps: DeviceSteps | None = None
        self.cancelled: Event | None = None  # of who waits for the text; a long prompt heeds it
        self.in_pass = False  # of the model; stays so if it was left, until the next one
        self.recorder = Recorder(len(rows), num_experts)
        self.counters = Counters()
        self.activated: list[list[int]] = [[] for _ in rows]  # by each row's last step
        self.exists_RE = np.array([[e < r.num_experts for e in range(num_experts)] for r in rows])
        self._keys = [[ExpertKey(i, e) for e in range(r.num_experts)] for i, r in enumerate(rows)]
        self._is_moving = False  # the table and the mover may disagree while this is set
        self._last_row = -1
        self._is_closed = False
        self._computers = [
            LayerComputer(row, recipes, self.slots, config.experts_implementation)
            for row, recipes in zip(rows, plan.recipes, strict=True)
        ]
        ways = sorted({computer.how for computer in self._computers})
        self.experts = f"{plan.packing or 'as stored'}, {' or '.join(ways)}"  # for the report
        self._bytes_per_expert = [recipes.bytes_per_expert() for recipes in plan.recipes]
        self._prefetcher: Prefetcher | None = None
        if config.prefetch:
            self._prefetcher = Prefetcher(
                self.table, compute_tier.policy, self._mover, self.exists_RE
            )

    @property
    def total_expert_bytes(self) -> int:
        """On disk; tied ones once."""
        sizes = zip(self._recipes, self._keys, self._bytes_per_expert, strict=True)
        return sum({id(recipes): len(keys) * each for recipes, keys, each in sizes}.values())

    def begin_step(self, step: Step) -> None:
        """A forward pass begins."""
        if self.device_steps is not None:
            self._settle_interrupted()
            if self.device_steps.begin(step):
                return
        if self.early_gate is not None:
            self.early_gate.begin_step()
        self.note_begin(step)
        self._last_row = -1
        if self._prefetcher is not None and step.phase is Phase.DECODE:
            self._settle_interrupted()
            self._is_moving = True
            self._prefetcher.begin_row(step.phase, self.counters)
            self._load_ahead(self._prefetcher, moe_layer_idx=-1)
            self._is_moving = False

    def note_begin(self, step: Step) -> None:
        """Everyone who keeps account hears of a step."""
        ended = self.recorder.begin_step(step)
        if self.predictor is not None:
            self.predictor.begin_step(self.recorder.step, ended)
        for policy in self._policies:
            policy.begin_step(self.recorder.step)
        counters = self.counters.of(step.phase)
        counters.steps += 1
        counters.tokens += step.num_counted

    def moe_layer(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one layer. Raises CheckpointError if an expert
        cannot be read.
        """
        if (steps := self.device_steps) is not None:
            if steps.is_running:
                return steps.compute(moe_layer_idx, x_TD, top_k_index_TK, top_k_weights_TK)
            steps.top_k[moe_layer_idx] = top_k_index_TK.shape[1]
        index_TK = top_k_index_TK.cpu().numpy()
        rows = self._computers[moe_layer_idx].work(index_TK, x_TD, top_k_weights_TK)
        if rows.num_without:
            index_TK = without_gaps(index_TK)
        self.compute(moe_layer_idx, rows, index_TK, len(index_TK))
        return rows.sum(x_TD.dtype)

    def compute(
        self, moe_layer_idx: int, work: Work, index_TK: Ints | None, num_tokens: int
    ) -> None:
        """Do the work of one layer; `index_TK` is None where the routing of single tokens is not
        known. Raises CheckpointError.
        """
        self._begin_row(moe_layer_idx, num_tokens)
        phase = self.recorder.step.phase
        self._learn(moe_layer_idx, index_TK, work.activated, work.counts)
        if self._prefetcher is not None:
            self._prefetcher.begin_row(phase, self.counters)
        keys = self._keys[moe_layer_idx]
        waiting = [keys[expert_idx] for expert_idx in work.activated]
        counters = self.counters.of(phase)
        counters.add_lookups(*self.table.census(waiting))
        self._compute_waves(moe_layer_idx, work, waiting)
        if phase is Phase.PREFILL and isinstance(self._mover, DeviceMover):
            self._stream_next_row(self._mover, moe_layer_idx)
        self._is_moving = False

    def _compute_waves(self, moe_layer_idx: int, work: Work, waiting: Sequence[ExpertKey]) -> None:
        phase = self.recorder.step.phase
        counters = self.counters.of(phase)
        is_first_wave = True
        while waiting:
            wave = self.table.next_wave(waiting, phase)
            with self.table.holding(wave, phase) as held:
                if held.absent:
                    self._mover.load_now(held.absent, held.slot_ids)
                    num_read = self._mover.num_read(held.absent)
                    counters.bytes_read += num_read * self._bytes_per_expert[moe_layer_idx]
                if self._prefetcher is not None and phase is Phase.DECODE and is_first_wave:
                    self._load_ahead(self._prefetcher, moe_layer_idx)
                for arrived in self._mover.arrivals(wave, counters):
                    self._computers[moe_layer_idx].run(work, arrived, held.slot_ids)
            waiting = [key for key in waiting if key not in held.slot_ids]
            is_first_wave = False

    def _begin_row(self, moe_layer_idx: int, num_tokens: int) -> None:
        """A model entered below its top tells of no step: count it as an anonymous request."""
        if num_tokens != self.recorder.step.num_tokens or moe_layer_idx <= self._last_row:
            self.begin_step(Step(Phase.PREFILL, 1, num_tokens, begins_B=np.ones(1, dtype=bool)))
        if self._is_closed:
            raise ClosedError("the model was closed: its experts cannot be read any more")
        self._settle_interrupted()
        if self.recorder.step.phase is Phase.PREFILL and self.cancelled and self.cancelled.is_set():
            self.recorder.drop_step()
            raise Cancelled("generation was stopped in the middle of a prompt")
        self._is_moving, self._last_row = True, moe_layer_idx

    def note_row(self, moe_layer_idx: int, index_TK: Ints, missed: set[ExpertKey]) -> None:
        """The bookkeeping of a row of the step that began last, and that the device decides. It may
        have had fewer tokens than the step: then nobody learns which.
        """
        chosen, counts = np.unique(index_TK[index_TK != NO_EXPERT], return_counts=True)
        has_all = len(index_TK) == self.recorder.step.num_tokens
        self._learn(
            moe_layer_idx, without_gaps(index_TK) if has_all else None, chosen.tolist(), counts
        )
        keys = [
            self._keys[moe_layer_idx][expert_idx] for expert_idx in self.activated[moe_layer_idx]
        ]
        copied = [key for key in keys if key in missed]
        self.counters.decode.add_lookups(len(keys) - len(copied), 0, len(copied))
        self.table.note_use(keys)
        self.tiers[1].table.note_use(copied)

    def note_reads(self, moe_layer_idx: int, keys: Sequence[ExpertKey]) -> PhaseCounters:
        """Count what a decode step reads from disk. Returns the counters of its phase, to which the
        caller adds the time it waits.
        """
        self.counters.decode.bytes_read += len(keys) * self._bytes_per_expert[moe_layer_idx]
        return self.counters.decode

    def settle(self) -> None:
        """Wait for the step under way, and let everyone know of it."""
        if self.device_steps is not None:
            self.device_steps.settle()

    def leave_pass(self) -> None:
        """If the model's last pass did not end: without all of its rows no trace has the step."""
        if self.in_pass and (self.device_steps is None or self.device_steps.settle()):
            self.recorder.leave_step()  # else when it mends
        self.in_pass = False

    def finish_tokens(self) -> list[SequenceTrace]:
        if self.device_steps is not None:
            self.device_steps.conclude()
        self.leave_pass()
        return self.recorder.finish_tokens()

    def _learn(
        self, moe_layer_idx: int, index_TK: Ints | None, activated: list[int], counts: Ints | int
    ) -> None:
        """Tell everyone who keeps account what this row was routed to."""
        self.activated[moe_layer_idx] = activated
        if index_TK is not None:
            counted_TK = self.recorder.record(moe_layer_idx, index_TK)
            if self.predictor is not None:
                self.predictor.observe(moe_layer_idx, counted_TK)
        for policy in self._policies:
            policy.touch(moe_layer_idx, activated, counts)

    def _stream_next_row(self, mover: DeviceMover, moe_layer_idx: int) -> None:
        """After a long prompt's row: keep the link busy until the next one is routed."""
        is_long = len(self.activated[moe_layer_idx]) >= STREAMED_SHARE * len(
            self._keys[moe_layer_idx]
        )
        if is_long and moe_layer_idx + 1 < len(self._keys):
            num_read = mover.num_read(mover.stream(self._keys[moe_layer_idx + 1]))
            self.counters.prefill.bytes_read += num_read * self._bytes_per_expert[moe_layer_idx + 1]

    def _settle_interrupted(self) -> None:
        """If the last layer or plan was cut short, by an error or by Ctrl-C: make order."""
        if self._is_moving:
            self.table.recover()
            self._mover.recover()
            self._is_moving = False

    def _load_ahead(self, prefetcher: Prefetcher, moe_layer_idx: int) -> None:
        """While this row computes; row -1 is what comes before the first."""
        if not prefetcher.has_room():
            return
        if self.early_gate is not None and self.predictor is not None and moe_layer_idx >= 0:
            self.early_gate.hint(moe_layer_idx + 1, self.recorder.step, self.predictor)
        keys = prefetcher.begin_loads(moe_layer_idx)
        for key in keys:
            num_read = self._mover.num_read([key])
            self.counters.decode.bytes_read += num_read * self._bytes_per_expert[key.moe_layer_idx]

    def _read_expert(self, key: ExpertKey, slot: memoryview) -> None:
        """Fill a HOST slot; runs in a read thread."""
        self._recipes[key.moe_layer_idx].load(key.expert_idx, self._reader, slot)

    def _read_expert_ahead(self, key: ExpertKey, slot: memoryview) -> None:
        with self._reader.giving_way():
            self._read_expert(key, slot)

    def close(self) -> None:
        self._is_closed = True
        self.settle()
        self._mover.close()
        self._reader.close()


def without_gaps(index_TK: Ints) -> Ints:
    """For the recorder and the predictor, which know no NO_EXPERT: in its place another expert of
    the token, or 0 if it has none at all.
    """
    another_T1 = index_TK.max(axis=1, keepdims=True).clip(0)
    return np.where(index_TK == NO_EXPERT, another_T1, index_TK)
