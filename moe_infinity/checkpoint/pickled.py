"""PyTorch's own checkpoints (.bin): which tensor lies where in the file.

    a zip archive, nothing compressed
    NAME/data.pkl    {name: tensor}, a tensor being a storage, an offset in it, a shape and strides
    NAME/data/KEY    the bytes of one storage

torch reads the pickle as one of weights only: it runs no code. On the meta device it reads no
storage either, but notes where each begins. So the experts are read in place, as from safetensors.

Private name of torch used here: `_checkpoint_offset`.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor

from moe_infinity.checkpoint.extents import STORED_NAMES, Extent, StoredTensor
from moe_infinity.errors import CheckpointError

MAX_PICKLE_BYTES = 100_000_000  # as for a safetensors header
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and extra field


def read_pickled(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a .bin and how many bytes it took to know them. Raises CheckpointError."""
    try:
        storages, num_bytes = _read_archive(file)
        tensors = torch.load(file, map_location="meta", weights_only=True)
    except UnpicklingError as error:  # torch's message tells how to run the code in it
        raise CheckpointError(
            f"{file}: its list of tensors is broken, or asks for what no list of tensors needs"
        ) from error
    except Exception as error:  # a broken archive or pickle may raise anything
        raise CheckpointError(
            f"{file}: not a whole PyTorch checkpoint: {error}\n"
            "hint: download it again; files from before PyTorch 1.6 must be saved anew"
        ) from error
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{file}: not a dictionary of tensors")
    # A pickle may give its dictionary an `items` of its own.
    return [_check(file, *item, storages) for item in dict.items(tensors)], num_bytes


def _read_archive(file: Path) -> tuple[dict[int, Extent], int]:
    """Where the bytes of every storage lie, by their offset, and how many bytes the list of tensors
    takes. Raises whatever a broken archive leads to.
    """
    with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        if compressed := [i.filename for i in entries.values() if i.compress_type]:
            raise ValueError(f"{compressed[0]} is compressed")
        (pickle_name,) = [name for name in entries if name.endswith("/data.pkl")]
        pickle_bytes = entries[pickle_name].file_size
        if pickle_bytes > MAX_PICKLE_BYTES:
            raise ValueError(f"{pickle_name} is too large to be a list of tensors")
        prefix = pickle_name.removesuffix("data.pkl")
        order = f"{prefix}byteorder"
        if order in entries and archive.read(order) != b"little":
            raise ValueError("its numbers are not little-endian")
        extents = [
            _extent_of(file, stream, info)
            for name, info in entries.items()
            if name.startswith(f"{prefix}data/")
        ]
    num_bytes = pickle_bytes + LOCAL_HEADER.size * len(extents)
    return {extent.offset: extent for extent in extents}, num_bytes


def _extent_of(file: Path, stream: IO[bytes], info: zipfile.ZipInfo) -> Extent:
    """Where the bytes of an entry lie."""
    stream.seek(info.header_offset)
    lengths = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
    return Extent(file, info.header_offset + LOCAL_HEADER.size + sum(lengths), info.file_size)


def _check(file: Path, name: Any, tensor: Any, storages: dict[int, Extent]) -> StoredTensor:
    """The tensor, if the file holds all of it in one piece."""
    dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
    if not isinstance(name, str) or not isinstance(tensor, Tensor) or dtype not in STORED_NAMES:
        raise CheckpointError(f"{file}: {name} is no tensor of a dtype that a checkpoint may have")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise CheckpointError(f"{file}: tensor {name} does not lie in one piece")
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start not in storages:
        raise CheckpointError(f"{file}: the bytes of tensor {name} are not in it")
    storage = storages[start]
    skipped = int(tensor.storage_offset()) * tensor.element_size()
    room = min(storage.num_bytes, file.stat().st_size - storage.offset)
    if skipped + tensor.nbytes > room:
        raise CheckpointError(
            f"{file}: tensor {name} of {tensor.nbytes} bytes ends beyond its storage: truncated?"
        )
    extent = Extent(file, storage.offset + skipped, tensor.nbytes)
    return StoredTensor(name, STORED_NAMES[dtype], tuple(tensor.shape), extent)
