"""Watches the routing of every step: counts it into the request's EAM and, on demand, keeps it
token by token.

A request begins with a step that finds an empty KV cache, or another number of sequences than the
one before; every sequence of a batch is a request of its own. Padding is left out, and so is what a
finished sequence of a batch is fed while the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError
from moe_infinity.experts import Phase
from moe_infinity.trace.eam import BatchEam, RequestEam
from moe_infinity.trace.tracefile import SequenceTrace

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass as the model was called: B sequences of S new tokens, flattened to T = B *
    S.
    """

    phase: Phase
    num_sequences: int  # B
    tokens_per_sequence: int  # S
    begins_request: bool  # the KV cache was empty
    counted_T: NDArray[np.bool_] | None = None  # False for padding; None: every token counts
    token_ids_T: Ints | None = None  # None when the model was called with embeddings

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.tokens_per_sequence


class Recorder:
    """Fed by the runtime: one `begin_step` per forward pass, one `record` per MoE row."""

    def __init__(self, num_rows: int, num_experts: int) -> None:
        self._num_rows = num_rows
        self.num_experts = num_experts
        self.step = Step(Phase.PREFILL, 1, 0, begins_request=True)  # the current one
        self._sequence_of_token_T: Ints = np.zeros(0, dtype=np.int64)
        self._batch = BatchEam(0, num_rows, num_experts)
        self._tokens: TokenRecorder | None = None

    def begin_step(self, step: Step) -> None:
        begins_request = step.begins_request or step.num_sequences != self._batch.num_sequences
        if begins_request:
            self._batch = BatchEam(step.num_sequences, self._num_rows, self.num_experts)
        if self._tokens is not None:
            self._tokens.begin_step(step, begins_request=begins_request)
        self.step = step
        sequence = np.repeat(np.arange(step.num_sequences), step.tokens_per_sequence)
        self._sequence_of_token_T = sequence if step.counted_T is None else sequence[step.counted_T]

    def record(self, moe_row: int, experts_TK: Ints) -> None:
        """The routing of one row in this step; T as announced by `begin_step`."""
        assert len(experts_TK) == self.step.num_tokens, (experts_TK.shape, self.step)
        counted = experts_TK if self.step.counted_T is None else experts_TK[self.step.counted_T]
        self._batch.add(self.step.phase, moe_row, self._sequence_of_token_T, counted)
        if self._tokens is not None:
            self._tokens.record(moe_row, counted)

    def request_eams(self) -> list[RequestEam]:
        """The EAMs of the running request or, between requests, of the last one; one per sequence
        of the batch.
        """
        return self._batch.requests()

    def begin_tokens(self) -> None:
        """From here on keep the routing of every token."""
        self._tokens = TokenRecorder(self._num_rows, self._batch.num_sequences)

    def finish_tokens(self) -> list[SequenceTrace]:
        """Stop keeping tokens; what was kept since `begin_tokens`, one trace per sequence."""
        assert self._tokens is not None, "begin_tokens() comes first"
        tokens, self._tokens = self._tokens, None
        return tokens.finish()

    def drop_tokens(self) -> None:
        """Stop keeping tokens, if we still are."""
        self._tokens = None


class TokenRecorder:
    """Collects the routing of every counted token, sequence by sequence."""

    def __init__(self, num_rows: int, num_sequences: int) -> None:
        self._num_rows = num_rows
        self._step: Step | None = None
        self._rows: dict[int, Ints] = {}
        self._finished: list[SequenceTrace] = []
        self._running: list[list[SequenceTrace]] = [[] for _ in range(num_sequences)]

    def begin_step(self, step: Step, *, begins_request: bool) -> None:
        self._flush()
        if begins_request:
            self._end_request()
            self._running = [[] for _ in range(step.num_sequences)]
        self._step = step

    def record(self, moe_row: int, experts_TK: Ints) -> None:
        self._rows[moe_row] = experts_TK.copy()

    def finish(self) -> list[SequenceTrace]:
        self._flush()
        self._end_request()
        return self._finished

    def _flush(self) -> None:
        """Hand the tokens of the step that just ended to their sequences."""
        step, rows = self._step, self._rows
        self._step, self._rows = None, {}
        if step is None or not rows:
            return
        if len(rows) != self._num_rows or len({row.shape for row in rows.values()}) > 1:
            raise TraceError(
                f"a step ran {len(rows)} of {self._num_rows} MoE rows, or with unequal top-k: "
                "no trace of it"
            )
        experts_TLK = np.stack([rows[row] for row in range(self._num_rows)], axis=1)
        sequence_T = np.repeat(np.arange(step.num_sequences), step.tokens_per_sequence)
        token_ids_T = (
            step.token_ids_T if step.token_ids_T is not None else np.full(step.num_tokens, -1)
        )
        if step.counted_T is not None:
            sequence_T, token_ids_T = sequence_T[step.counted_T], token_ids_T[step.counted_T]
        for idx, parts in enumerate(self._running):
            mine = sequence_T == idx
            is_prefill = np.full(int(mine.sum()), step.phase is Phase.PREFILL)
            parts.append(SequenceTrace(experts_TLK[mine], token_ids_T[mine], is_prefill))

    def _end_request(self) -> None:
        self._finished += [SequenceTrace.concatenate(parts) for parts in self._running if parts]
        self._running = []
