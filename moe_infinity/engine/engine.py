"""The routed experts of one model, computed in this process.

    transformers' forward pass ──begin_step──> a step is under way
                               ──layer───────> engine/layer.py, once for each MoE layer
                               ──leave_step──> if the pass did not end

While all experts are in memory, a decode step may bypass `layer`: the model's decoder layers take
`residents`, compute them, and call `note_residents` (architectures/decoder_layers.py).

Two threads decide about slots, one at a time: the thread that runs the model and, between its
layers, the one that fills free slots (engine/preloader.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from weakref import WeakMethod

import numpy as np
from torch import Tensor

from moe_infinity.architectures.adapters import ExpertCalls
from moe_infinity.architectures.prompt_blocks import PromptBlock, PromptBlocks
from moe_infinity.checkpoint.expert_loader import ExpertLoader
from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.engine.compute import Work
from moe_infinity.engine.layer import BEFORE_THE_FIRST, LayerPath, OngoingStep
from moe_infinity.engine.preloader import Preloader, start_turns
from moe_infinity.errors import Cancelled, CheckpointError, ClosedError
from moe_infinity.experts import Ints, Phase, Routing, Step
from moe_infinity.kernels.residents import Residents
from moe_infinity.memory.room import Room
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder


class LocalExperts:
    """Owns the slots of one model and everything that decides about them. Used by one thread at a
    time.
    """

    def __init__(
        self,
        *,
        path: LayerPath,
        room: Room,
        blocks: PromptBlocks | None,  # that a decoder layer takes of a long prompt
        bookkeeping: Bookkeeping,
        loader: ExpertLoader,
        preloader: Preloader,
        description: str,  # how experts compute, for the report
        stored_expert_bytes: int,  # of all experts, on disk
    ) -> None:
        self.path = path
        self.room = room
        self._blocks = blocks
        self.bookkeeping = bookkeeping
        self.recorder: Recorder = bookkeeping.recorder
        self.loader = loader
        self.description = description
        self.stored_expert_bytes = stored_expert_bytes
        self.deciding = room.deciding
        self.is_preloaded = False  # True once there is nothing more to wait for
        self._ongoing = OngoingStep(anonymous_step(num_tokens=0))
        self._preloader = preloader
        self._preload_thread: Thread | None = None
        self._cancelled: Event | None = None
        self._others: Callable[[], None] | None = None
        self._is_closed = False

    @property
    def local(self) -> LocalExperts:
        """These experts themselves, see engine/experts.py."""
        return self

    @property
    def tiers(self) -> Sequence[SlotTier]:
        """The tiers of slots; the one whose slots kernels read comes first."""
        return self.bookkeeping.tiers

    @property
    def predictor(self) -> Predictor | None:
        """None with a policy that predicts nothing."""
        return self.bookkeeping.predictor

    # Steps

    def begin_step(self, step: Step) -> None:
        """Begin a forward pass. A decode step may begin loads for its first layers."""
        with self.deciding:
            self._make_room(step)
            self.path.begin_step()
            is_cut = self._blocks is not None and self._blocks.size is not None
            self.bookkeeping.note_begin(step, is_cut=is_cut and step.phase is Phase.PREFILL)
            self._ongoing = OngoingStep(step, BEFORE_THE_FIRST, self._ongoing.is_unfinished)
            if self.path.is_prefetching and step.phase is Phase.DECODE:  # loads begin here already
                self._recover_if_interrupted()
                self._ongoing = OngoingStep(step, BEFORE_THE_FIRST, is_unfinished=True)
                self.path.begin_decode(self._ongoing)
                self._ongoing = OngoingStep(step, BEFORE_THE_FIRST, is_unfinished=False)

    def _make_room(self, step: Step) -> None:
        """Let slots give way to the step, or come back. Those that came back are filled again."""
        table = self.tiers[-1].table
        num_withdrawn = table.num_withdrawn
        self.room.make(step)
        thread = self._preload_thread
        if table.num_withdrawn < num_withdrawn and thread is not None and not thread.is_alive():
            self._preload_thread = None
            self.start_preloading()

    def layer(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """Return [T, D], the routed experts' output for one MoE layer. Raises CheckpointError if an
        expert cannot be read, Cancelled if the caller has cancelled the prompt.
        """
        routing = Routing.of(top_k_index_TK, top_k_weights_TK)
        self._let_others_run(moe_layer_idx)
        work = self.path.computers[moe_layer_idx].begin(x_TD, routing)
        self.run_layer(moe_layer_idx, routing, routing.activated, work)
        return work.sum()

    def answer_calls(self, moe_layer_idx: int, routing: Routing, calls: ExpertCalls) -> None:
        """Answer the calls that a block makes of its experts. Raises as `layer` does."""
        self._let_others_run(moe_layer_idx)
        work = self.path.computers[moe_layer_idx].answering(calls)
        self.run_layer(moe_layer_idx, routing, routing.activated, work)

    def run_layer(
        self, moe_layer_idx: int, routing: Routing, expert_idxs: Sequence[int], work: Work
    ) -> None:
        """Enter a layer, and do the work that these of its experts have. Raises as `layer` does."""
        with self.deciding:
            self._go_on(moe_layer_idx, routing.num_tokens, is_unfinished=True)
            if self._ongoing.step.phase is Phase.PREFILL:
                self.room.make_for_layer(routing.num_tokens)
            self.path.run_layer(self._ongoing, routing, expert_idxs, work, self._stop_if_cancelled)
            self._ongoing = self._ongoing._replace(is_unfinished=False)

    def run_recorded_layer(
        self, moe_layer_idx: int, routing: Routing, expert_idxs: Sequence[int], work: Work
    ) -> None:
        """Do the work that further experts have in the layer that has just run: those of a host
        that was lost meanwhile.
        """
        with self.deciding:
            self._ongoing = OngoingStep(self.recorder.step, moe_layer_idx, is_unfinished=True)
            self.path.run_recorded_layer(
                self._ongoing, routing, expert_idxs, work, self._stop_if_cancelled
            )
            self._ongoing = self._ongoing._replace(is_unfinished=False)

    def residents(self, moe_layer_idx: int) -> Residents | None:
        """The experts of one layer, if those of all layers are in memory and none has to leave. A
        caller may compute them, and then calls `note_residents` in place of `layer`.
        """
        if self._is_closed or self._ongoing.is_unfinished:
            return None
        return self.path.residents(moe_layer_idx)

    def note_residents(self, moe_layer_idx: int, top_k_index_TK: Ints) -> None:
        """Enter a layer whose residents the caller has computed for these tokens, and record it.
        Raises what `enter` raises.
        """
        with self.deciding:
            self._go_on(moe_layer_idx, len(top_k_index_TK))
            self.bookkeeping.note_residents(moe_layer_idx, top_k_index_TK)

    def note_routing(self, moe_layer_idx: int, routing: Routing) -> None:
        """Enter a layer of which nothing is computed here, and record what it activates. Raises
        what `enter` raises.
        """
        with self.deciding:
            self._go_on(moe_layer_idx, routing.num_tokens)
            self.bookkeeping.note_routing(moe_layer_idx, routing)

    def note_known(self, step: Step, top_k_index_TLK: Ints) -> None:
        """Record a step whose tokens need no computing, and what they activated."""
        with self.deciding:
            self._recover_if_interrupted()
            self.bookkeeping.note_known(step, top_k_index_TLK)

    def _go_on(self, moe_layer_idx: int, num_tokens: int, *, is_unfinished: bool = False) -> None:
        """Enter a layer of this many tokens, in a step of its own if it continues none."""
        num_tokens = num_tokens if self._block is None else self._block.num_tokens
        if not self.is_next(moe_layer_idx, num_tokens):
            self.begin_step(anonymous_step(num_tokens))
        self.enter(moe_layer_idx, is_unfinished=is_unfinished)

    def is_next(self, moe_layer_idx: int, num_tokens: int) -> bool:
        """True if a layer of this many tokens continues the step under way. If a module inside the
        model is called directly, no step was begun: the call counts as a prompt of its own.
        """
        is_later = moe_layer_idx > self._ongoing.moe_layer_idx
        is_later |= moe_layer_idx == self._ongoing.moe_layer_idx and self._is_within_layer
        return is_later and num_tokens == self.recorder.step.num_tokens

    @property
    def _block(self) -> PromptBlock | None:
        """The block of the prompt that a decoder layer computes; None: all tokens of the pass."""
        return None if self._blocks is None else self._blocks.current

    @property
    def _is_within_layer(self) -> bool:
        return self._block is not None and self._block.start > 0

    def enter(self, moe_layer_idx: int, *, is_unfinished: bool = False) -> None:
        """Go on to a layer of the step under way. Raises ClosedError or Cancelled."""
        if self._is_closed:
            raise ClosedError("the model was closed: its experts cannot be read any more")
        self._recover_if_interrupted()
        self._stop_if_cancelled()
        self._ongoing = OngoingStep(self.recorder.step, moe_layer_idx, is_unfinished, self._block)

    def _stop_if_cancelled(self) -> None:
        """Raise Cancelled if the step is a prompt whose caller has cancelled it."""
        is_prompt = self.recorder.step.phase is Phase.PREFILL
        if is_prompt and self._cancelled and self._cancelled.is_set():
            self.recorder.drop_step()
            raise Cancelled("generation was stopped in the middle of a prompt")

    def _recover_if_interrupted(self) -> None:
        """End the loads and holds that are left of a layer that an error or Ctrl-C cut short."""
        if self._ongoing.is_unfinished:
            self.path.recover()
            self._ongoing = self._ongoing._replace(is_unfinished=False)

    def note_state(self) -> None:
        """Note what the modules of the experts are like."""
        for computer in self.path.computers:
            computer.note_state()

    def leave_step(self) -> None:
        """End a pass that did not reach its last layer; it is not recorded."""
        self.recorder.drop_incomplete_step()

    @contextmanager
    def unchanged_files(self) -> Iterator[None]:
        """Around a forward pass. Files whose bytes are computed with where the page cache has them
        are looked at before, and read anew if they were changed. Raises CheckpointError if one was
        changed meanwhile, even if a pass inside this one has it right again: what was computed may
        be wrong.
        """
        reader = self.loader.reader
        if reader.changed_file() is not None:
            self.drop_experts()
        num_known = reader.map_changed()
        yield
        file = reader.changed_file(num_known)
        if file is not None:
            self.drop_experts()
            raise CheckpointError(f"{file}: was changed, or its disk failed, while it was used")

    def drop_experts(self) -> None:
        """Read all experts anew from now on: what is in memory may be wrong."""
        with self.deciding:
            self.path.recover()
            for tier in self.tiers:
                tier.table.evict_all()

    @contextmanager
    def letting_run(self, others: Callable[[], None]) -> Iterator[None]:
        """While this context is active, `others` is called between two layers of a prompt. It may
        run forward passes of its own.
        """
        self._others = others
        try:
            yield
        finally:
            self._others = None

    def _let_others_run(self, moe_layer_idx: int) -> None:
        """Before any layer of a prompt but the first, and between the blocks of a layer."""
        is_begun = moe_layer_idx > 0 or self._is_within_layer
        if self._others is None or not is_begun or self.recorder.step.phase is not Phase.PREFILL:
            return
        if self.recorder.keeps_tokens or len(self.tiers) > 1:
            return
        with self.deciding:  # the preloader notes there what it does
            ongoing = self._ongoing
        others, self._others = self._others, None
        block = nullcontext() if self._blocks is None else self._blocks.set_aside()
        with self.room.set_aside(self.recorder.step), self.bookkeeping.set_aside(), block:
            others()
        self._others = others
        with self.deciding:
            is_unfinished = ongoing.is_unfinished or self._ongoing.is_unfinished
            self._ongoing = ongoing._replace(is_unfinished=is_unfinished)

    def synchronize(self) -> None:
        """Return at once: each layer is recorded before it is computed."""

    @contextmanager
    def cancellable(self, cancelled: Event | None) -> Iterator[None]:
        """While this context is active, setting `cancelled` ends a prompt before its next group of
        experts.
        """
        self._cancelled = cancelled
        try:
            yield
        finally:
            self._cancelled = None

    def recover(self) -> None:
        """Release what a step that was cut short still holds."""
        with self.deciding:
            self._recover_if_interrupted()

    # Preloading

    def start_preloading(self) -> None:
        """Begin to fill free slots in the background. A second call does nothing."""
        with self.deciding:
            if self._preload_thread is None:
                self._recover_if_interrupted()
                self._ongoing = self._ongoing._replace(is_unfinished=True)  # until all are entered
                self._preloader.enter_present()
                self._ongoing = self._ongoing._replace(is_unfinished=False)
                turn = WeakMethod(self._preload)
                self._preload_thread = start_turns(turn, self._preloader.load_ended)

    def _preload(self) -> bool:
        """Take one turn of the thread that preloads; False once it has nothing left to do."""
        with self.deciding:
            goes_on = False
            if not self._is_closed:
                if self._ongoing.is_unfinished:  # was cut short: the next step recovers
                    return True
                self._ongoing = self._ongoing._replace(is_unfinished=True)
                try:
                    goes_on = self._preloader.advance()
                except Exception:  # is_unfinished stays set: the next step recovers
                    self.is_preloaded = True  # nobody waits for what may come later
                    raise
                self._ongoing = self._ongoing._replace(is_unfinished=False)
            self.is_preloaded = self.is_preloaded or not goes_on
            return goes_on

    # The end

    def check_invariants(self) -> None:
        """Assert that the bookkeeping of slots is consistent."""
        with self.deciding:
            for tier in self.tiers:
                tier.table.check_invariants()

    def close(self) -> None:
        """Wait for what is under way, stop the read threads, close the files."""
        with self.deciding:
            self._is_closed = True
        self._preloader.load_ended.set()  # its thread ends
        self.tiers[0].mover.close()
        self.loader.close()


def anonymous_step(num_tokens: int) -> Step:
    """A prompt of one sequence, for a module that is called outside a forward pass."""
    return Step(Phase.PREFILL, 1, num_tokens, begins_B=np.ones(1, dtype=bool))
