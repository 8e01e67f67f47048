"""Embeddings whose rows stay in the files of the checkpoint. A token looks up one row, so the table
need not be in memory: half a gigabyte of Qwen3-30B-A3B, and most of a model with a table for each
layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from moe_infinity.architectures.stored_embedding import StoredEmbedding
from moe_infinity.checkpoint.headers import Extent, StoredTensor
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.kernels import uint8_memory

LEAST_PACKED_BYTES = 64 << 20  # of a packed table once unpacked: smaller ones are loaded
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
        absent = [row for row in rows if self._is_absent(row, dtype)]
        read = dict(zip(absent, self._read(absent, dtype), strict=True))
        found = [read[row] if row in read else self._kept[row] for row in rows]
        self._keep(rows, found)
        rows_UC = (
            torch.stack(found)
            if found
            else torch.empty(0, self.num_columns, dtype=dtype, device="cpu")
        )
        return rows_UC[place].to(ids.device)

    def _is_absent(self, row: int, dtype: torch.dtype) -> bool:
        return row not in self._kept or self._kept[row].dtype != dtype

    def _keep(self, rows: Sequence[int], found: Sequence[Tensor]) -> None:
        most = max(KEPT_BYTES // max(found[0].nbytes, 1), 1) if found else 0
        for row, values_C in zip(rows[-most:], found[-most:], strict=True):
            # A clone: a view would keep all rows that were read with it.
            self._kept[row] = values_C if row in self._kept else values_C.clone()
            self._kept.move_to_end(row)
        while len(self._kept) > most > 0:
            self._kept.popitem(last=False)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return [R, C]: all rows, read anew."""
        return self._read(range(self.num_rows), dtype)

    def _read(self, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return [rows, C]."""
        tensor = self._tensor
        stored = uint8_memory(len(rows) * self._row_bytes).view(len(rows), self._row_bytes)
        self._reader.read(
            [
                (self._extent(first, end), stored[at : at + end - first].flatten().numpy().data)
                for at, first, end in _runs(rows)
            ]
        )
        if isinstance(self._weight, PackedTensor):
            rows_NC = torch.empty(len(rows), self.num_columns, dtype=dtype, device="cpu")
            if len(rows):
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
    """The embeddings, of a model on the meta device, whose tables can stay in the files: nothing
    else uses the weight, and the checkpoint has it row by row under its own name. Packed tables of
    LEAST_PACKED_BYTES and plain ones of `least_bytes` are worth it.
    """
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    meta = model.state_dict()
    prefix = model.base_model_prefix
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    found = []
    for name, module in model.named_modules():
        param = f"{name}.weight"
        weight = plan.dense.get(param)
        if not isinstance(module, nn.Embedding) or weight is None or param in tied:
            continue
        if weight.shape != module.weight.shape or not StoredEmbedding.can_take_over(module):
            continue
        if rename_source_key(param, renamings, converters, prefix, meta) != (param, None):
            continue
        is_packed = isinstance(weight, PackedTensor)
        least = LEAST_PACKED_BYTES if is_packed else least_bytes
        num_bytes = prod(weight.shape) * module.weight.element_size()
        if num_bytes >= least and _has_rows(weight):
            found.append(Lookup(name, weight, module.weight.dtype))
    return found


def _has_rows(weight: StoredTensor | PackedTensor) -> bool:
    """Return True if each row of a weight is one piece of a file, and is used as it is stored."""
    if any(tensor.undo is not None for _, tensor in weight.parts):
        return False
    return not isinstance(weight, PackedTensor) or weight.format.has_free_rows
