"""A GGUF model, one file or all parts of a split one: its metadata, and which tensor lies where.

Every count, length and offset is checked against the file before anything is read or kept for it,
so that a lying header costs no more than a true one. The gguf package trusts its files, and makes
an array of every token of the vocabulary, which takes seconds; to check its input would be to read
all that it reads. So it is not used here, and the tests compare what both find.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from moe_infinity.checkpoint.file_names import split_files
from moe_infinity.checkpoint.headers import STORED_DTYPES, Extent, StoredTensor
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.gguf.vocabulary import Vocabulary, vocabulary_of
from moe_infinity.kernels.unpack import BLOCKS

VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28  # vocabularies of 300,000 tokens take 20 MB
MAX_DIMS = 4
MAX_ITEMS = 4_000_000  # of an array, or tensors; vocabularies have some 300,000
ALIGNMENT = 32  # where the metadata does not say otherwise
SCALARS = {  # by the number of the type: how struct calls it
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
STRING = 8
ARRAY = 9
TENSOR_BYTES = 24  # of the table, for a tensor without a name or dimensions
ARRAY_BYTES = 16  # of an array before its first item: two types and the number of items
VALUE_BYTES = 13  # of an entry of the metadata without a name
BLOCK = re.compile(r"blk\.(\d{1,6})\.")
EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)(_exps|\.\d+)\.weight")
NO_MODELS = {
    "adapter": "a LoRA adapter", "mmproj": "the vision part of a model",
    "imatrix": "an importance matrix", "vocab": "a vocabulary",
}  # fmt: skip
WITH_CONFIG = (
    "hint: `--config FOLDER` (in Python config_from=) names a folder or hub id that has the config "
    "and, if it has one, the tokenizer"
)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one file."""

    metadata: dict[str, Any]
    tensors: list[StoredTensor]  # stored_dtype is GGML's name of the type, e.g. "Q4_K"
    arrays: dict[str, StoredTensor]  # of the metadata, those of 64 bits an item, by key
    num_bytes: int  # before the first byte of data


@dataclass(frozen=True)
class GgufModel:
    """The headers of a model, all parts together."""

    files: list[Path]
    metadata: dict[str, Any]  # of the first part
    tensors: dict[str, StoredTensor]  # by name in the file
    arrays: dict[str, StoredTensor]  # of the first part's metadata
    header_bytes: int

    @property
    def architecture(self) -> str:
        """GGUF's name of the architecture, e.g. "qwen3moe"."""
        return str(self.metadata["general.architecture"])

    def value(self, key: str, default: Any = None) -> Any:
        """One of the metadata that belong to the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def num_blocks(self) -> int:
        """The number of layers that have tensors, counted from the first."""
        numbers = {int(match[1]) for match in map(BLOCK.match, self.tensors) if match is not None}
        return next(number for number in range(len(numbers) + 1) if number not in numbers)

    @property
    def num_layers(self) -> int:
        """The number of layers, without those that predict more than one token ahead. Raises
        CheckpointError if not all of them have tensors.
        """
        ahead = self.value("nextn_predict_layers", 0)
        num_blocks = self.value("block_count", self.num_blocks + ahead)
        if not all(type(number) is int for number in (ahead, num_blocks)):
            raise CheckpointError(f"{self.files[0]}: its metadata have no number of layers")
        num_layers: int = num_blocks - ahead
        # Some files of DeepSeek-V4 count layers ahead that they leave out of both numbers.
        has_them = f"blk.{num_layers}.nextn.eh_proj.weight" in self.tensors
        if self.architecture == "deepseek4" and num_blocks == self.num_blocks and not has_them:
            return self.num_blocks
        has_ahead = any(".nextn." in name for name in self.tensors)
        if num_blocks < self.num_blocks and not has_ahead:
            raise CheckpointError(
                f"{self.files[0]}: {self.architecture}.block_count is {num_blocks}, but "
                f"{self.num_blocks} layers have tensors"
            )
        if not 0 < num_layers <= self.num_blocks:
            is_draft = not self.num_blocks and has_ahead
            hint = "\nhint: this is the draft of another file: open that one" if is_draft else ""
            raise CheckpointError(
                f"{self.files[0]}: {self.num_blocks} of {num_layers} layers have tensors{hint}"
            )
        return num_layers

    def numbers(self, name: str) -> NDArray[np.float32] | None:
        """The numbers of a tensor in float32, one after another; None for another type."""
        extent = self.tensors[name].extent
        if self.tensors[name].stored_dtype != "F32":
            return None
        return np.fromfile(extent.file, np.float32, extent.num_bytes // 4, offset=extent.offset)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of the file. Raises CheckpointError."""
        embedding = self.tensors.get("token_embd.weight")
        num_rows = None if embedding is None else embedding.shape[0]
        return vocabulary_of(str(self.files[0]), self.metadata, num_rows)

    @cached_property
    def dtype(self) -> str:
        """The dtype that dense weights are widened to unless the user names one."""
        stored = {t.stored_dtype for t in self.tensors.values() if len(t.shape) > 1}
        if stored == {"F32"}:
            return "float32"
        return "float16" if stored <= {"F16", "F32"} else "bfloat16"


