"""The engine of one offloaded model: its tiers, its layer path, and the step under way.

    transformers' forward pass ──begin_step──> a step is under way
                               ──moe_layer───> engine/layer.py, once for each MoE layer
                               ──leave_step──> if the pass did not end

With a GPU and without exact=True a decode step of few tokens is the device's
(experimental/gpu/device_steps.py), and the engine only keeps account of it.

Two threads may decide about slots, one at a time: whoever runs the model, and between its layers
the one that fills free slots (engine/preloader.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, RLock, Thread
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor

from moe_infinity.architectures.adapters import ExpertCalls
from moe_infinity.checkpoint.layer_recipes import ExpertLoader
from moe_infinity.cluster.head import ExpertHosts
from moe_infinity.cluster.share import Share
from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.engine.compute import Work
from moe_infinity.engine.layer import BEFORE_THE_FIRST, LayerPath, OngoingStep
from moe_infinity.engine.preloader import Preloader, start_turns
from moe_infinity.engine.slots import ComingRouting, SlotResidents
from moe_infinity.errors import Cancelled, ClosedError, UnsupportedModelError
from moe_infinity.experimental.gpu.device_steps import DeviceSteps
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.kernels.residents import Residents
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder
from moe_infinity.routing import Routing

logger = logging.getLogger(__name__)


class ExpertEngine:
    """Owns the slots of one model and everything that decides about them. Used by one thread at a
    time.
    """

    def __init__(
        self,
        *,
        path: LayerPath,
        bookkeeping: Bookkeeping,
        loader: ExpertLoader,
        device_steps: DeviceSteps | None,  # None: the host decides every step
        preloader: Preloader,
        experts: str,  # how they compute, for the report
        stored_expert_bytes: int,  # of all experts, on disk
        hosts: ExpertHosts | None = None,  # that compute some of the experts
    ) -> None:
        self.path = path
        self.bookkeeping = bookkeeping
        self.recorder: Recorder = bookkeeping.recorder
        self.device_steps = device_steps
        self.experts = experts
        self.stored_expert_bytes = stored_expert_bytes
        self.loader = loader
        self.hosts = hosts
        slots = bookkeeping.tiers[0].slots
        # Of a GPU, and not yet in the bookkeeping.
        self._coming = ComingRouting(slots.cuda_device) if isinstance(slots, DeviceSlots) else None
        self._ongoing = OngoingStep(anonymous_step(num_tokens=0))
        self._deciding = RLock()  # held by whoever decides about slots
        self._preloader = preloader
        self._preload_thread: Thread | None = None
        self.is_preloaded = False  # or there is nothing more to wait for
        self._cancelled: Event | None = None
        self._is_closed = False

    @property
    def tiers(self) -> Sequence[SlotTier]:
        """The one that computes first."""
        return self.bookkeeping.tiers

    @property
    def predictor(self) -> Predictor | None:
        """None with a policy that predicts nothing."""
        return self.bookkeeping.predictor

    # Steps

    def begin_step(self, step: Step) -> None:
        """A forward pass begins."""
        with self._deciding:
            self._begin_step(step)

    def _begin_step(self, step: Step) -> None:
        self._note_coming()
        if self.device_steps is not None:
            self._settle_interrupted()
            if self.device_steps.begin_step(step):
                return
        self.path.begin_step()
        if self.hosts is not None:
            self.hosts.begin_step(step)
        self.bookkeeping.note_begin(step)
        self._ongoing = OngoingStep(step, BEFORE_THE_FIRST, self._ongoing.is_loading)
        if self.path.is_prefetching and step.phase is Phase.DECODE:
            self._settle_interrupted()
            self._ongoing = OngoingStep(step, BEFORE_THE_FIRST, is_loading=True)
            self.path.begin_decode(self._ongoing)
            self._ongoing = OngoingStep(step, BEFORE_THE_FIRST, is_loading=False)

    def note_known(self, step: Step, experts_TLK: Ints) -> None:
        """A step whose tokens need no computing, and what they activated."""
        with self._deciding:
            self.settle()
            self._settle_interrupted()
            self.bookkeeping.note_known(step, experts_TLK)

    def moe_layer(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one layer. Raises CheckpointError if an expert
        cannot be read, Cancelled if nobody waits for the prompt any more.
        """
        if self.device_steps is not None:
            if self.device_steps.is_running:
                return self.device_steps.run_layer(
                    moe_layer_idx, x_TD, top_k_index_TK, top_k_weights_TK
                )
            self.device_steps.top_k[moe_layer_idx] = top_k_index_TK.shape[1]
        residents = None if self._coming is None else self.path.residents(moe_layer_idx)
        if isinstance(residents, SlotResidents):
            self._note_later(moe_layer_idx, top_k_index_TK)
            return residents.compute(x_TD, top_k_index_TK, top_k_weights_TK)
        routing = Routing.of(top_k_index_TK, top_k_weights_TK)
        computer = self.path.computers[moe_layer_idx]
        if self.hosts is None:
            work = computer.begin(x_TD, routing)
            self._run(moe_layer_idx, routing, routing.activated, work)
            return work.sum()
        shared = computer.begin_shared(x_TD, routing)
        asked = self.hosts.ask(moe_layer_idx, routing, shared)
        self._run(moe_layer_idx, routing, asked.own, shared)
        lost = asked.collect()
        if lost:  # with their host: every host can read the checkpoint
            with self._deciding:
                self._compute(self.recorder.step, moe_layer_idx, routing, lost, shared)
        return shared.sum()

    def _note_later(self, moe_layer_idx: int, top_k_index_TK: Tensor) -> None:
        """Enter a layer whose experts are all there: nobody waits for its routing."""
        assert self._coming is not None
        with self._deciding:
            step = self._enter(moe_layer_idx, len(top_k_index_TK))
            self._ongoing = OngoingStep(step, moe_layer_idx)
            self._coming.add(moe_layer_idx, top_k_index_TK)

    def _note_coming(self) -> None:
        """Enter the routing of such layers in the bookkeeping. Waits for the device."""
        for moe_layer_idx, experts_TK in [] if self._coming is None else self._coming.take():
            self.bookkeeping.note_residents(moe_layer_idx, experts_TK)

    def compute_share(self, moe_layer_idx: int, routing: Routing, share: Share) -> Tensor:
        """[P, D]: what experts of one layer make of rows of another host's step. Raises as
        moe_layer does.
        """
        work = self.path.computers[moe_layer_idx].begin_share(share)
        self._run(moe_layer_idx, routing, share.expert_idxs, work)
        return work.outputs()

    def note_routing(self, moe_layer_idx: int, routing: Routing) -> None:
        """What a layer activates that other hosts compute without this one."""
        with self._deciding:
            step = self._enter(moe_layer_idx, routing.num_tokens)
            self._ongoing = OngoingStep(step, moe_layer_idx)
            self.path.record(moe_layer_idx, routing)

    def residents(self, moe_layer_idx: int) -> Residents | None:
        """The experts of one layer, if those of all layers are in memory and none has to leave. A
        caller may compute them, and then calls `note_residents` in place of `moe_layer`.
        """
        if self._is_closed or self._ongoing.is_loading or self.device_steps is not None:
            return None
        found = self.path.residents(moe_layer_idx)
        return found if isinstance(found, Residents) else None

    def note_residents(self, moe_layer_idx: int, experts_TK: Ints) -> None:
        """The residents of one layer were computed for these tokens."""
        with self._deciding:
            step = self._enter(moe_layer_idx, len(experts_TK))
            self._ongoing = OngoingStep(step, moe_layer_idx)
            self.bookkeeping.note_residents(moe_layer_idx, experts_TK)

    def answer_calls(self, moe_layer_idx: int, routing: Routing, calls: ExpertCalls) -> None:
        """Answer the calls that a block makes of its experts. Raises as moe_layer does."""
        work = self.path.computers[moe_layer_idx].answering(calls)
        self._run(moe_layer_idx, routing, routing.activated, work)

    def _run(
        self, moe_layer_idx: int, routing: Routing, expert_idxs: Sequence[int], work: Work
    ) -> None:
        """Enter a layer, and do the work that these experts have in it."""
        with self._deciding:
            step = self._enter(moe_layer_idx, routing.num_tokens)
            self._note_coming()
            self.path.record(moe_layer_idx, routing)
            self._compute(step, moe_layer_idx, routing, expert_idxs, work)

    def _compute(
        self,
        step: Step,
        moe_layer_idx: int,
        routing: Routing,
        expert_idxs: Sequence[int],
        work: Work,
    ) -> None:
        self._ongoing = OngoingStep(step, moe_layer_idx, is_loading=True)
        self.path.run(self._ongoing, routing, expert_idxs, work, self._stop_if_cancelled)
        self._ongoing = OngoingStep(step, moe_layer_idx, is_loading=False)

    def _enter(self, moe_layer_idx: int, num_tokens: int) -> Step:
        """The step that this layer belongs to. If a module inside the model was called directly, no
        step was begun: the call counts as a prompt of its own.
        """
        if (
            num_tokens != self.recorder.step.num_tokens
            or moe_layer_idx <= self._ongoing.moe_layer_idx
        ):
            self.begin_step(anonymous_step(num_tokens))
        if self._is_closed:
            raise ClosedError("the model was closed: its experts cannot be read any more")
        self._settle_interrupted()
        self._stop_if_cancelled()
        return self.recorder.step

    @contextmanager
    def without_experts(self) -> Iterator[None]:
        """Inside, the experts of every layer give zeros, and nobody is told: for trials of what
        surrounds them. Raises UnsupportedModelError where a block calls its experts one by one.
        """

        def zeros(moe_layer_idx: int, x_TD: Tensor, *_: Tensor) -> Tensor:
            return torch.zeros_like(x_TD)

        def refuse(*_: object) -> None:
            raise UnsupportedModelError("a block that calls its experts one by one")

        vars(self).update(moe_layer=zeros, answer_calls=refuse)
        try:
            yield
        finally:
            del vars(self)["moe_layer"], vars(self)["answer_calls"]

    def _stop_if_cancelled(self) -> None:
        """Of a prompt nobody waits for any more: raises Cancelled."""
        is_prompt = self.recorder.step.phase is Phase.PREFILL
        if is_prompt and self._cancelled and self._cancelled.is_set():
            self._note_coming()
            self.recorder.drop_step()
            raise Cancelled("generation was stopped in the middle of a prompt")

    def _settle_interrupted(self) -> None:
        """If an error or Ctrl-C cut the last layer short."""
        if self._ongoing.is_loading:
            self.path.recover()
            self._ongoing = self._ongoing._replace(is_loading=False)

    def leave_step(self) -> None:
        """The last pass did not end. Without all of its MoE layers it is not recorded."""
        self._note_coming()
        if self.device_steps is None or self.device_steps.finish_step():
            self.recorder.drop_incomplete_step()  # else done when the device's step is reset

    def settle(self) -> None:
        """Wait for the device, and enter in the bookkeeping what it has not told so far."""
        self._note_coming()
        if self.device_steps is not None:
            self.device_steps.finish_step()

    def conclude(self) -> None:
        """As `settle`, and reset a step that the device decided if it was interrupted."""
        self._note_coming()
        if self.device_steps is not None:
            self.device_steps.conclude()

    @contextmanager
    def cancellable(self, cancelled: Event | None) -> Iterator[None]:
        """Inside, once `cancelled` is set, a prompt ends before its next few experts."""
        self._cancelled = cancelled
        try:
            yield
        finally:
            self._cancelled = None

    def recover(self) -> None:
        """Make order if the last step was cut short."""
        with self._deciding:
            self._settle_interrupted()

    # Preloading

    def start_preloading(self) -> None:
        """Begin to fill free slots in the background. Again is harmless."""
        with self._deciding:
            if self._preload_thread is None:
                turn = WeakMethod(self._preload)
                self._preload_thread = start_turns(turn, self._preloader.load_ended)

    def _preload(self) -> bool:
        """One turn of the thread that preloads; False once it has nothing left to do."""
        with self._deciding:
            goes_on = False
            if not self._is_closed:
                if self._ongoing.is_loading:  # was cut short: the next step settles it
                    return True
                self._ongoing = self._ongoing._replace(is_loading=True)
                try:
                    goes_on = self._preloader.advance()
                    self._ongoing = self._ongoing._replace(is_loading=False)
                except Exception as error:  # no answer depends on it
                    logger.warning("preloading of experts ends: %s", error)
            self.is_preloaded = not goes_on
            return goes_on

    def check_invariants(self) -> None:
        """Assert that the bookkeeping of slots is consistent."""
        with self._deciding:
            for tier in self.tiers:
                tier.table.check_invariants()
        if self.device_steps is not None:
            self.device_steps.check_invariants()

    def close(self) -> None:
        """Wait for what is under way, stop the read threads, close the files."""
        with self._deciding:
            self._is_closed = True
        self._preloader.load_ended.set()  # its thread ends
        self.settle()
        if self.hosts is not None:
            self.hosts.close()
        self.tiers[0].mover.close()
        self.loader.close()


def anonymous_step(num_tokens: int) -> Step:
    return Step(Phase.PREFILL, 1, num_tokens, begins_B=np.ones(1, dtype=bool))
