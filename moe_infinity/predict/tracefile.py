"""Traces on disk: one .npz with the routing of every token of every sequence.

    experts      uint8 or uint16 [tokens, MoE layers, k]  expert ids in the router's order
    offsets      int64 [sequences + 1]                    sequence i: offsets[i] .. offsets[i + 1]
    token_ids    int64 [tokens]  optional                 the input token, -1 unknown
    is_prefill   bool [tokens]   optional                 part of the prompt
    steps        int64 [tokens]  optional                 tokens of a forward pass share a number
    num_experts  int64           optional                 experts per MoE layer

Without `token_ids`, a `sequences.jsonl` beside the file that lists `generated_tokens` for each
sequence gives each different string a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError
from moe_infinity.experts import Ints
from moe_infinity.output import DAMAGED, read_arrays, write_arrays

MOST_EXPERTS = 4096  # per layer: more is a damaged file, not a model


class SequenceTrace(NamedTuple):
    """The routing of one sequence, prompt and output. T tokens, L MoE layers, K experts a token."""

    experts_TLK: NDArray[np.integer]
    token_ids_T: Ints  # -1 where unknown
    is_prefill_T: NDArray[np.bool_]
    steps_T: Ints  # number of the forward pass each token was in, counted over the whole trace

    @classmethod
    def concatenate(cls, parts: Sequence[SequenceTrace]) -> SequenceTrace:
        return cls._make(map(np.concatenate, zip(*parts, strict=True)))

    def first(self, num_tokens: int | None) -> SequenceTrace:
        """The first tokens of the sequence; None: all."""
        return SequenceTrace._make(array[:num_tokens] for array in self)


class Trace(NamedTuple):
    """The content of a file."""

    sequences: list[SequenceTrace]
    num_experts: int  # per layer; the highest id + 1 where the file does not say


def save_trace(path: Path, sequences: Sequence[SequenceTrace], *, num_experts: int) -> None:
    """Write the sequences to `path`. Raises TraceError, and leaves neither a partial file nor a
    changed old one.
    """
    if not sequences:
        raise TraceError(f"{path}: nothing was recorded, so no trace is written")
    whole = SequenceTrace.concatenate(sequences)
    assert int(whole.experts_TLK.max(initial=0)) < num_experts, num_experts
    arrays = {
        "experts": whole.experts_TLK.astype(np.uint8 if num_experts <= 256 else np.uint16),
        "offsets": np.cumsum([0, *(len(s.token_ids_T) for s in sequences)], dtype=np.int64),
        "token_ids": whole.token_ids_T,
        "is_prefill": whole.is_prefill_T,
        "steps": whole.steps_T,
        "num_experts": np.int64(num_experts),
    }
    write_arrays(path, arrays, what="trace")


def load_trace(path: Path) -> Trace:
    """Read a trace, ours or one with only `experts` and `offsets`. Raises TraceError if it is not
    one.
    """
    try:
        arrays = read_arrays(path, expected={"experts", "offsets"})
    except DAMAGED as error:
        raise TraceError(f"{path}: not a trace: {error}") from error
    experts = arrays["experts"]
    offsets = arrays["offsets"]
    if not _is_trace(experts, offsets):
        raise TraceError(_mismatch(path, arrays))
    num_tokens = len(experts)
    token_ids = arrays["token_ids"] if "token_ids" in arrays else _ids_beside(path, offsets)
    is_prefill = arrays.get("is_prefill", np.zeros(num_tokens, bool))
    steps = arrays.get("steps", np.zeros(num_tokens, np.int64))
    most = int(experts.max(initial=0)) + 1
    num_experts = arrays.get("num_experts", np.int64(most))
    belong_together = (
        {token_ids.shape, is_prefill.shape, steps.shape} == {(num_tokens,)}
        and {token_ids.dtype.kind, steps.dtype.kind, num_experts.dtype.kind} <= {"i", "u"}
        and is_prefill.dtype.kind == "b"
        and num_experts.ndim == 0
        and most <= num_experts <= MOST_EXPERTS
        and _rise_within_sequences(steps, offsets)
    )
    if not belong_together:
        raise TraceError(_mismatch(path, arrays))
    if "steps" not in arrays:
        steps = _one_after_the_other(is_prefill, offsets)
    sequences = [
        SequenceTrace(experts[a:b], token_ids[a:b], is_prefill[a:b], steps[a:b])
        for a, b in zip(offsets[:-1], offsets[1:], strict=True)
    ]
    return Trace(sequences, int(num_experts))


def _is_trace(experts: NDArray[Any], offsets: NDArray[Any]) -> bool:
    """Distinct expert ids of every token in every layer, and offsets that cover all tokens."""
    if experts.ndim != 3 or {experts.dtype.kind, offsets.dtype.kind} - {"i", "u"}:
        return False
    in_order = np.sort(experts, axis=2)
    return (
        offsets.ndim == 1
        and len(offsets) > 0
        and bool((offsets[1:] >= offsets[:-1]).all())
        and (int(offsets[0]), int(offsets[-1])) == (0, len(experts))
        and not (len(experts) and experts.shape[2] == 0)
        and int(experts.min(initial=0)) >= 0
        and not (in_order[:, :, 1:] == in_order[:, :, :-1]).any()
    )


def _rise_within_sequences(steps_T: Ints, offsets: Ints) -> bool:
    falls_T = np.concatenate([[False], steps_T[1:] < steps_T[:-1]])[: len(steps_T)]
    falls_T[offsets[offsets < len(steps_T)]] = False
    return not falls_T.any()


def _mismatch(path: Path, arrays: Mapping[str, NDArray[Any]]) -> str:
    found = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    return f"{path}: not a trace, its arrays do not belong together: {found}"


def _ids_beside(path: Path, offsets: Ints) -> Ints:
    """Token ids of a trace without any: numbers for the strings in a `sequences.jsonl` next to it,
    which lists `generated_tokens` per sequence. Unknown (-1) where there is none.
    """
    token_ids = np.full(int(offsets[-1]), -1)
    try:
        lines = path.with_name("sequences.jsonl").read_text("utf-8").splitlines()
        strings = [json.loads(line).get("generated_tokens") or [] for line in lines]
    except (OSError, ValueError, AttributeError):
        return token_ids
    if len(strings) != len(offsets) - 1 or not all(isinstance(s, list) for s in strings):
        return token_ids
    number_of: dict[str, int] = {}
    for start, stop, tokens in zip(offsets[:-1], offsets[1:], strings, strict=True):
        ids = [number_of.setdefault(str(t), len(number_of)) for t in tokens[: stop - start]]
        token_ids[start : start + len(ids)] = ids
    return token_ids


def _one_after_the_other(is_prefill_T: NDArray[np.bool_], offsets: Ints) -> Ints:
    """Steps of a trace that has none: sequences one by one, a prompt at once, then token by
    token.
    """
    begins_step_T = ~is_prefill_T
    begins_step_T[offsets[offsets < len(is_prefill_T)]] = True
    steps_T: Ints = np.cumsum(begins_step_T) - 1
    return steps_T