def read_gguf(path: Path) -> GgufModel:
    """The model of a file, or of all parts if it is one part of a split. Raises CheckpointError for
    files that are damaged or missing, UnsupportedModelError for another model than an MoE model.
    """
    headers = [read_gguf_header(path)] if path.is_file() else []
    # A merged file keeps the keys of its parts, with a count of 0, whatever it is called.
    is_whole = bool(headers) and headers[0].metadata.get("split.count", 0) in (0, 1)
    files = [path] if is_whole else split_files(path)
    if not is_whole:
        headers = [read_gguf_header(file) for file in files]
    metadata = headers[0].metadata
    _require_model(path, metadata)
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        said = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if not is_whole and said != (len(files), number):
            raise CheckpointError(f"{file}: says that it is part {said[1]} of {said[0]}, from 0")
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{tensor.extent.file}: tensor {tensor.name} is in another part, too"
                )
            tensors[tensor.name] = tensor
    announced = len(tensors) if is_whole else metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != announced:
        raise CheckpointError(
            f"{path}: {len(tensors)} tensors in all parts, {announced} are announced"
        )
    if not any(map(EXPERTS.fullmatch, tensors)):
        raise UnsupportedModelError(
            f"{path}: has no routed experts\n"
            "hint: a dense model needs no offloading, run it with llama.cpp"
        )
    header_bytes = sum(header.num_bytes for header in headers)
    return GgufModel(files, metadata, tensors, headers[0].arrays, header_bytes)


