"""The header of a safetensors file: which tensor lies where in it. Believes nothing.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {name: {dtype, shape, data_offsets}}
    the rest  the data

A header that points outside its file, overlaps itself, or contradicts its shapes is refused before
a byte is used.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from moe_infinity.checkpoint.extents import STORED_DTYPES, Extent, StoredTensor
from moe_infinity.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors format


def read_safetensors(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a file and how many bytes it took to know them. Raises CheckpointError."""
    header, header_bytes = _read_header(file)
    return _check_tensors(file, header, data_start=header_bytes), header_bytes


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The parsed header and where the data begins."""
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(f"{file}: not a safetensors file: header length {length}")
            text = stream.read(length)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if len(text) != length:
        raise CheckpointError(f"{file}: truncated: a header of {length} bytes, {len(text)} found")
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise ValueError(f"{names.most_common(1)[0][0]!r} is in it twice")
    return dict(pairs)


def _check_tensors(file: Path, header: dict[str, Any], *, data_start: int) -> list[StoredTensor]:
    """Tensors whose offsets agree with their shapes, each other and the size of the file."""
    tensors = [_parse_tensor(file, name, fields, data_start) for name, fields in header.items()]
    end = data_start
    size = file.stat().st_size
    for tensor in sorted(tensors, key=lambda t: (t.extent.offset, t.extent.num_bytes)):
        if tensor.extent.offset != end:
            beyond = [t for t in tensors if t.extent.offset + t.extent.num_bytes > size]
            culprit = (beyond or [tensor])[0]
            raise CheckpointError(
                f"{file}: the header lies: tensor {culprit.name} "
                f"of {culprit.extent.num_bytes} bytes begins at byte {culprit.extent.offset} "
                f"of {size}, but the tensors before {tensor.name} end at byte {end}"
            )
        end += tensor.extent.num_bytes
    if size != end:
        what = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(
            f"{file}: {what}: {end} bytes expected, {size} found\nhint: download it again"
        )
    return tensors


def _parse_tensor(file: Path, name: str, fields: Any, data_start: int) -> StoredTensor:
    try:
        stored_dtype = fields["dtype"]
        shape = tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        well_formed = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file}: the header's entry of tensor {name} is malformed: {fields!r}"
        ) from error
    if not well_formed or str(stored_dtype) not in STORED_DTYPES:
        raise CheckpointError(
            f"{file}: the header's entry of tensor {name} is malformed: {fields!r}"
        )
    num_bytes = prod(shape) * STORED_DTYPES[stored_dtype][1] // 8
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{file}: the header lies: tensor {name} of shape {list(shape)} and dtype "
            f"{stored_dtype} needs {num_bytes} bytes, its offsets give {end - begin}"
        )
    return StoredTensor(name, stored_dtype, shape, Extent(file, data_start + begin, num_bytes))
