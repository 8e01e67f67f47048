"""Weights that are stored as several tensors.

    WeightFormat --assemble--> PackedTensor, in files --layout_of--> WeightLayout, in a slot

A Format is the formats of weights that may occur in one checkpoint; formats/methods.py knows which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_infinity.checkpoint.headers import StoredTensor
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.experts import ParamSpec
from moe_infinity.layout import Block, Parts, Unpack, WeightLayout

# What our packer fills up pages with, and scales of a packed cache of keys and values.
UNNEEDED = re.compile(r"padding\.\d+|.*\.(k|v|kv)_scale")

BYTES = ("F8", "I8", "U8")  # how the names of dtypes of 8 bits begin
UNPACKED_AT_ONCE = 1 << 17  # weights, in float32 half a megabyte

Shape = tuple[int, ...]
PartShapes = dict[str, Shape]  # by role, without the expert dimension


@dataclass(frozen=True, slots=True)
class PartFormat:
    """One of the stored tensors that stand for a weight."""

    role: str  # its field in WeightLayout: values, scale, zeros, groups or global_scale
    suffix: str  # of its name
    dtypes: frozenset[str]  # it may be stored in
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """All there is to know of one way to pack a weight. The first part, its values, exists if and
    only if a weight is packed so.
    """

    name: str  # in messages
    kind: str  # of the layouts: which loader kernels take; may be one that has none
    parts: tuple[PartFormat, ...]
    # The shape [R, C] and the rows and columns that share a scale, which is None where only
    # `groups` tells; None: the parts disagree.
    measure: Callable[[PartShapes], tuple[Shape, Block | None] | None]
    unpack: Unpack
    ignored: tuple[str, ...] = ()  # tensors beside the weight that unpacking does not need
    weight_suffix: str = ""  # of the weight that the parts stand for
    num_dims: int = 2  # of the first part, without the expert dimension
    is_transposed: bool = False  # the weight of the model is [C, R]
    has_free_rows: bool = False  # its one part is [R, bytes of a row]
    kind_of_bytes: str | None = None  # in the place of `kind` where a value takes 8 bits

    def layout_of(self, parts: dict[str, ParamSpec], *, is_transposed: bool) -> WeightLayout:
        """The layout of a weight whose parts lie there. Transposed: the experts' class has it as
        [C, R].
        """
        found = self.measure({role: part.shape for role, part in parts.items()})
        assert found is not None, parts  # `assemble` has seen them, or the packer made them
        shape, block = found
        layout = WeightLayout(
            self.kind, shape, **_read(parts, block), block=block, is_transposed=is_transposed,
            unpack=self.unpack,
        )  # fmt: skip
        if self.kind_of_bytes is not None and layout.is_stored_in(8):
            layout = replace(layout, kind=self.kind_of_bytes)
        return layout

    def suffix_of(self, role: str) -> str:
        """The end of the name of this part."""
        return next(part.suffix for part in self.parts if part.role == role)

    def base_of(self, tensor: StoredTensor) -> str | None:
        """The beginning of the names of all parts of a weight, found from the first of its parts.
        None: `tensor` is no first part.
        """
        first = self.parts[0]
        if not tensor.name.endswith(first.suffix):
            return None
        if first.suffix == self.weight_suffix and tensor.stored_dtype not in first.dtypes:
            return None  # called as the weight is: only the dtype tells them apart
        return tensor.name.removesuffix(first.suffix)

    def is_whole(self, base: str, tensors: Mapping[str, StoredTensor]) -> bool:
        """Return True if all parts called `base...` are there that a weight needs, in dtypes that
        they may have.
        """
        needed = [part for part in self.parts if not part.is_optional]
        found = ((tensors.get(base + part.suffix), part.dtypes) for part in needed)
        return all(part is not None and part.stored_dtype in dtypes for part, dtypes in found)

    def num_present(self, base: str, tensors: Mapping[str, StoredTensor]) -> int:
        """Return how many parts called `base...` there are."""
        return sum(base + part.suffix in tensors for part in self.parts)

    def assemble(self, base: str, tensors: Mapping[str, StoredTensor]) -> PackedTensor:
        """The weight that the parts called `base...` stand for. Raises CheckpointError if one is
        missing or does not fit.
        """
        name = base + self.weight_suffix
        found = []
        for part in self.parts:
            tensor = tensors.get(base + part.suffix)
            if tensor is None and not part.is_optional:
                if f"{name}_weight_scale" in tensors:
                    raise UnsupportedModelError(f"{name}: stacked experts of ModelOpt are not read")
                raise CheckpointError(
                    f"no tensor {base + part.suffix}, which {name} needs\n"
                    "hint: are all files of the checkpoint there? docs/checkpoints.md has the "
                    "formats that are read"
                )
            if tensor is not None:
                _check_dtype(tensor, part.dtypes)
                found.append((part.role, tensor))
        shapes = {role: tensor.shape for role, tensor in found}
        first = found[0][1].shape
        num_experts: Shape = ()
        if len(first) == self.num_dims + 1 and {s[:1] for s in shapes.values()} == {first[:1]}:
            num_experts = first[:1]
            shapes = {role: shape[1:] for role, shape in shapes.items()}
        measured = self.measure(shapes) if len(shapes[found[0][0]]) == self.num_dims else None
        if measured is None:
            described = ", ".join(f"{t.name} {list(t.shape)}" for _, t in found)
            raise CheckpointError(
                f"{name}: the shapes do not fit each other: {described}\n"
                "hint: docs/checkpoints.md has the formats that are read; another variant of the "
                "model may have one of them"
            )
        shape_RC, block = measured
        shape = num_experts + (shape_RC[::-1] if self.is_transposed else shape_RC)
        return PackedTensor(name, tuple(found), shape, block, self)


def _read(parts: dict[str, Any], block: Block | None) -> dict[str, Any]:
    """The parts that are read: an index of columns is not where their groups are known to be in
    order.
    """
    return {role: part for role, part in parts.items() if role != "groups" or block is None}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight as it is stored: several tensors, of one expert or stacked over experts in dim 0."""

    name: str  # of the weight
    parts: tuple[tuple[str, StoredTensor], ...]  # (role, tensor), always in the format's order
    shape: Shape  # of the weight
    block: Block | None  # rows and columns that share a scale, see WeightFormat.measure
    format: WeightFormat

    @property
    def is_stacked(self) -> bool:
        """True if dim 0 of every part is the expert."""
        return len(self.parts[0][1].shape) > self.format.num_dims

    @property
    def kind(self) -> tuple[Any, ...]:
        """Weights of one kind differ in nothing but their values."""
        return self.format.name, *((role, t.stored_dtype, t.shape) for role, t in self.parts)

    def unpack_rows(self, parts: Parts, out: Tensor) -> None:
        """Unpack a weight with free rows into `out`: some rows at a time, which fit a cache."""
        values = parts["values"].flatten(0, -2)
        rows = out.view(len(values), -1)
        step = max(1, UNPACKED_AT_ONCE // rows.shape[1])
        for into, some in zip(rows.split(step), values.split(step), strict=True):
            into[:] = self.format.unpack({"values": some}, None, out.dtype)

    def unpack(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The weight as the model has it, from the values of its parts."""
        parts = _read(parts, self.block)
        if self.is_stacked:
            of_each = zip(*(part.unbind() for part in parts.values()), strict=True)
            experts = [dict(zip(parts, tensors, strict=True)) for tensors in of_each]
            return torch.stack([self._unpack_one(expert, dtype) for expert in experts])
        return self._unpack_one(parts, dtype)

    def _unpack_one(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        weight = self.format.unpack(parts, self.block, dtype)
        return weight.t().contiguous() if self.format.is_transposed else weight


@dataclass(frozen=True, slots=True)
class Format:
    """The formats that the weights of a checkpoint may have."""

    method: str
    weights: tuple[WeightFormat, ...]

    def group(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | PackedTensor]:
        """Replace the parts of each weight by the weight; leave other tensors alone. Raises
        CheckpointError where parts are missing, superfluous or do not fit.
        """
        packed: dict[str, PackedTensor] = {}
        gone: set[str] = set()  # parts, and what unpacking does not need
        for tensor in tensors.values():
            for weight_format, base in self._formats_of(tensor):
                if not weight_format.is_whole(base, tensors):
                    continue
                weight = weight_format.assemble(base, tensors)
                gone.update(part.name for _, part in weight.parts)
                gone.update(_ignored(weight, tensors))
                if weight.name in packed:
                    raise CheckpointError(f"{weight.name} is there packed in two ways")
                packed[weight.name] = weight
        for name in sorted(tensors.keys() - gone):
            self._refuse_half_a_weight(tensors[name], tensors)
        gone.update(name for name in tensors if UNNEEDED.fullmatch(name))
        rest = {name: tensor for name, tensor in tensors.items() if name not in gone}
        for name in packed.keys() & rest.keys():
            raise CheckpointError(f"{name} is there packed and again as it is")
        self._refuse_stray_parts(packed, rest)
        return packed | rest

    def described(self, weights: Iterable[StoredTensor | PackedTensor]) -> str:
        """The method, and the formats of these weights where it has several."""
        packed = (weight for weight in weights if isinstance(weight, PackedTensor))
        names = sorted({weight.format.name for weight in packed} - {self.method})
        return f"{self.method} ({', '.join(names)})" if names else self.method

    def _formats_of(self, first: StoredTensor) -> list[tuple[WeightFormat, str]]:
        """The formats of which a tensor may be the first part, each with the beginning of its
        names.
        """
        bases = ((weight_format, weight_format.base_of(first)) for weight_format in self.weights)
        return [(weight_format, base) for weight_format, base in bases if base is not None]

    def _refuse_half_a_weight(
        self, first: StoredTensor, tensors: Mapping[str, StoredTensor]
    ) -> None:
        """Raise CheckpointError for the first part of a weight whose other parts are missing."""
        found = self._formats_of(first)
        if found:
            weight_format, base = max(found, key=lambda each: each[0].num_present(each[1], tensors))
            weight_format.assemble(base, tensors)

    def _refuse_stray_parts(
        self, packed: Mapping[str, PackedTensor], rest: Mapping[str, StoredTensor]
    ) -> None:
        """Raise CheckpointError for a part whose weight is stored otherwise, or a tensor beside a
        weight that would change it.
        """
        for name in rest:
            stem = name.rpartition(".")[0] + ".weight"
            if stem in packed and not name.endswith((".weight", ".bias")):
                raise CheckpointError(
                    f"{name} belongs to {stem}, but {self.method} has no such part"
                )
            for weight_format in self.weights:
                for part in weight_format.parts[1:]:
                    whole = name.removesuffix(part.suffix) + weight_format.weight_suffix
                    if name.endswith(part.suffix) and whole in rest:
                        raise CheckpointError(
                            f"{name} is there, but {whole} is stored as "
                            f"{rest[whole].stored_dtype}, which is not {weight_format.name}"
                        )


def _ignored(weight: PackedTensor, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    stem = weight.name.removesuffix(".weight")
    for attribute in weight.format.ignored:
        yield from tensors.keys() & {f"{stem}.{attribute}", f"{stem}_{attribute}"}


def _check_dtype(tensor: StoredTensor, dtypes: frozenset[str]) -> None:
    if tensor.stored_dtype not in dtypes:
        raise CheckpointError(
            f"{tensor.name} is stored as {tensor.stored_dtype}, "
            f"expected {' or '.join(sorted(dtypes))}"
        )


def refuse_unsaid_scales(
    weights: Mapping[str, StoredTensor | PackedTensor], tensors: Mapping[str, StoredTensor]
) -> None:
    """Raise CheckpointError for weights of 8 bits whose scales lie beside them unannounced."""
    for name, weight in weights.items():
        if isinstance(weight, PackedTensor) or not weight.stored_dtype.startswith(BYTES):
            continue
        module = name.removesuffix(".weight")
        scales = [
            f"{name}_scale",
            f"{name}_scale_inv",
            f"{module}.scale",
            f"{module}.qscale_weight",
        ]
        if not tensors.keys().isdisjoint(scales):
            raise CheckpointError(
                f"{name} has scales beside it, but config.json has no quantization_config for it"
            )
