"""How one expert's bytes come out of the checkpoint, and how transformers would convert them.

A recipe fills one or more parameters of any expert of one MoE layer. Its sources are either one
weight per expert or one weight stacked over experts. Three ways lead from there to a slot:

    as they are   transformers' conversion only concatenates: the bytes go straight into the slot
    converted     the same conversion is replayed for that one expert, on its way into the slot
    packed        quantized: the slot holds the bytes as stored, and the expert is unpacked, and
                  converted if need be, each time it computes

Where experts of one layer are stored in several ways, all of them are converted to the parameters'
dtype on their way into a slot.

`Recipe.weights` says how they lie in a slot (layout.py). A trial on a pattern of bytes, once per
kind of recipe, shows if a conversion only concatenates: no architecture is known by name.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_infinity.checkpoint.files import Copy
from moe_infinity.checkpoint.headers import Extent, StoredTensor, are_neighbours
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ParamSpec
from moe_infinity.layout import WeightLayout

Shapes = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)


@dataclass(frozen=True, slots=True)
class Source:
    """The weights that a pattern of a conversion matched in one MoE layer: a weight per expert, or
    one stacked over experts.
    """

    pattern: str
    weights: tuple[StoredTensor | PackedTensor, ...]
    num_parts: int  # experts stacked in the one weight; 0 if each expert has a weight

    @property
    def is_mixed(self) -> bool:
        """True if the weights of some experts are stored in another way than those of others."""
        return any(weight.kind != self.weights[0].kind for weight in self.weights)

    @property
    def packed(self) -> PackedTensor | None:
        first = self.weights[0]
        return first if isinstance(first, PackedTensor) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part that belongs to one expert, as the conversion expects it."""
        return self._shape_of_one(self.weights[0].shape)

    def _shape_of_one(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // self.num_parts, *shape[1:]) if self.num_parts else shape

    def stored_shapes(self) -> Shapes:
        """The stored parts of one expert, by role, without the experts' dimension."""
        is_stacked = self.weights[0].shape[0] == self.num_parts
        if self.packed is not None:
            is_stacked = self.packed.is_stacked
        first = int(is_stacked)
        return {
            role: (self._shape_of_one(part.shape)[first:], part.dtype)
            for role, part in self.weights[0].parts
        }

    def extents(self, expert_idx: int) -> list[Extent]:
        """The bytes of one expert in files, in the order of `stored_shapes`."""
        if not self.num_parts:
            return [part.extent for _, part in self.weights[expert_idx].parts]
        return [
            part.extent.equal_part(expert_idx, self.num_parts) for _, part in self.weights[0].parts
        ]


@dataclass(slots=True)
class Recipe:
    """Fills `targets` (full parameter name -> the parameter of one expert) from `sources`."""

    name: str  # the name transformers gives the first target
    sources: tuple[Source, ...]
    targets: dict[str, ParamSpec]
    converter: Any | None  # transformers' WeightConverter; None: the checkpoint has the parameter
    config: Any  # of the model; some conversions read it
    only_concatenates: bool = False
    is_mixed: bool = False  # some experts are stored in another way than others
    is_split: bool = False  # a slot has the sources one by one, although they are not packed
    stored: tuple[ParamSpec, ...] = ()  # all parts in a slot, in the order of `slot_shapes`
    # In a slot: of each target or, packed or split, of each source.
    weights: tuple[WeightLayout, ...] = ()

    @property
    def is_packed(self) -> bool:
        return not self.is_mixed and any(source.packed is not None for source in self.sources)

    @property
    def alternates(self) -> bool:
        """True if a slot has the rows of gate before those of up, and the parameter has them in
        turn.
        """
        return False

    @property
    def is_in_parts(self) -> bool:
        """True if a slot holds the sources, and not the parameters."""
        return self.is_packed or self.is_split

    def split(self) -> None:
        """Let a slot hold the weights one by one, if the parameter is these one below the other,
        and files have them apart: so they may be used there.
        """
        shapes = [shape for s in self.sources for shape, _ in s.stored_shapes().values()]
        is_plain = not any(source.packed for source in self.sources)
        is_in_rows = self.only_concatenates and all(len(shape) == 2 for shape in shapes)
        self.is_split = is_plain and is_in_rows and not are_neighbours(self.extents(0))

    def kind(self) -> tuple[Any, ...]:
        """A key of recipes that behave alike, so that one trial answers for all of them."""
        sources = tuple(
            (s.pattern if self.converter else "", s.shape, s.weights[0].kind, s.num_parts > 0)
            for s in self.sources
        )
        shapes = tuple((t.shape, t.dtype) for t in self.targets.values())
        return id(self.converter) if self.converter else None, sources, shapes, self.is_mixed

    def slot_shapes(self) -> Shapes:
        """The arrays that a slot holds for this recipe."""
        specs = list(self.targets.values())
        if not self.is_in_parts:
            return {spec.name: (spec.shape, spec.dtype) for spec in specs}
        return {
            f"{specs[0].name} {at} {role}": shape_and_dtype
            for at, source in enumerate(self.sources)
            for role, shape_and_dtype in source.stored_shapes().items()
        }

    def lay_out(self, specs: dict[str, ParamSpec], *, is_transposed: bool) -> None:
        """Fill in `stored` and `weights`, from where everything of `slot_shapes` lies. Transposed:
        the experts' class has matrices as [C, R].
        """
        self.stored = tuple(specs[name] for name in self.slot_shapes())
        if not self.is_in_parts:
            weights = [WeightLayout.plain(s, is_transposed=is_transposed) for s in self.stored]
        else:
            parts = iter(self.stored)
            weights = [
                self._layout({role: next(parts) for role in source.stored_shapes()}, source)
                for source in self.sources
            ]
        self.weights = tuple(weights)

    def _layout(self, parts: dict[str, ParamSpec], source: Source) -> WeightLayout:
        if source.packed is None:
            return WeightLayout.plain(parts[""])
        weight_format = source.packed.format
        return weight_format.layout_of(parts, is_transposed=weight_format.is_transposed)

    def extents(self, expert_idx: int) -> list[Extent]:
        return [extent for source in self.sources for extent in source.extents(expert_idx)]

    def copies(self, expert_idx: int) -> list[Copy] | None:
        """Bytes of files, and where in a slot they go, in bytes from its start; None if they are
        converted on the way.
        """
        extents = self.extents(expert_idx)
        if self.is_in_parts:
            offsets = [spec.offset for spec in self.stored]
        elif self.only_concatenates:
            sizes = [extent.num_bytes for extent in extents[:-1]]
            offsets = list(accumulate(sizes, initial=self.stored[0].offset))
        else:
            return None
        return list(zip(extents, offsets, strict=True))

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        """Fill the part of `slot` that this recipe converts, for one expert. Raises
        CheckpointError.
        """
        values = self._convert([self._read(source, expert_idx, reader) for source in self.sources])
        for name, spec in zip(self.targets, self.stored, strict=True):
            flat = values[name].contiguous().view(torch.uint8).flatten().numpy()
            slot[spec.offset : spec.offset + spec.num_bytes] = flat.data

    def _read(self, source: Source, expert_idx: int, reader: Reader) -> Tensor:
        weight = source.weights[0 if source.num_parts else expert_idx]
        parts = {}
        for (role, part), extent in zip(weight.parts, source.extents(expert_idx), strict=True):
            raw = bytearray(extent.num_bytes)
            reader.read_into(extent, memoryview(raw))
            parts[role] = torch.frombuffer(raw, dtype=getattr(torch, part.dtype))
        if not isinstance(weight, PackedTensor):
            return parts[""].view(source.shape)
        shaped = {role: parts[role].view(part.shape) for role, part in weight.parts}
        return weight.unpack(shaped, self._dtype)

    def params(self, slot: dict[str, Tensor]) -> dict[str, Any]:
        """The parameters, from the views of a slot that holds the stored parts. A split one is a
        list of tensors.
        """
        if self.is_split:
            (spec,) = self.targets.values()
            return {spec.name: [slot[part.name] for part in self.stored]}
        if not self.is_packed:
            return {part.name: slot[part.name] for part in self.stored}
        weights = [weight.unpacked(slot, self._dtype) for weight in self.weights]
        if self.only_concatenates:
            (spec,) = self.targets.values()
            whole = torch.cat([weight.flatten() for weight in weights])
            return {spec.name: whole.view(spec.shape)}
        values = self._convert(
            [w.reshape(source.shape) for w, source in zip(weights, self.sources, strict=True)]
        )
        return {spec.name: values[name][0] for name, spec in self.targets.items()}

    @property
    def is_in_rows(self) -> bool:
        """True if the weights are the rows of the one parameter that the recipe fills, in that
        order: then kernels can multiply with them.
        """
        if len(self.targets) != 1 or not self.is_packed:
            return len(self.targets) == 1
        return self.only_concatenates and all(weight.unpack is not None for weight in self.weights)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype that all targets have."""
        (name,) = {spec.dtype for spec in self.targets.values()}
        found: torch.dtype = getattr(torch, name)
        return found

    def try_out(self) -> bool:
        """Convert a pattern, and return True if the result is nothing but the sources one after the
        other, in the dtype they have.

        Raises CheckpointError if the result does not have the shape that the model wants.
        """
        patterns, values = self.tried()
        for name, spec in self.targets.items():
            found = tuple(values[name].shape) if name in values else None
            if found != (1, *spec.shape):
                raise CheckpointError(
                    f"{name}: the model wants {list(spec.shape)} per expert, the checkpoint gives "
                    f"{list(found[1:]) if found else 'nothing'} (from {self._describe_sources()})"
                )
        if len(self.targets) > 1 or self.is_mixed:
            return False
        (value,) = (values[name] for name in self.targets)
        before = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in patterns])
        after = value.contiguous().view(torch.uint8).flatten()
        return before.shape == after.shape and bool(torch.equal(before, after))

    def tried(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Weights of one expert whose bytes tell where they come from, and what they become."""
        generator = torch.Generator().manual_seed(0)
        patterns = [self._pattern(source, generator) for source in self.sources]
        return patterns, self._convert([pattern.clone() for pattern in patterns])

    def _pattern(self, source: Source, generator: torch.Generator) -> Tensor:
        """A weight of one expert whose bytes tell where they come from: random ones."""
        dtype = self._dtype
        if source.packed is None and not self.is_mixed:
            ((_, stored_dtype),) = source.stored_shapes().values()
            dtype = getattr(torch, stored_dtype)
        num_bytes = prod(source.shape) * dtype.itemsize
        pattern = torch.empty(num_bytes // 8 + 1, dtype=torch.int64, device="cpu")
        pattern.random_(generator=generator)
        return pattern.view(torch.uint8)[:num_bytes].view(dtype).view(source.shape)

    def _describe_sources(self) -> str:
        firsts = (source.weights[0] for source in self.sources)
        return ", ".join(f"{weight.name} {list(weight.shape)}" for weight in firsts)

    def _convert(self, weights: list[Tensor]) -> dict[str, Tensor]:
        """The parameters that transformers makes of one expert's weights: {full name: [1, ...]} in
        the model's dtype.
        """
        dtype = self._dtype
        weights = [weight.to(dtype) for weight in weights]
        if self.converter is None:
            (spec,) = self.targets.values()
            value = weights[0]
            return {self.name: value[None] if value.shape == spec.shape else value}
        meta = {
            name: torch.empty((1, *spec.shape), dtype=dtype, device="meta")
            for name, spec in self.targets.items()
        }
        converter = copy.deepcopy(self.converter)
        for source, weight in zip(self.sources, weights, strict=True):
            converter.collected_tensors.setdefault(source.pattern, []).append(weight)
        find = meta.__getitem__
        model = SimpleNamespace(get_parameter=find, get_parameter_or_buffer=find)  # of one expert
        try:
            values = converter.convert(self.name, model=model, config=self.config)
        except (RuntimeError, ValueError) as error:  # how mismatched shapes are reported
            raise CheckpointError(
                f"{self.name} cannot be built from {self._describe_sources()}: {error}"
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value for name, value in values.items()
        }
