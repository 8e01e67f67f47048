"""The tensors of a checkpoint as its files describe them: name, dtype, shape, and which bytes of
which file. Only headers are read.

    safetensors   a JSON header. Its library checks that the tensors fill the file without a gap,
                  so where one lies follows from the sizes of those before it
    .bin          a zip archive, nothing compressed: NAME/data.pkl is {name: tensor}, a tensor
                  being a storage, an offset in it, a shape and strides; NAME/data/KEY has the
                  bytes of a storage

torch reads the pickle of a .bin as one of weights only: it runs no code. On the meta device it
reads no storage either, but notes where each begins; older versions do so for fake tensors only,
which take six times as long. So the experts are read in place, as from safetensors. GGUF files are
in gguf/file.py.

Private names of torch used here: `_subclasses.fake_tensor` and `_checkpoint_offset`, both of which
the notes on serialization in torch's documentation have.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_infinity.errors import CheckpointError

# Name in the header -> (torch's name, bits per element)
STORED_DTYPES = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16),
    "I8": ("int8", 8), "U8": ("uint8", 8), "BOOL": ("bool", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8), "U16": ("uint16", 16),
    "U32": ("uint32", 32), "U64": ("uint64", 64),
}  # fmt: skip
STORED_NAMES = {name: stored for stored, (name, _) in STORED_DTYPES.items()}
META_READS_NOTHING = Version(torch.__version__) >= Version("2.13")
MAX_PICKLE_BYTES = 100_000_000  # as for a safetensors header
MAX_NAME_LETTERS = 512  # of a tensor: patterns that are searched in it take their square
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and extra field


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a file."""

    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def after(self, count: int) -> Extent:
        """The extent of the same size that begins `count` sizes further on."""
        return Extent(self.file, self.offset + count * self.num_bytes, self.num_bytes)

    def equal_part(self, index: int, count: int) -> Extent:
        """Part number `index` of `count` equal parts."""
        size = self.num_bytes // count
        assert size * count == self.num_bytes, (self, count)
        return Extent(self.file, self.offset + index * size, size)


def are_neighbours(extents: Sequence[Extent]) -> bool:
    """True if each begins where the one before it ends."""
    return all((a.file, a.end) == (b.file, b.offset) for a, b in pairwise(extents))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint, as its header describes it."""

    name: str
    stored_dtype: str  # as in the header, e.g. "BF16"
    shape: tuple[int, ...]
    extent: Extent
    undo: Callable[[Tensor], Tensor] | None = None  # of what a converter did; not of experts

    @property
    def dtype(self) -> str:
        """torch's name of the dtype, e.g. "bfloat16"."""
        return STORED_DTYPES[self.stored_dtype][0]

    @property
    def parts(self) -> tuple[tuple[str, StoredTensor], ...]:
        """The one tensor that stands for the weight, in the form of PackedTensor.parts."""
        return (("", self),)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Weights of one kind differ in nothing but their values."""
        return self.stored_dtype, self.shape


@dataclass(frozen=True, slots=True)
class Headers:
    """All tensors of a checkpoint by name, and what reading that cost."""

    tensors: dict[str, StoredTensor]
    num_bytes: int  # bytes read: the headers


def read_headers(files: Iterable[Path]) -> Headers:
    """Headers of all shards, safetensors or PyTorch's. Raises CheckpointError for a missing,
    truncated or lying file, or a name given twice.
    """
    tensors: dict[str, StoredTensor] = {}
    num_bytes = 0
    for file in files:
        read = read_pickled if file.suffix == ".bin" else read_safetensors
        found, header_bytes = read(file)
        num_bytes += header_bytes
        for tensor in found:
            if len(tensor.name) > MAX_NAME_LETTERS:
                raise CheckpointError(f"{file}: the name {tensor.name[:40]}... is too long")
            if tensor.name in tensors:
                other = tensors[tensor.name].extent.file.name
                raise CheckpointError(
                    f"tensor {tensor.name} is in {other} and again in {file.name}"
                )
            tensors[tensor.name] = tensor
    return Headers(tensors, num_bytes)


def read_safetensors(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a safetensors file, and the bytes read for that. Raises CheckpointError."""
    try:
        with safe_open(file, framework="np") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            described = [(name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices]
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file: {error}\n"
            "hint: truncated or damaged: download it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    tensors = []
    end = 0  # of the tensors so far, from the first byte of data
    for name, dtype, shape in described:
        if dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {dtype}, which is not supported"
            )
        num_bytes = prod(shape) * STORED_DTYPES[dtype][1] // 8
        tensors.append((name, dtype, shape, end, num_bytes))
        end += num_bytes
    header_bytes = file.stat().st_size - end
    return [
        StoredTensor(name, dtype, shape, Extent(file, header_bytes + start, num_bytes))
        for name, dtype, shape, start, num_bytes in tensors
    ], header_bytes


def read_pickled(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a .bin, and the bytes read for that. Raises CheckpointError."""
    try:
        storages, num_bytes = _read_archive(file)
        with nullcontext() if META_READS_NOTHING else FakeTensorMode():
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
    """The bytes of every storage by their offset, and the bytes that the list of tensors takes.
    Raises whatever a broken archive leads to.
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
    """The bytes of an entry."""
    stream.seek(info.header_offset)
    lengths = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
    return Extent(file, info.header_offset + LOCAL_HEADER.size + sum(lengths), info.file_size)


def _check(file: Path, name: Any, tensor: Any, storages: dict[int, Extent]) -> StoredTensor:
    """The tensor. Raises CheckpointError unless the file holds all of it in one piece."""
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
