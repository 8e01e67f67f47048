"""One file of a prompt store: arrays with a checksum over its name and contents, for its user
alone.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from moe_infinity.prefixes.cache_bytes import CacheBytes
from moe_infinity.system.files import open_no_link

MOST_FILE_BYTES = 4 << 30
Array = NDArray[Any]


class Stored(NamedTuple):
    """A block or a state that was read."""

    data: Tensor  # uint8
    experts: Array | None
    parts: CacheBytes


class Damaged(Exception):
    """A file is not what its name says."""


def read_file(path: Path) -> Stored:
    """Read a file. Raises Damaged for one that is not what its name says, OSError, MemoryError."""
    try:
        descriptor = open_no_link(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged("it is a link") from error
        raise
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(opened.fileno())
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_mode & 0o077 or found.st_size > MOST_FILE_BYTES:
            raise Damaged("it is no file of this user alone")
        data = opened.read()
    return contents(path.name, data)


def file_bytes(name: str, stored: Stored) -> bytes:
    """A file of this name, as bytes."""
    arrays = {"data": stored.data.numpy(), "parts": _array(stored.parts.text().encode())}
    if stored.experts is not None:
        arrays["experts"] = np.ascontiguousarray(stored.experts)
    return safetensors.numpy.save(arrays | {"checksum": checksum_of(name, arrays)})


def contents(name: str, data: bytes) -> Stored:
    """Return what a file of this name has. Raises Damaged."""
    try:
        arrays = safetensors.numpy.load(data)
        checksum = arrays.pop("checksum")
        if not np.array_equal(checksum, checksum_of(name, arrays)):
            raise Damaged("its checksum is wrong")
        parts = CacheBytes.read(arrays["parts"].tobytes().decode())
        return Stored(torch.from_numpy(arrays["data"]), arrays.get("experts"), parts)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"it is not one that the server has written: {error!r}") from error


def _array(data: bytes) -> Array:
    return np.frombuffer(data, dtype=np.uint8)


def checksum_of(name: str, arrays: dict[str, Array]) -> Array:
    """The checksum of the name and all arrays, whatever their order."""
    digest = hashlib.sha256(name.encode())
    for key, array in sorted(arrays.items()):
        digest.update(f"{key} {array.dtype} {array.shape}".encode())
        digest.update(array.data if array.size else b"")
    return _array(digest.digest())
