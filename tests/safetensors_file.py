"""Read and write safetensors files byte by byte, so that tests can make broken ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(file: Path) -> tuple[Header, bytes]:
    """Header and data, as they lie in the file."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(file: Path, header: Header | bytes, data: bytes = b"") -> Path:
    """A file with this header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def edit_header(file: Path, edit: Callable[[Header], object]) -> None:
    """Let `edit` change the header in place; the data stay."""
    header, data = read(file)
    edit(header)
    write(file, header, data)


def rebuild(file: Path, edit: Callable[[dict[str, tuple[str, list[int], bytes]]], object]) -> None:
    """Let `edit` change {name: (dtype, shape, bytes)}; the new header tells the truth."""
    header, data = read(file)
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: (f["dtype"], f["shape"], data[f["data_offsets"][0] : f["data_offsets"][1]])
        for name, f in header.items()
    }
    edit(tensors)
    new_header: Header = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, raw) in tensors.items():
        new_header[name] = entry(dtype, shape, end, end + len(raw))
        end += len(raw)
    write(file, new_header, b"".join(raw for _, _, raw in tensors.values()))
