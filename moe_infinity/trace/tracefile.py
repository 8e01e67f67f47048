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
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError

Ints = NDArray[np.int64]

# What numpy and zipfile raise at files that are no archive of arrays; RuntimeError when encrypted,
# MemoryError when an array claims to be larger than anything.
DAMAGED = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


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
    assert int(whole.experts_TLK.max(initial=0)) < num_experts, num_experts
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
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def load_trace(path: Path) -> list[SequenceTrace]:
    """Read a trace, ours or one with only `experts` and `offsets`. Raises TraceError if it is not
    one.
    """
    try:
        arrays = _read_arrays(path)
    except DAMAGED as error:
        raise TraceError(f"{path}: not a trace: {error}") from error
    experts, offsets = arrays["experts"], arrays["offsets"]
    num_tokens = experts.shape[0] if experts.ndim == 3 else 0
    is_trace = (
        experts.ndim == 3
        and experts.dtype.kind in "iu"
        and offsets.dtype.kind in "iu"
        and offsets.ndim == 1
        and len(offsets) > 0
        and bool((offsets[1:] >= offsets[:-1]).all())
        and (offsets[0], offsets[-1]) == (0, num_tokens)
    )
    token_ids = arrays.get("token_ids", np.full(num_tokens, -1))
    is_prefill = arrays.get("is_prefill", np.zeros(num_tokens, bool))
    if not is_trace or not token_ids.shape == is_prefill.shape == (num_tokens,):
        shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
        raise TraceError(f"{path}: not a trace, its arrays do not belong together: {shapes}")
    return [
        SequenceTrace(experts[a:b], token_ids[a:b], is_prefill[a:b])
        for a, b in zip(offsets[:-1], offsets[1:], strict=True)
    ]


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz. Raises OSError, ValueError and what a damaged zip raises."""
    with path.open("rb") as stream:
        file = np.load(stream, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("one array, not an archive of arrays")
        arrays = {name: file[name] for name in file.files}
    if not {"experts", "offsets"} <= arrays.keys():
        raise ValueError(f"arrays {sorted(arrays)}, expected at least experts and offsets")
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise ValueError("an archive of other files than arrays")
    return arrays
