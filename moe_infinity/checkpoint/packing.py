"""What it means that several stored tensors together stand for one weight.

    Scheme.parts: role, suffix, dtypes   --assemble-->   PackedTensor   --unpack-->   the weight

A Format is the schemes that may occur in one checkpoint; formats.py knows which those are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_infinity.checkpoint.extents import StoredTensor
from moe_infinity.errors import CheckpointError

PADDING = re.compile(r"padding\.\d+")  # with which our packer fills up pages

Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # by role, without the expert dimension
Parts = dict[str, Tensor]  # by role


@dataclass(frozen=True, slots=True)
class Part:
    """One of the stored tensors that stand for a weight."""

    role: str
    suffix: str  # of its name
    dtypes: frozenset[str]  # it may be stored in
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to pack a weight. The first part is there if and only if a weight is packed so."""

    name: str
    weight_suffix: str  # of the weight that the parts stand for
    parts: tuple[Part, ...]
    num_dims: int  # of the first part, without the expert dimension
    ignored: tuple[str, ...]  # tensors beside the weight that unpacking does not need
    find_shape: Callable[[Shapes], Shape | None]  # of the weight; None: the parts disagree
    unpack: Callable[[Parts, torch.dtype], Tensor]
    is_transposed: bool = False  # the weight is [C, R]
    # Rows and columns that share a scale, where shapes alone do not tell.
    find_block: Callable[[Shapes], tuple[int, int] | None] | None = None

    def base_of(self, tensor: StoredTensor) -> str | None:
        """What the names of all parts begin with, if `tensor` is a first part."""
        first = self.parts[0]
        if not tensor.name.endswith(first.suffix):
            return None
        if not first.suffix and tensor.stored_dtype not in first.dtypes:
            return None  # told by its dtype alone
        return tensor.name.removesuffix(first.suffix)

    def assemble(self, base: str, tensors: Mapping[str, StoredTensor]) -> PackedTensor:
        """Raises CheckpointError if a part is missing or does not fit."""
        name, found = base + self.weight_suffix, []
        for part in self.parts:
            tensor = tensors.get(base + part.suffix)
            if tensor is None and not part.is_optional:
                raise CheckpointError(f"no tensor {base + part.suffix}, which {name} needs")
            if tensor is not None:
                _check_dtype(tensor, part.dtypes)
                found.append((part.role, tensor))
        shape = self._shape_of(found)
        if shape is None:
            described = ", ".join(f"{t.name} {list(t.shape)}" for _, t in found)
            raise CheckpointError(f"{name}: the shapes do not fit each other: {described}")
        return PackedTensor(name, tuple(found), shape, self)

    def _shape_of(self, found: list[tuple[str, StoredTensor]]) -> Shape | None:
        shapes = {role: tensor.shape for role, tensor in found}
        first = found[0][1].shape
        if len(first) == self.num_dims:
            return self.find_shape(shapes)
        num_experts = first[:1]
        if len(first) != self.num_dims + 1 or {s[:1] for s in shapes.values()} != {num_experts}:
            return None
        shape = self.find_shape({role: shape[1:] for role, shape in shapes.items()})
        return shape and num_experts + shape


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight as it is stored: several tensors, of one expert or stacked over experts in dim 0."""

    name: str  # of the weight
    parts: tuple[tuple[str, StoredTensor], ...]  # (role, tensor), always in the scheme's order
    shape: Shape  # of the weight
    scheme: Scheme

    @property
    def is_stacked(self) -> bool:
        """Is dim 0 of every part the expert?"""
        return len(self.parts[0][1].shape) > self.scheme.num_dims

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return sum(tensor.extent.num_bytes for _, tensor in self.parts)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Weights of one kind differ in nothing but their values."""
        return self.scheme.name, *((role, t.stored_dtype, t.shape) for role, t in self.parts)

    def unpack(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The weight from the values of its parts. Stacked: of as many experts as the parts have,
        [1, ...] as a rule.
        """
        if not self.is_stacked:
            return self.scheme.unpack(parts, dtype)
        num_experts = len(parts[self.parts[0][0]])
        weights = [
            self.scheme.unpack({role: part[at] for role, part in parts.items()}, dtype)
            for at in range(num_experts)
        ]
        return weights[0].unsqueeze(0) if num_experts == 1 else torch.stack(weights)


@dataclass(frozen=True, slots=True)
class Format:
    """The schemes a checkpoint may use, weight by weight."""

    method: str
    schemes: tuple[Scheme, ...]

    def group(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | PackedTensor]:
        """Put a weight in the place of its parts; leave other tensors alone. Raises
        CheckpointError where parts are missing, superfluous or do not fit.
        """
        packed: dict[str, PackedTensor] = {}
        gone: set[str] = set()  # parts, and what unpacking does not need
        for tensor in tensors.values():
            for scheme in self.schemes:
                if (base := scheme.base_of(tensor)) is None:
                    continue
                weight = scheme.assemble(base, tensors)
                gone.update(part.name for _, part in weight.parts)
                gone.update(_ignored(weight, tensors))
                if weight.name in packed:
                    raise CheckpointError(f"{weight.name} is there packed in two ways")
                packed[weight.name] = weight
        gone.update(name for name in tensors if PADDING.fullmatch(name))
        rest = {name: tensor for name, tensor in tensors.items() if name not in gone}
        for name in packed.keys() & rest.keys():
            raise CheckpointError(f"{name} is there packed and again as it is")
        self._refuse_stray_parts(packed, rest)
        return packed | rest

    def _refuse_stray_parts(
        self, packed: Mapping[str, PackedTensor], rest: Mapping[str, StoredTensor]
    ) -> None:
        """A part whose weight is stored otherwise, or a tensor beside a weight that would change
        it.
        """
        for name in rest:
            stem = name.rpartition(".")[0] + ".weight"
            if stem in packed and not name.endswith((".weight", ".bias")):
                raise CheckpointError(
                    f"{name} belongs to {stem}, but {self.method} has no such part"
                )
            for scheme in self.schemes:
                for part in scheme.parts[1:]:
                    whole = name.removesuffix(part.suffix) + scheme.weight_suffix
                    if name.endswith(part.suffix) and whole in rest:
                        raise CheckpointError(
                            f"{name} is there, but {whole} is stored as "
                            f"{rest[whole].stored_dtype}, which is not {scheme.name}"
                        )


def _ignored(weight: PackedTensor, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    stem = weight.name.removesuffix(".weight")
    for attribute in weight.scheme.ignored:
        yield from tensors.keys() & {f"{stem}.{attribute}", f"{stem}_{attribute}"}


def _check_dtype(tensor: StoredTensor, dtypes: frozenset[str]) -> None:
    if tensor.stored_dtype not in dtypes:
        raise CheckpointError(
            f"{tensor.name} is stored as {tensor.stored_dtype}, "
            f"expected {' or '.join(sorted(dtypes))}"
        )
