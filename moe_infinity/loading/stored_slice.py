"""A weight of a checkpoint as transformers reads it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_infinity.checkpoint.headers import STORED_NAMES, StoredTensor
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.kernels import uint8_memory

ALIGNMENT = 64  # bytes


class StoredSlice:
    """A weight of the checkpoint, read and if need be unpacked when transformers indexes it. It has
    the interface of a safetensors slice.
    """

    def __init__(
        self,
        weight: StoredTensor | PackedTensor,
        reader: Reader,
        dtype: torch.dtype,
        on_read: Callable[[], None],
    ) -> None:
        self._weight = weight
        self._reader = reader
        self._dtype = dtype  # of what is unpacked
        self._on_read = on_read

    def __getitem__(self, index: Any) -> Tensor:
        weight = self._weight
        parts = {role: self._read(tensor) for role, tensor in weight.parts}
        if not isinstance(weight, PackedTensor):
            return parts[""][index]
        if not weight.format.has_free_rows:
            return weight.unpack(parts, self._dtype)[index]
        unpacked = uint8_memory(prod(weight.shape) * self._dtype.itemsize)
        whole = unpacked.view(self._dtype).view(weight.shape)
        weight.unpack_rows(parts, whole)
        return whole[index]

    def _read(self, tensor: StoredTensor) -> Tensor:
        # Where float32 lies, to 64 bytes, decides bits of products: as in stock's map of the file.
        shift = tensor.extent.offset % ALIGNMENT & -4 if tensor.dtype == "float32" else 0
        raw = uint8_memory(shift + tensor.extent.num_bytes)[shift:]
        self._reader.read_into(tensor.extent, raw.numpy().data)
        self._on_read()
        stored = raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)
        return stored if tensor.undo is None else tensor.undo(stored)

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def get_dtype(self) -> str:
        if isinstance(self._weight, PackedTensor):
            return STORED_NAMES[str(self._dtype).removeprefix("torch.")]
        return self._weight.stored_dtype
