"""Traces on disk: one .npz with the routing of every token of every sequence.

    experts      uint8 or uint16 [tokens, MoE rows, k]  expert ids, per token in the router's order
    offsets      int64 [sequences + 1]                  sequence i: offsets[i] .. offsets[i + 1]
    token_ids    int64 [tokens]  optional               the input token, -1 unknown
    is_prefill   bool [tokens]   optional               part of the prompt
    num_experts  int64           optional               experts per row

A file is complete or it does not exist: it is written beside its name and renamed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceTrace:
    """The routing of one sequence, prompt and output: T tokens, L MoE rows, K experts per token."""

    experts_TLK: NDArray[np.integer]
    token_ids_T: Ints  # -1 where unknown
    is_prefill_T: NDArray[np.bool_]

    @classmethod
    def concatenate(cls, parts: Sequence[SequenceTrace]) -> SequenceTrace:
        return cls(
            np.concatenate([part.experts_TLK for part in parts]),
            np.concatenate([part.token_ids_T for part in parts]),
            np.concatenate([part.is_prefill_T for part in parts]),
        )


def save_trace(path: Path, sequences: Sequence[SequenceTrace], *, num_experts: int) -> None:
    """Write the sequences to `path`. Raises TraceError, and leaves neither a partial file nor a
    changed old one.
    """
    if not sequences:
        raise TraceError(f"{path}: nothing was recorded, so no trace is written")
    whole = SequenceTrace.concatenate(sequences)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(
                file,
                experts=whole.experts_TLK.astype(np.uint8 if num_experts <= 256 else np.uint16),
                offsets=np.cumsum([0, *(len(s.token_ids_T) for s in sequences)], dtype=np.int64),
                token_ids=whole.token_ids_T,
                is_prefill=whole.is_prefill_T,
                num_experts=np.int64(num_experts),
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise TraceError(
            f"{path}: the trace could not be written: {error.strerror or error}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def load_trace(path: Path) -> list[SequenceTrace]:
    """Read a trace, ours or one with only `experts` and `offsets`. Raises TraceError if it is not
    one.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            experts, offsets = file["experts"], file["offsets"].astype(np.int64)
            token_ids = file["token_ids"] if "token_ids" in file else np.full(len(experts), -1)
            is_prefill = (
                file["is_prefill"] if "is_prefill" in file else np.zeros(len(experts), bool)
            )
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise TraceError(f"{path}: not a trace: {error}") from error
    ascending = offsets.ndim == 1 and len(offsets) > 0 and bool((np.diff(offsets) >= 0).all())
    if experts.ndim != 3 or not ascending or offsets[0] != 0 or offsets[-1] != len(experts):
        raise TraceError(
            f"{path}: not a trace: "
            f"experts {experts.shape} and offsets {offsets.shape} do not belong together"
        )
    if len(token_ids) != len(experts) or len(is_prefill) != len(experts):
        raise TraceError(
            f"{path}: not a trace: {len(experts)} tokens of routing, {len(token_ids)} token ids"
        )
    return [
        SequenceTrace(experts[a:b], token_ids[a:b], is_prefill[a:b])
        for a, b in zip(offsets[:-1], offsets[1:], strict=True)
    ]
