"""Safetensors headers: which tensor lies where in which file. Reads headers only, and believes none
of them.

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
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from moe_infinity.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors format

# Name in the header -> (torch's name, bits per element)
STORED_DTYPES = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16),
    "I8": ("int8", 8), "U8": ("uint8", 8), "BOOL": ("bool", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8), "U16": ("uint16", 16),
    "U32": ("uint32", 32), "U64": ("uint64", 64),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a file."""

    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int

    def part(self, index: int, count: int) -> Extent:
        """Part `index` of `count` equal parts."""
        size = self.num_bytes // count
        assert size * count == self.num_bytes, (self, count)
        return Extent(self.file, self.offset + index * size, size)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint, as its header describes it."""

    name: str
    stored_dtype: str  # as in the header, e.g. "BF16"
    shape: tuple[int, ...]
    extent: Extent

    @property
    def dtype(self) -> str:
        """torch's name of the dtype, e.g. "bfloat16"."""
        return STORED_DTYPES[self.stored_dtype][0]


@dataclass(frozen=True, slots=True)
class Headers:
    """All tensors of a checkpoint by name, and what reading that cost."""

    tensors: dict[str, StoredTensor]
    num_bytes: int  # bytes read: the headers


def read_headers(files: Iterable[Path]) -> Headers:
    """Headers of all shards. Raises CheckpointError for a missing, truncated or lying file, or a
    name given twice.
    """
    tensors: dict[str, StoredTensor] = {}
    num_bytes = 0
    for file in files:
        header, header_bytes = _read_header(file)
        num_bytes += header_bytes
        for tensor in _check_tensors(file, header, data_start=header_bytes):
            if tensor.name in tensors:
                other = tensors[tensor.name].extent.file.name
                raise CheckpointError(
                    f"tensor {tensor.name} is in {other} and again in {file.name}"
                )
            tensors[tensor.name] = tensor
    return Headers(tensors, num_bytes)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder. Raises CheckpointError if there are none or a
    shard is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():  # the order in which transformers looks
        return [single]
    if not index.exists():
        raise CheckpointError(f"{folder}: neither {single.name} nor {index.name} is there")
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors shards: {error!r}") from error
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: "
            f"{', '.join(missing[:3])}\nhint: download the checkpoint again"
        )
    return [folder / name for name in names]


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
    end, size = data_start, file.stat().st_size
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
        stored_dtype, shape = fields["dtype"], tuple(fields["shape"])
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
