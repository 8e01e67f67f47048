"""Counts the routing of every step in the request's EAM and, on demand, keeps it token by token.

Every sequence of a batch is a request of its own. It begins with a step that finds its KV cache
empty. A step with another number of sequences than the one before begins all of them. Padding is
left out, and so are the tokens that a finished sequence is given while others of its batch go on.
A server names its sequences: each is a place that one request after another takes, and a step has
tokens of some of them only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.predict.eamc import RequestEam
from moe_infinity.predict.tracefile import SequenceTrace


class Recorder:
    """Fed by the engine: one `begin_step` per forward pass, one `record` per MoE layer."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_layers = num_layers
        self.num_experts = num_experts
        self.step = Step(Phase.PREFILL, 1, 0, begins_B=np.ones(1, dtype=bool))  # the current one
        self._sequence_of_token_T: Ints = np.zeros(0, dtype=np.int64)
        self._counts_BLE = self._no_counts(0)
        self._tokens: TokenRecorder | None = None
        self._routing: dict[int, Ints] = {}  # by MoE layer, of the current step

    def _no_counts(self, num_sequences: int) -> dict[Phase, Ints]:
        """[B, L, E] for each phase: one step adds to the matrices of all sequences at once."""
        shape = (num_sequences, self._num_layers, self.num_experts)
        return {phase: np.zeros(shape, dtype=np.int64) for phase in Phase}

    def begin_step(self, step: Step) -> list[RequestEam]:
        """A forward pass begins; gives the requests that ended because others take their place."""
        eams = self.request_eams()
        if step.num_sequences != len(eams):
            step = replace(step, begins_B=np.ones(step.num_sequences, dtype=bool))
            self._counts_BLE = self._no_counts(step.num_sequences)
        elif step.begins_B.any():  # new arrays: those of the ended requests stay as they are
            begins_B11 = step.begins_B[:, None, None]
            self._counts_BLE = {
                phase: np.where(begins_B11, 0, counts) for phase, counts in self._counts_BLE.items()
            }
        if self._tokens is not None:
            self._tokens.begin_step(step)
        self.step = step
        self._routing = {}
        self._sequence_of_token_T = step.sequence_of_token_T
        return [e for i, e in enumerate(eams) if i >= step.num_sequences or step.begins_B[i]]

    def record(self, moe_layer_idx: int, top_k_index_TK: Ints, block: slice | None = None) -> Ints:
        """Record the routing of one layer, of as many tokens as `begin_step` announced, or of a
        block of them, one after the other. Gives back the part that counts, of the blocks before,
        too.
        """
        step = self.step
        mine = block or slice(0, step.num_tokens)
        assert len(top_k_index_TK) == mine.stop - mine.start, (top_k_index_TK.shape, step)
        counted_TK = top_k_index_TK
        start = mine.start
        if step.counted_T is not None:
            counted_TK = top_k_index_TK[step.counted_T[mine]]
            start = int(step.counted_T[: mine.start].sum())
        sequence_T = self._sequence_of_token_T[start : start + len(counted_TK)]
        counts_BE = self._counts_BLE[step.phase][:, moe_layer_idx]
        cells_TK = sequence_T[:, None] * self.num_experts + counted_TK
        added = np.bincount(cells_TK.ravel(), minlength=counts_BE.size)
        counts_BE += added.reshape(counts_BE.shape)
        if mine.start:
            counted_TK = np.concatenate([self._routing[moe_layer_idx], counted_TK])
        self._routing[moe_layer_idx] = counted_TK
        if self._tokens is not None and mine.stop == step.num_tokens:
            self._tokens.record(moe_layer_idx, counted_TK)
        return counted_TK

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, other steps are recorded. The one under way goes on afterwards."""
        kept = (self.step, self._routing, self._sequence_of_token_T)
        yield
        self.step, self._routing, self._sequence_of_token_T = kept

    @property
    def keeps_tokens(self) -> bool:
        """True while the routing of every token is kept."""
        return self._tokens is not None

    def routing(self) -> Ints | None:
        """[T, L, K]: what the counted tokens of the current step activated. None if a layer has not
        run yet, or layers choose different numbers of experts.
        """
        routing = [self._routing[layer] for layer in sorted(self._routing)]
        is_whole = len(routing) == self._num_layers and len({x.shape for x in routing}) == 1
        return np.stack(routing, axis=1) if is_whole else None

    def drop_step(self) -> None:
        """The step under way will not end: it counts for nothing, and its requests are over."""
        self._counts_BLE = self._no_counts(0)
        self.drop_incomplete_step()

    def drop_incomplete_step(self) -> None:
        """Leave the step under way out of the trace, unless all of its layers were recorded."""
        if self._tokens is not None:
            self._tokens.drop_incomplete_step()

    def request_eams(self) -> list[RequestEam]:
        """The EAMs of the running request or, between requests, of the last one; one per sequence
        of the batch. Views: they go on counting while the request runs.
        """
        prefill_BLE = self._counts_BLE[Phase.PREFILL]
        decode_BLE = self._counts_BLE[Phase.DECODE]
        return [RequestEam(p, d) for p, d in zip(prefill_BLE, decode_BLE, strict=True)]

    def begin_tokens(self) -> None:
        """From here on keep the routing of every token. Raises ConfigError if we do already."""
        if self._tokens is not None:
            raise ConfigError("the routing of tokens is being recorded already")
        self._tokens = TokenRecorder(self._num_layers)

    def finish_tokens(self) -> list[SequenceTrace]:
        """Stop keeping tokens; what was kept since `begin_tokens`, one trace per sequence."""
        assert self._tokens is not None, "begin_tokens() comes first"
        tokens, self._tokens = self._tokens, None
        return tokens.finish()

    def drop_tokens(self) -> None:
        """Stop keeping tokens, if we still are."""
        self._tokens = None


class TokenRecorder:
    """Collects the routing of every counted token, step by step. Ctrl-C may come between any two
    statements.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._steps: list[tuple[Step, Ints | None]] = []  # with [T, L, K], or None if incomplete
        self._layers: dict[int, Ints] | None = None  # of the step under way; None: it was dropped

    def begin_step(self, step: Step) -> None:
        """Raises TraceError if the step before was incomplete, and goes on without it."""
        self._finish_step()
        self._steps.append((step, None))
        self._layers = {}

    def record(self, moe_layer_idx: int, top_k_index_TK: Ints) -> None:
        if self._layers is not None:
            self._layers[moe_layer_idx] = top_k_index_TK.copy()

    def drop_incomplete_step(self) -> None:
        if self._layers is not None and len(self._layers) < self._num_layers:
            self._layers = None

    def finish(self) -> list[SequenceTrace]:
        """One trace for each request, in the order in which they ended."""
        self._finish_step()
        finished: list[list[SequenceTrace]] = []
        running: list[list[SequenceTrace]] = []  # of each sequence, its steps so far
        for step_idx, (step, experts_TLK) in enumerate(self._steps):
            for idx, parts in enumerate(running):
                if idx >= step.num_sequences or step.begins_B[idx]:
                    finished.append(parts)
                    running[idx] = []
            num_new = step.num_sequences - len(running)
            running = [*running[: step.num_sequences], *([] for _ in range(num_new))]
            if experts_TLK is not None:
                for idx, parts in enumerate(running):
                    parts.append(_tokens_of(idx, step, step_idx, experts_TLK))
        requests = [[part for part in parts if len(part.steps_T)] for parts in finished + running]
        return [SequenceTrace.concatenate(parts) for parts in requests if parts]

    def _finish_step(self) -> None:
        """Keep the step that just ended."""
        layers = self._layers
        if not layers:
            return
        shapes = {top_k_index_TK.shape for top_k_index_TK in layers.values()}
        if len(layers) != self._num_layers or len(shapes) > 1:
            self._layers = None
            raise TraceError(
                f"a step ran {len(layers)} of {self._num_layers} MoE layers, "
                "or with unequal top-k: no trace of it"
            )
        experts_TLK = np.stack([layers[layer] for layer in range(self._num_layers)], axis=1)
        self._steps[-1] = (self._steps[-1][0], experts_TLK)
        self._layers = None


def _tokens_of(sequence: int, step: Step, step_idx: int, experts_TLK: Ints) -> SequenceTrace:
    """The tokens of one sequence in one step; none if it has ended."""
    mine_T = step.sequence_of_token_T == sequence
    num_tokens = int(mine_T.sum())
    return SequenceTrace(
        experts_TLK[mine_T],
        step.counted_token_ids_T[mine_T],
        np.full(num_tokens, step.phase is Phase.PREFILL),
        np.full(num_tokens, step_idx),
    )
