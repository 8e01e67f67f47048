"""PyTorch's own checkpoints (.bin): which tensor lies where in the file, without running what the
pickle says.

    a zip archive, nothing compressed
    NAME/data.pkl    {name: tensor}, a tensor being a storage, an offset in it, a shape and strides
    NAME/data/KEY    the bytes of one storage

Of all a pickle can ask for, only the five things such a file needs are given. So the experts are
read in place, as from safetensors.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from moe_infinity.checkpoint.extents import STORED_DTYPES, Extent, StoredTensor
from moe_infinity.errors import CheckpointError

MAX_PICKLE_BYTES = 100_000_000  # as for a safetensors header
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and extra field
# torch's name of a storage class without "Storage" -> dtype in a safetensors header
STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64",
    "Int": "I32", "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL",
}  # fmt: skip


# What zipfile and struct raise for broken, encrypted or otherwise compressed files.
BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, OSError, EOFError, RuntimeError,
)  # fmt: skip


class Storage(NamedTuple):
    """A run of elements in an entry of the archive."""

    key: str
    stored_dtype: str


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """What the pickle says of one tensor; believed only once it was checked."""

    storage: Storage
    first: Any  # element of the storage
    shape: Any
    strides: Any


def read_pickled(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a .bin and how many bytes it took to know them. Raises CheckpointError."""
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            (pickle_name,) = [name for name in entries if name.endswith("/data.pkl")]
            prefix = pickle_name.removesuffix("data.pkl")
            if entries[pickle_name].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{file}: {pickle_name} is too large to be a list of tensors")
            if (order := entries.get(f"{prefix}byteorder")) is not None:
                with archive.open(order) as text:
                    if text.read(len(b"little") + 1) != b"little":
                        raise CheckpointError(f"{file}: its numbers are not little-endian")
            with archive.open(pickle_name) as pickled:
                tensors = _unpickle(file, pickled)
            places = {
                name: _extent_of(file, stream, info)
                for name, info in entries.items()
                if name.startswith(f"{prefix}data/")
            }
            num_bytes = entries[pickle_name].file_size + LOCAL_HEADER.size * len(places)
    except BROKEN as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{file}: not a whole PyTorch checkpoint: {error}\n"
            "hint: download it again; files from before PyTorch 1.6 must be saved anew"
        ) from error
    return [
        _check(file, name, tensor, places.get(f"{prefix}data/{tensor.storage.key}"))
        for name, tensor in tensors.items()
    ], num_bytes


class _Unpickler(pickle._Unpickler):
    """Gives a pickle nothing but descriptions of tensors. The unpickler in C would reserve memory
    for whatever number a memo is given.
    """

    def persistent_load(self, pid: Any) -> Storage:
        kind, stored_dtype, key, _, _ = pid
        if kind != "storage" or stored_dtype not in STORAGES.values():
            raise ValueError(f"a persistent object of kind {kind!r}")
        return Storage(str(key), stored_dtype)

    def find_class(self, module: str, name: str) -> Any:
        given: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
            ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
        }
        if (module, name) in given:
            return given[module, name]
        if module == "torch" and name.removesuffix("Storage") in STORAGES:
            return STORAGES[name.removesuffix("Storage")]
        raise CheckpointError(
            f"the pickle asks for {module}.{name}, which no list of tensors needs"
        )


class _RebuildTensor:
    """No function: a pickle could set attributes of that."""

    __slots__ = ()

    def __call__(
        self, storage: Storage, first: Any, shape: Any, strides: Any, *_: Any
    ) -> PickledTensor:
        return PickledTensor(storage, first, shape, strides)


class _RebuildParameter:
    __slots__ = ()

    def __call__(self, tensor: PickledTensor, *_: Any) -> PickledTensor:
        return tensor


def _unpickle(file: Path, pickled: IO[bytes]) -> dict[str, PickledTensor]:
    try:
        found = _Unpickler(pickled).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file}: refused: {error}") from error
    except Exception as error:  # a broken pickle may raise anything
        raise CheckpointError(f"{file}: its list of tensors cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str)
        and isinstance(tensor, PickledTensor)
        and isinstance(tensor.storage, Storage)
        for name, tensor in dict.items(found)
    ):
        raise CheckpointError(f"{file}: not a plain dictionary of tensors")
    return dict(dict.items(found))


def _extent_of(file: Path, stream: IO[bytes], info: zipfile.ZipInfo) -> Extent:
    """Where the bytes of an entry lie."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{file}: {info.filename} is compressed")
    stream.seek(info.header_offset)
    lengths = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
    return Extent(file, info.header_offset + LOCAL_HEADER.size + sum(lengths), info.file_size)


def _check(file: Path, name: str, tensor: PickledTensor, place: Extent | None) -> StoredTensor:
    """The tensor, if the file holds all of it in one piece."""
    if place is None:
        raise CheckpointError(f"{file}: the bytes of tensor {name} are not in it")
    parts = tensor.first, tensor.shape, tensor.strides
    numbers = (parts[0], *parts[1], *parts[2]) if all(type(p) is tuple for p in parts[1:]) else ()
    if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f"{file}: the entry of tensor {name} is malformed: {parts!r}")
    shape: tuple[int, ...] = tensor.shape
    wanted = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if any(n != w for n, w, size in zip(tensor.strides, wanted, shape, strict=False) if size > 1):
        raise CheckpointError(f"{file}: tensor {name} does not lie in one piece")
    item_bytes = STORED_DTYPES[tensor.storage.stored_dtype][1] // 8
    num_bytes = prod(shape) * item_bytes
    offset = place.offset + tensor.first * item_bytes
    end = min(place.offset + place.num_bytes, file.stat().st_size)
    if offset + num_bytes > end:
        raise CheckpointError(
            f"{file}: tensor {name} of {num_bytes} bytes ends beyond its storage: truncated?"
        )
    return StoredTensor(name, tensor.storage.stored_dtype, shape, Extent(file, offset, num_bytes))
