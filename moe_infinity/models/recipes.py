"""How one expert's bytes come out of the checkpoint: where they lie, and what transformers would do
to them.

A recipe fills one or more parameters of any expert of one MoE row. Its sources are either one
tensor per expert or one tensor stacked over experts. Where transformers' conversion only
concatenates, the bytes go straight into the slot; otherwise the same conversion is replayed for
that one expert. Which of the two is found out by trying it once on a pattern, per kind of recipe,
not by knowing architectures.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ExpertLayout, ParamSpec
from moe_infinity.memory.extents import Extent, StoredTensor
from moe_infinity.memory.reader import Reader


@dataclass(frozen=True, slots=True)
class Source:
    """What one pattern of a conversion matched in one row: a tensor per expert, or one stacked over
    experts.
    """

    pattern: str
    tensors: tuple[StoredTensor, ...]
    num_parts: int  # experts stacked in the one tensor; 0 if each expert has a tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part that belongs to one expert, as the conversion expects it."""
        first = self.tensors[0]
        if not self.num_parts:
            return first.shape
        return (first.shape[0] // self.num_parts, *first.shape[1:])

    def extent(self, expert_idx: int) -> Extent:
        if self.num_parts:
            return self.tensors[0].extent.part(expert_idx, self.num_parts)
        return self.tensors[expert_idx].extent


class OneExpertModel:
    """What a conversion may ask of a model, answered for a model of one expert."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        self._params = params

    def get_parameter(self, name: str) -> Tensor:
        return self._params[name]

    get_parameter_or_buffer = get_parameter


@dataclass(slots=True)
class Recipe:
    """Fills `targets` (full parameter name -> where it lies in a slot) from `sources`."""

    name: str  # the name transformers gives the first target
    sources: tuple[Source, ...]
    targets: dict[str, ParamSpec]
    converter: Any | None  # transformers' WeightConverter; None: the checkpoint has the parameter
    config: Any  # of the model; some conversions read it
    is_byte_copy: bool = False

    def kind(self) -> tuple[Any, ...]:
        """Recipes of one kind behave alike, so that one trial answers for all of them."""
        sources = tuple(
            (s.pattern, s.shape, s.tensors[0].stored_dtype, s.num_parts > 0) for s in self.sources
        )
        shapes = tuple((t.shape, t.dtype) for t in self.targets.values())
        return id(self.converter) if self.converter else None, sources, shapes

    def extents(self, expert_idx: int) -> list[Extent]:
        return [source.extent(expert_idx) for source in self.sources]

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        """Bring this expert's parameters into `slot`. Raises CheckpointError."""
        if self.is_byte_copy:
            (spec,) = self.targets.values()
            offset = spec.offset
            for extent in self.extents(expert_idx):
                reader.read_into(extent, slot[offset : offset + extent.num_bytes])
                offset += extent.num_bytes
            return
        stored = []
        for source, extent in zip(self.sources, self.extents(expert_idx), strict=True):
            raw = bytearray(extent.num_bytes)
            reader.read_into(extent, memoryview(raw))
            stored.append(_as_tensor(raw, source))
        for name, value in self._convert(stored).items():
            spec = self.targets[name]
            flat = value.contiguous().view(torch.uint8).flatten().numpy()
            slot[spec.offset : spec.offset + spec.num_bytes] = flat.data

    def try_out(self) -> bool:
        """Convert a pattern of bytes: is the result nothing but the sources one after the other?

        Raises CheckpointError if the result does not have the shape the model wants.
        """
        stored = []
        for source in self.sources:
            num_bytes = source.extent(0).num_bytes
            pattern = torch.arange(num_bytes // 2 + 1, dtype=torch.int32).to(torch.int16)
            raw = bytearray(pattern.view(torch.uint8).numpy().data[:num_bytes])
            stored.append(_as_tensor(raw, source))
        unconverted = [tensor.clone() for tensor in stored]
        values = self._convert(stored)
        for name, spec in self.targets.items():
            found = tuple(values[name].shape) if name in values else None
            if found != (1, *spec.shape):
                raise CheckpointError(
                    f"{name}: the model wants {list(spec.shape)} per expert, the checkpoint gives "
                    f"{list(found[1:]) if found else 'nothing'} (from {self._describe_sources()})"
                )
        if len(self.targets) > 1:
            return False
        (value,) = values.values()
        before = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in unconverted])
        after = value.contiguous().view(torch.uint8).flatten()
        return before.shape == after.shape and bool(torch.equal(before, after))

    def _describe_sources(self) -> str:
        firsts = (source.tensors[0] for source in self.sources)
        return ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in firsts)

    def _convert(self, stored: list[Tensor]) -> dict[str, Tensor]:
        """What transformers makes of one expert's tensors: {full name: [1, ...]} in the model's
        dtype.
        """
        (dtype,) = {getattr(torch, spec.dtype) for spec in self.targets.values()}
        stored = [tensor.to(dtype) for tensor in stored]
        if self.converter is None:
            value = stored[0]
            (spec,) = self.targets.values()
            return {self.name: value[None] if value.shape == spec.shape else value}
        meta = {
            name: torch.empty((1, *spec.shape), dtype=dtype, device="meta")
            for name, spec in self.targets.items()
        }
        converter = copy.deepcopy(self.converter)
        converter.collected_tensors = {
            source.pattern: [tensor] for source, tensor in zip(self.sources, stored, strict=True)
        }
        try:
            values = converter.convert(self.name, model=OneExpertModel(meta), config=self.config)
        except (RuntimeError, ValueError) as error:  # how mismatched shapes are reported
            raise CheckpointError(
                f"{self.name} cannot be built from {self._describe_sources()}: {error}"
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value for name, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class RowRecipes:
    """All recipes of one MoE row: together they fill a slot of `layout`."""

    layout: ExpertLayout
    recipes: tuple[Recipe, ...]

    @property
    def is_byte_copy(self) -> bool:
        return all(recipe.is_byte_copy for recipe in self.recipes)

    def bytes_per_expert(self) -> int:
        """Bytes read from disk for one expert."""
        return sum(extent.num_bytes for recipe in self.recipes for extent in recipe.extents(0))

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        for recipe in self.recipes:
            recipe.load(expert_idx, reader, slot)


def _as_tensor(raw: bytearray, source: Source) -> Tensor:
    return torch.frombuffer(raw, dtype=getattr(torch, source.tensors[0].dtype)).view(source.shape)