def _require_model(path: Path, metadata: dict[str, Any]) -> None:
    what = metadata.get("general.type", "model")
    architecture = metadata.get("general.architecture")
    if architecture == "clip":
        what = "mmproj"
    if isinstance(what, str) and what in NO_MODELS:
        raise UnsupportedModelError(f"{path}: is {NO_MODELS[what]}, not a model")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{path}: its metadata name no general.architecture")


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of one file. Raises CheckpointError for one that is no GGUF file, is cut off
    or contradicts itself.
    """
    try:
        with file.open("rb") as opened:
            return HeaderReader(file, opened).header()
    except CheckpointError:  # is an OSError
        raise
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


class HeaderReader:
    """Reads a header from the first byte on."""

    def __init__(self, path: Path, opened: BinaryIO) -> None:
        self._path = path
        self._opened = opened
        self._file_bytes = path.stat().st_size
        self._left = min(self._file_bytes, MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        whole = self._left
        self._check_magic()
        num_tensors = self._count(TENSOR_BYTES, "tensors")
        num_values = self._count(VALUE_BYTES, "entries of metadata")
        metadata: dict[str, Any] = {}
        arrays = {}
        for _ in range(num_values):
            key = self._name()
            if key in metadata:
                self._refuse(f"{key} is there twice")
            begin = whole - self._left + ARRAY_BYTES
            metadata[key] = value = self._value(self._number("<I"))
            extent = Extent(self._path, begin, whole - self._left - begin)
            if isinstance(value, list) and extent.num_bytes == 8 * len(value):
                arrays[key] = StoredTensor(key, "I64", (len(value),), extent)
        rows = [self._tensor_row() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"an alignment of {alignment!r}")
        start = -(-(whole - self._left) // alignment) * alignment
        tensors = [self._tensor(*row, start=start, alignment=alignment) for row in rows]
        self._check_places(tensors)
        return GgufHeader(metadata, tensors, arrays, start)

    def _check_magic(self) -> None:
        magic = self._opened.read(4)
        self._left -= len(magic)
        if magic != b"GGUF":
            older = magic in (b"lmgg", b"fmgg", b"tjgg")
            self._refuse("in a format older than GGUF" if older else "not a GGUF file")
        version = self._number("<I")
        if version & 0xFFFF == 0 and version:
            self._refuse(
                "a big-endian GGUF file\n"
                "hint: gguf-convert-endian of the gguf package makes a little-endian one of it"
            )
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            self._refuse(f"GGUF version {version}, which is not known: {known} are")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {what}")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._left:
            self._refuse(
                "its header ends after the file, or after any that is known\n"
                "hint: truncated or damaged: download it again"
            )
        self._left -= num_bytes
        found = self._opened.read(num_bytes)
        if len(found) != num_bytes:
            self._refuse("became shorter while it was read")
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _count(self, bytes_each: int, of: str) -> int:
        count: int = self._number("<Q")
        if count > MAX_ITEMS:
            self._refuse(f"a header of {count} {of}, expected at most {MAX_ITEMS}")
        if count * bytes_each > self._left:
            self._refuse(
                f"a header of {count} {of}, more than the file has room for\n"
                "hint: truncated or damaged: download it again"
            )
        return count

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """Return what `_string` returns `count` times, quickly: vocabularies are large."""
        read = self._opened.read
        length_of = struct.Struct("<Q").unpack
        left = self._left
        found = []
        for _ in range(count):
            prefix = read(8)
            if len(prefix) < 8:
                break
            num_bytes = length_of(prefix)[0]
            left -= 8 + num_bytes
            if left < 0:
                break
            found.append(read(num_bytes).decode("utf-8", "replace"))
        if len(found) < count:
            self._take(self._left + 1)  # refuses
        self._left = left
        return found

    def _name(self) -> str:
        name = self._string()
        if "\ufffd" in name or len(name) > 256 or not name.isprintable():
            self._refuse(f"the name {name[:40]!r}")
        return name

    def _value(self, value_type: int) -> Any:
        if value_type in SCALARS:
            return self._number(SCALARS[value_type])
        if value_type == STRING:
            return self._string()
        if value_type != ARRAY:
            self._refuse(f"metadata of the unknown type {value_type}")
        item_type = self._number("<I")
        if item_type == STRING:
            return self._strings(self._count(8, "strings"))
        if item_type not in SCALARS:
            self._refuse(f"an array of the unknown type {item_type}")
        form = SCALARS[item_type]
        size = struct.calcsize(form)
        count = self._count(size, "numbers")
        return list(struct.unpack(f"<{count}{form[1]}", self._take(count * size)))

    def _tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name()
        num_dims = self._number("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            self._refuse(f"tensor {name} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        least = 2 if "_exps." in name else 0  # the third dimension counts experts, even if one
        last = max(least, 0, *(i for i, size in enumerate(dims) if size != 1))  # ones pad them
        return name, dims[last::-1], self._number("<I"), self._number("<Q")

    def _tensor(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, *, start: int,
        alignment: int,
    ) -> StoredTensor:  # fmt: skip
        weights, block_bytes = self._block_of(name, number)
        if 0 in shape or shape[-1] % weights:
            self._refuse(f"tensor {name} has the shape {list(shape)}, in blocks of {weights}")
        if offset % alignment:
            self._refuse(f"tensor {name} begins at {offset}, no multiple of {alignment}")
        num_bytes = prod(shape) // weights * block_bytes
        if start + offset + num_bytes > self._file_bytes:
            self._refuse(
                f"tensor {name} ends at byte {start + offset + num_bytes:,} of "
                f"{self._file_bytes:,}\nhint: truncated or damaged: download it again"
            )
        stored_dtype = GGMLQuantizationType(number).name
        return StoredTensor(
            name, stored_dtype, shape, Extent(self._path, start + offset, num_bytes)
        )

    def _block_of(self, name: str, number: int) -> tuple[int, int]:
        """The weights and the bytes of a block of the type."""
        try:
            found = GGMLQuantizationType(number).name
        except ValueError:
            self._refuse(f"tensor {name} has type {number}, which is not known")
        if found in STORED_DTYPES:
            return 1, STORED_DTYPES[found][1] // 8
        if found.lower() not in BLOCKS:
            self._refuse(f"tensor {name} has type {found}, which is not supported")
        return BLOCKS[found.lower()]

    def _check_places(self, tensors: list[StoredTensor]) -> None:
        if len({tensor.name for tensor in tensors}) < len(tensors):
            self._refuse("two tensors of one name")
        placed = sorted(tensors, key=lambda tensor: tensor.extent.offset)
        for tensor, following in zip(placed, placed[1:], strict=False):
            if tensor.extent.offset + tensor.extent.num_bytes > following.extent.offset:
                self._refuse(f"tensors {tensor.name} and {following.name} overlap")
