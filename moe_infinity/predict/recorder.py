"""Counts the routing of every step in the request's EAM and, on demand, keeps it token by token.

Every sequence of a batch is a request of its own. It begins with a step that finds its KV cache
empty. A step with another number of sequences than the one before begins all of them. Padding is
left out, and so are the tokens that a finished sequence is given while others of its batch go on.
A server names its sequences: each is a place that one request after another takes, and a step has
tokens of some of them only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.predict.eam import BatchEam, RequestEam
from moe_infinity.predict.tracefile import SequenceTrace


class Recorder:
    """Fed by the runtime: one `begin_step` per forward pass, one `record` per MoE layer."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_layers = num_layers
        self.num_experts = num_experts
        self.step = Step(Phase.PREFILL, 1, 0, begins_B=np.ones(1, dtype=bool))  # the current one
        self._sequence_of_token_T: Ints = np.zeros(0, dtype=np.int64)
        self._batch = BatchEam(0, num_layers, num_experts)
        self._tokens: TokenRecorder | None = None

    def begin_step(self, step: Step) -> list[RequestEam]:
        """A forward pass begins; gives the requests that ended because others take their place."""
        eams = self._batch.requests()
        if step.num_sequences != self._batch.num_sequences:
            step = replace(step, begins_B=np.ones(step.num_sequences, dtype=bool))
            self._batch = BatchEam(step.num_sequences, self._num_layers, self.num_experts)
        elif step.begins_B.any():
            self._batch.begin(step.begins_B)
        if self._tokens is not None:
            self._tokens.begin_step(step)
        self.step = step
        self._sequence_of_token_T = step.sequence_of_token_T
        return [e for i, e in enumerate(eams) if i >= step.num_sequences or step.begins_B[i]]

    def record(self, moe_layer_idx: int, experts_TK: Ints) -> Ints:
        """Record the routing of one layer, of as many tokens as `begin_step` announced. Gives back
        the part that counts.
        """
        assert len(experts_TK) == self.step.num_tokens, (experts_TK.shape, self.step)
        counted = experts_TK if self.step.counted_T is None else experts_TK[self.step.counted_T]
        self._batch.add(self.step.phase, moe_layer_idx, self._sequence_of_token_T, counted)
        if self._tokens is not None:
            self._tokens.record(moe_layer_idx, counted)
        return counted

    def drop_step(self) -> None:
        """The step under way will not end: it counts for nothing, and its requests are over."""
        self._batch = BatchEam(0, self._num_layers, self.num_experts)
        self.drop_incomplete_step()

    def drop_incomplete_step(self) -> None:
        """Leave the step under way out of the trace, unless all of its layers were recorded."""
        if self._tokens is not None:
            self._tokens.drop_incomplete_step()

    def request_eams(self) -> list[RequestEam]:
        """The EAMs of the running request or, between requests, of the last one; one per sequence
        of the batch.
        """
        return self._batch.requests()

    def begin_tokens(self) -> None:
        """From here on keep the routing of every token. Raises ConfigError if we do already."""
        if self._tokens is not None:
            raise ConfigError("the routing of tokens is being recorded already")
        self._tokens = TokenRecorder(self._num_layers, self._batch.num_sequences)

    def finish_tokens(self) -> list[SequenceTrace]:
        """Stop keeping tokens; what was kept since `begin_tokens`, one trace per sequence."""
        assert self._tokens is not None, "begin_tokens() comes first"
        tokens, self._tokens = self._tokens, None
        return tokens.finish()

    def drop_tokens(self) -> None:
        """Stop keeping tokens, if we still are."""
        self._tokens = None


class Collected(NamedTuple):
    """What a TokenRecorder has. Replaced in one assignment, so that Ctrl-C leaves the old or the
    new one.
    """

    finished: list[SequenceTrace]  # of requests that ended
    running: list[list[SequenceTrace]]  # of each sequence, its steps so far
    step: Step | None  # the step under way; None: it is no part of a trace
    layers: dict[int, Ints]  # its routing, by MoE layer


class TokenRecorder:
    """Collects the routing of every counted token, sequence by sequence."""

    def __init__(self, num_layers: int, num_sequences: int) -> None:
        self._num_layers = num_layers
        self._step_idx = -1
        self._collected = Collected([], [[] for _ in range(num_sequences)], None, {})

    def begin_step(self, step: Step) -> None:
        """Raises TraceError if the step before was incomplete, and goes on without it."""
        self._flush()
        running = self._collected.running
        self._end_requests(
            [i for i in range(len(running)) if i >= len(step.begins_B) or step.begins_B[i]]
        )
        kept = self._collected.running[: step.num_sequences]
        new: list[list[SequenceTrace]] = [[] for _ in range(step.num_sequences - len(kept))]
        self._collected = Collected(self._collected.finished, kept + new, step, {})
        self._step_idx += 1

    def record(self, moe_layer_idx: int, experts_TK: Ints) -> None:
        self._collected.layers[moe_layer_idx] = experts_TK.copy()

    def drop_incomplete_step(self) -> None:
        if len(self._collected.layers) < self._num_layers:
            self._drop_step()

    def finish(self) -> list[SequenceTrace]:
        self._flush()
        self._end_requests(range(len(self._collected.running)))
        return self._collected.finished

    def _drop_step(self) -> None:
        self._collected = self._collected._replace(step=None, layers={})

    def _flush(self) -> None:
        """Hand the tokens of the step that just ended to their sequences."""
        finished, old_running, step, layers = self._collected
        if step is None or not layers:
            return
        if (
            len(layers) != self._num_layers
            or len({experts_TK.shape for experts_TK in layers.values()}) > 1
        ):
            self._drop_step()
            raise TraceError(
                f"a step ran {len(layers)} of {self._num_layers} MoE layers, "
                "or with unequal top-k: no trace of it"
            )
        experts_TLK = np.stack([layers[layer] for layer in range(self._num_layers)], axis=1)
        sequence_T = step.sequence_of_token_T
        token_ids_T = step.counted_token_ids_T
        running = [parts.copy() for parts in old_running]
        for idx, parts in enumerate(running):
            mine = sequence_T == idx
            if num_tokens := int(mine.sum()):
                parts.append(
                    SequenceTrace(
                        experts_TLK[mine],
                        token_ids_T[mine],
                        np.full(num_tokens, step.phase is Phase.PREFILL),
                        np.full(num_tokens, self._step_idx),
                    )
                )
        self._collected = Collected(finished, running, None, {})

    def _end_requests(self, sequences: Iterable[int]) -> None:
        for idx in sequences:
            finished, running, step, layers = self._collected
            if running[idx]:
                ended = SequenceTrace.concatenate(running[idx])
                left = [[] if i == idx else parts for i, parts in enumerate(running)]
                self._collected = Collected([*finished, ended], left, step, layers)
