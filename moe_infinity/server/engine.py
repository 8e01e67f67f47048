"""The step loop of the server: one thread runs the model, requests join and leave between steps.

    submit --> waiting --admit--> prefilling --prompt done--> decoding --last token--> gone
               (bounded)  a seat   one chunk of one prompt     all of them, one token each
                                   a step                      a step

In a long pass over a prompt the others go on between two layers (reading.py). Prompts of a client
keep their order, and clients take turns: for seats, and with chunks.

A sequence has a seat from its first chunk to its last token, while its row in the batch changes.
The recorder and the predictor know sequences by their seats: each sequence has its own EAM, and the
loads of a step are planned for all of its sequences.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor

from moe_infinity.errors import Cancelled, CheckpointError, ConfigError
from moe_infinity.model import MoE
from moe_infinity.prefixes.prompt_store import PromptStore
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.counts import EngineCounts
from moe_infinity.server.decoding import Decoding
from moe_infinity.server.generation import Generation
from moe_infinity.server.passes import Passes
from moe_infinity.server.reading import Left, Reading
from moe_infinity.server.seating import Seating
from moe_infinity.server.sequences import (
    DeadlineExceeded,
    Deliver,
    EngineStopped,
    QueueFull,
    Request,
    Running,
)
from moe_infinity.server.turns import SeatQueue
from moe_infinity.system.threads import keep_running

logger = logging.getLogger(__name__)
PRELOAD_GLANCE_S = 0.1  # between looks at whether experts are preloaded
JOIN_TIMEOUT_S = 120.0  # a step may have to wait for a slow disk


class Engine:
    """Generates for several requests at once.

    `start()` begins its thread; tests call `step()` instead. Raises UnsupportedModelError for a
    model that cannot be served, or cannot be served in batches, and ConfigError for settings of the
    checkpoint that cannot be kept. `store`: where prefixes are on disk; it is closed at the end.
    """

    def __init__(self, moe: MoE, config: ServeConfig, store: PromptStore | None = None) -> None:
        self.config = config
        self.counts = EngineCounts()
        self.death: BaseException | None = None  # the error that ended the thread
        self._moe = moe
        self._passes = Passes(moe, self.config, store)
        self.reads_whole = self._passes.reads_whole
        self._generation = Generation(moe.model)
        self._changed = threading.Condition()
        self._waiting = SeatQueue(self.config.max_queue)  # guarded by _changed, as the next two
        self._is_draining = False
        self._is_closing = False
        self._prefilling = Reading(config, self._passes.num_to_compute)
        self._decoding = Decoding(self._passes)
        self._seating = Seating(
            self._waiting, self._changed, self._prefilling, self._decoding, self._passes
        )
        self._thread: threading.Thread | None = None

    # called by any thread

    def submit(self, running: Sequence[Running], *, is_begun: bool = False) -> None:
        """Queue sequences, all of them or none. `is_begun`: others of their request were queued, so
        they are taken to the end, and come again if there is no room.

        Raises QueueFull, EngineStopped, and ConfigError for more than the queue can hold.
        """
        if len(running) > self.config.max_queue:
            raise ConfigError(f"{len(running)} sequences, at most {self.config.max_queue} may wait")
        with self._changed:
            is_draining = self._is_draining and not (is_begun and not self._is_closing)
            if is_draining or self.death is not None:
                raise EngineStopped("the server takes no more requests")
            try:
                self._waiting.add(running)
            except QueueFull:
                self.counts.refused += 0 if is_begun else len(running)
                raise
            self._changed.notify()

    def running(self, request: Request, deliver: Deliver) -> Running:
        """Return a sequence to be submitted, whose outputs go to `deliver`. Raises ValueError for
        settings that transformers does not take.
        """
        settings = self._generation.settings(
            request.sampling,
            request.prompt_ids,
            request.max_new_tokens,
            stops=request.stop,
            constraints=request.constraints,
        )
        return Running(
            request,
            deliver,
            tokenizer=self._moe.tokenizer,
            settings=settings,
            deadline_s=self.config.deadline,
        )

    def cancel(self, sequences: Sequence[Running]) -> None:
        """Stop generating these before the next step. Sequences that have ended are ignored."""
        for sequence in sequences:
            sequence.is_cancelled = True
        with self._changed:
            self._changed.notify()

    def start(self) -> None:
        """Begin the thread that steps."""
        turns = (self._turn, "the engine")
        self._thread = threading.Thread(
            target=keep_running, args=turns, name="moe-infinity-engine", daemon=True
        )
        self._thread.start()

    def drain(self) -> None:
        """Refuse new requests and go on with those that were submitted."""
        with self._changed:
            self._is_draining = True

    def close(self) -> None:
        """Stop after the current step. Unfinished sequences fail with EngineStopped."""
        with self._changed:
            self._is_draining = self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        self._fail_all(EngineStopped("the server was stopped"))
        self._passes.prefixes.close()

    @property
    def is_alive(self) -> bool:
        """True while the thread runs. It also runs while the engine drains."""
        has_thread = self._thread is not None and self._thread.is_alive()
        return has_thread and self.death is None

    @property
    def is_ready(self) -> bool:
        """True if `submit` takes requests, and they need not wait for experts to be preloaded."""
        return self.is_alive and not self._is_draining and self._moe.is_ready

    def state(self) -> dict[str, Any]:
        """Sequences by state, how far the prompts are that are read, bytes of the KV and prefix
        caches, and the fields of EngineCounts.
        """
        prompts = [
            {"tokens": len(sequence.request.prompt_ids), "read": sequence.num_prefilled}
            for sequence in self._prefilling
        ]
        return {
            "prompts": prompts,
            "waiting": len(self._waiting),
            "waiting_by_client": self._waiting.by_client(),
            "prefilling": len(self._prefilling),
            "decoding": len(self._decoding),
            "kv_bytes": self._decoding.num_bytes,
            "longest_gap_s": self._decoding.longest_gap_s,
            "prefix_bytes": self._passes.prefixes.used_bytes,
            "prefix_capacity_bytes": self._passes.prefixes.num_bytes,
            "prompt_store": asdict(self._passes.prefixes.store_counts),
            **asdict(self.counts),
        }

    # the engine's thread

    def _turn(self) -> bool:
        """Wait for work and take a step. Returns False when the engine closes or has died.

        An error that belongs to no sequence ends all of them. The engine dies of it if what is left
        contradicts itself.
        """
        try:
            if not self._wait_for_work():
                return False
            self.step()
            return True
        except BaseException as error:
            self._fail_all(EngineStopped(f"the engine failed: {error!r}"))
            if isinstance(error, Exception) and self._is_consistent():
                raise
            logger.exception("the engine died")
            self.death = error
            self._fail_all(EngineStopped(f"the engine died: {error!r}"))  # who came meanwhile
            return False

    def _is_consistent(self) -> bool:
        with suppress(AssertionError):
            self.check_invariants()
            return True
        return False

    def _wait_for_work(self) -> bool:
        """Return True when there is work, False when the engine closes."""
        while not (self._moe.is_ready or self._is_closing):
            self._drop_ended()
            with self._changed:
                self._changed.wait(PRELOAD_GLANCE_S)
        with self._changed:
            while not (self._waiting or self._prefilling or self._decoding or self._is_closing):
                self._changed.wait()
            return not self._is_closing

    def step(self) -> None:
        """Compute a chunk of one prompt, then one token of every decoding sequence."""
        began = time.perf_counter()
        self._drop_ended()
        self._seating.admit()
        if self._prefilling:
            self._prefill(self._prefilling.next())
        self._decode()
        self.counts.steps += 1
        self.counts.stepping_s += time.perf_counter() - began
        if not (self._prefilling or self._decoding):
            self.check_invariants()

    def _drop_ended(self) -> None:
        """End the sequences that were cancelled or have passed their deadline."""
        now = time.monotonic()
        for sequence in self._seating.everyone():
            if sequence in self._prefilling.under_way:
                continue
            if sequence.is_cancelled:
                self.counts.cancelled += 1
                self._leave(sequence, Cancelled("the request was cancelled"))
            elif sequence.deadline < now:
                self.counts.expired += 1
                allowed = f"{self.config.deadline:g} s"
                self._leave(sequence, DeadlineExceeded(f"the request took more than {allowed}"))

    def _prefill(self, sequence: Running) -> None:
        """Compute a chunk of a prompt. An error ends that sequence only."""
        take_pass = partial(
            self._passes.prefill,
            sequence,
            self._let_others_go_on,
            is_alone=len(self._prefilling) == 1 and not self._decoding,
            is_awaited=len(self._waiting) > 0,
        )
        try:
            num_known = self._passes.begin(sequence)
            self.counts.prompt_tokens += num_known
            self.counts.cached_tokens += num_known
            before = sequence.num_prefilled
            logits_V = self._prefilling.read(sequence, take_pass)
            self.counts.prompt_tokens += sequence.num_prefilled - before
            is_read = sequence.is_prefilled
            is_last = is_read and self._begin_answer(sequence, logits_V)
        except Left:
            return
        except QueueFull as error:
            is_beside = len(self._prefilling.under_way) > 0  # it is tried again after that pass
            can_wait = is_beside or self._seating.let_wait_for_room(sequence)
            if not (can_wait or self._passes.prefixes.give_way()):
                self._fail(sequence, error)
            return
        except Exception as error:
            self._fail(sequence, error)
            return
        if not is_read:
            return
        if is_last:
            self._finish(sequence)
            return
        self._prefilling.remove(sequence)
        if not self._begins_anew(sequence):
            self._decoding.add(sequence)

    def _let_others_go_on(self) -> None:
        """Called between two layers of a pass over a prompt: let sequences that decode go on before
        they have waited too long, and read a prompt that one usual pass reads. Raises Left.
        """
        if self._prefilling.is_time_for_others(self._decoding.ran_at):
            self._drop_ended()
            self._seating.admit()
            if self._decoding:
                self._passes.keep_blocks_short()
            self._decode()
            if (beside := self._prefilling.next_beside()) is not None:
                self._prefill(beside)  # which may have set the blocks of its own
                if self._decoding:
                    self._passes.keep_blocks_short()
                self._decode()

    def _begins_anew(self, sequence: Running) -> bool:
        """Queue a sequence whose next token the model computes without its cache."""
        num_anew = self._passes.lengths.num_anew(sequence.num_held, len(sequence.ids))
        if num_anew:
            sequence.begin_anew(num_anew)
            self._prefilling.add(sequence)
        return num_anew > 0

    def _begin_answer(self, sequence: Running, logits_V: Tensor) -> bool:
        """Choose the first token. Returns True if it was the last, or there is to be none."""
        if sequence.request.max_new_tokens == 0:
            sequence.end_here()
            return True
        is_last = sequence.add(logits_V)
        self.counts.generated_tokens += 1
        return is_last

    def _decode(self) -> None:
        """Compute one token of each decoding sequence. An error in choosing a token ends one."""
        newest = self._decoding.newest_without_room()
        goes_on = newest is None or self._seating.let_wait_for_room(newest)
        goes_on = goes_on or (self._passes.prefixes.give_way() and self._decoding.has_room)
        if newest is not None and not goes_on:
            logger.warning("an answer is cut: memory has no room for its keys and values")
            self.counts.cut += 1
            newest.end_here()
            self._finish(newest)
        for sequence in self._decoding:
            if self._begins_anew(sequence):
                self._decoding.remove(sequence)
        for sequence, logits_V in self._decoding.step():
            if isinstance(logits_V, Exception):
                self._fail(sequence, logits_V)
                continue
            self.counts.generated_tokens += 1
            try:
                if sequence.add(logits_V):
                    self._finish(sequence)
            except Exception as error:
                self._fail(sequence, error)

    def _finish(self, sequence: Running) -> None:
        if sequence in self._decoding:
            self._decoding.remove(sequence, is_end=True)
        self.counts.finished += 1
        self._leave(sequence, None)

    def _fail(self, sequence: Running, error: Exception) -> None:
        what = f": {error}" if isinstance(error, CheckpointError) else ""  # has no user's text
        logger.warning("a request failed: %s%s", type(error).__name__, what)
        self.counts.failed += 1
        self._leave(sequence, error)

    def _leave(self, sequence: Running, error: BaseException | None) -> None:
        """Remove a sequence in any state, then deliver its end."""
        self.counts.note_masks(sequence.request.constraint)
        self._seating.remove(sequence)
        sequence.end(error)

    def _fail_all(self, error: BaseException) -> None:
        """End every sequence with an error. The state may be inconsistent after an error."""
        everyone = self._seating.clear()
        self.counts.failed += len(everyone)
        for sequence in everyone:
            sequence.end(error)

    def check_invariants(self) -> None:
        """Assert that each seat is free or taken once, and that each sequence has a row."""
        self._seating.check_invariants()
        self._decoding.check_invariants()
        self._moe.check_invariants()
