"""Embeddings whose rows stay in the files of the checkpoint. A token looks up one row, so the table
need not be in memory: half a gigabyte of Qwen3-30B-A3B, and most of a model with a table for each
layer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_infinity.architectures.stored_embedding import StoredEmbedding
from moe_infinity.checkpoint.headers import Extent, StoredTensor
from moe_infinity.checkpoint.packed_plan import PackedDense, modules_as_stored, source_of
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.kernels import uint8_memory
from moe_infinity.memory.mover import LOAD_TIMEOUT_S

LEAST_PACKED_BYTES = 64 << 20  # of a packed table once unpacked: smaller ones are loaded
SEEK_S = 0.02  # of a disk that turns
SLOW_DISK = 10e6  # bytes a second
KEPT_BYTES = 16 << 20  # of the rows that were looked up last


class RowTable:
    """The rows of one weight [R, C], read when they are looked up. The last ones are kept."""

    def __init__(self, weight: StoredTensor | PackedTensor, reader: Reader) -> None:
        self._weight = weight
        self._reader = reader
        ((self._role, self._tensor),) = weight.parts
        self.num_rows, self.num_columns = weight.shape
        self.num_bytes = self._tensor.extent.num_bytes
        self._row_bytes = self.num_bytes // self.num_rows
        self._kept: OrderedDict[int, Tensor] = OrderedDict()  # [C] by row, the newest last
        self._kept_dtype = torch.float32

    @property
    def kind(self) -> str:
        """How rows are stored: a dtype, or the name of a packed format."""
        weight = self._weight
        return weight.format.kind if isinstance(weight, PackedTensor) else weight.dtype

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [*ids.shape, C] in `dtype`. Raises CheckpointError if the file cannot be read, and
        IndexError for a row that is not there.
        """
        unique_U, place = ids.detach().cpu().unique(return_inverse=True)
        rows = unique_U.tolist()
        if rows and not 0 <= rows[0] <= rows[-1] < self.num_rows:
            raise IndexError(f"rows {rows[0]} to {rows[-1]} of a table of {self.num_rows}")
        if self._kept_dtype != dtype:
            self._kept.clear()
            self._kept_dtype = dtype
        absent = [row for row in rows if row not in self._kept]
        rows_UC = torch.empty(len(rows), self.num_columns, dtype=dtype, device="cpu")
        read = dict(zip(absent, self._read(absent, dtype), strict=True)) if absent else {}
        for values_C, row in zip(rows_UC, rows, strict=True):
            values_C[:] = read[row] if row in read else self._kept[row]
        self._keep(rows, read)
        return rows_UC[place].to(ids.device)

    def _keep(self, rows: Sequence[int], read: Mapping[int, Tensor]) -> None:
        most = max(KEPT_BYTES // (self.num_columns * self._kept_dtype.itemsize), 1)
        for row in rows[-most:]:
            if row in read:  # a clone: a view would keep all rows that were read with it
                self._kept[row] = read[row].clone()
            self._kept.move_to_end(row)
        while len(self._kept) > most:
            self._kept.popitem(last=False)

    def __deepcopy__(self, memo: Any) -> RowTable:
        """A copy of the module looks up the same rows."""
        return self

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return [R, C]: all rows, read anew."""
        return self._read(range(self.num_rows), dtype)

    def _read(self, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return [rows, C]."""
        tensor = self._tensor
        stored = uint8_memory(len(rows) * self._row_bytes).view(len(rows), self._row_bytes)
        pieces = [
            (self._extent(first, end), stored[at : at + end - first].flatten().numpy().data)
            for at, first, end in _runs(rows)
        ]
        seconds = LOAD_TIMEOUT_S + len(pieces) * SEEK_S + len(rows) * self._row_bytes / SLOW_DISK
        self._reader.read_in_time(pieces, seconds)
        if isinstance(self._weight, PackedTensor):
            rows_NC = torch.empty(len(rows), self.num_columns, dtype=dtype, device="cpu")
            self._weight.unpack_rows({self._role: stored}, rows_NC)
            return rows_NC
        return stored.view(getattr(torch, tensor.dtype)).to(dtype)

    def _extent(self, first: int, end: int) -> Extent:
        whole = self._tensor.extent
        num_bytes = (end - first) * self._row_bytes
        return Extent(whole.file, whole.offset + first * self._row_bytes, num_bytes)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield for each run of neighbours among sorted rows: its place, its first row, its end."""
    begin = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield begin, rows[begin], rows[at - 1] + 1
            begin = at


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding of a model, and its weight in the checkpoint."""

    name: str  # of the module
    weight: StoredTensor | PackedTensor
    dtype: torch.dtype

    def put_into(self, model: nn.Module, reader: Reader) -> None:
        """Let the embedding read its rows from the file from now on."""
        embedding: Any = model.get_submodule(self.name)
        StoredEmbedding.take_over(embedding, RowTable(self.weight, reader), self.dtype)


def find_lookups(model: Any, plan: Plan, rules: list[Any], *, least_bytes: int) -> list[Lookup]:
    """The embeddings, of a model on the meta device, whose tables can stay in the files: the
    checkpoint has them row by row. Packed tables of LEAST_PACKED_BYTES and plain ones of
    `least_bytes` are worth it.
    """
    found = []
    for name, module, weight, moved in modules_as_stored(model, plan, rules):
        least = LEAST_PACKED_BYTES if isinstance(weight, PackedTensor) else least_bytes
        if not isinstance(module, nn.Embedding) or module.weight.nbytes < least:
            continue
        if moved is None and _has_rows(weight) and StoredEmbedding.can_take_over(module):
            found.append(Lookup(name, weight, module.weight.dtype))
    return found


def drop_half_tied(
    model: Any, packed: list[PackedDense], lookups: list[Lookup]
) -> tuple[list[PackedDense], list[Lookup]]:
    """Leave out modules whose weight is tied to one of a module in neither list, or to another
    linear layer. The embedding of a tied table looks up rows only if the last layer has it packed.
    """
    names = [each.name for each in packed] + [each.name for each in lookups]
    taken = {f"{name}.weight" for name in names}
    tied = model.all_tied_weights_keys.items()
    shared = {source for target, source in tied if not taken.issuperset((target, source))}
    sources = Counter(source_of(f"{each.name}.weight", model) for each in packed)
    shared |= {source for source, count in sources.items() if count > 1}

    def is_own(each: PackedDense | Lookup) -> bool:
        return source_of(f"{each.name}.weight", model) not in shared

    return list(filter(is_own, packed)), list(filter(is_own, lookups))


def say_untied(model: nn.Module) -> None:
    """Let the configs of a model say that no embedding is the weight of the last layer: there is no
    parameter that `tie_weights` could tie.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False


def _has_rows(weight: StoredTensor | PackedTensor) -> bool:
    """Return True if each row of a weight is one piece of a file, and is used as it is stored."""
    if any(tensor.undo is not None for _, tensor in weight.parts):
        return False
    return not isinstance(weight, PackedTensor) or weight.format.has_free_rows
