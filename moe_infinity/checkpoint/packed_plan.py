"""The weights of a plan that stay packed, or become packed, when a model is loaded: those of linear
layers, with which kernels of ours multiply, and experts packed on their way into a slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from moe_infinity.architectures.model_parts import PackedLinear, ReorderedLinear
from moe_infinity.checkpoint.headers import StoredTensor
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.packed_recipes import PackedRecipe
from moe_infinity.checkpoint.packing import PackedTensor, WeightFormat
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.undo import Undo
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import ExpertLayout
from moe_infinity.kernels import uint8_memory
from moe_infinity.kernels.pack import precision_of
from moe_infinity.layout import PackedWeight, WeightLayout

GROUP_SIZE = 32  # columns of int4 that share a scale; `moe-infinity pack` has the same default


@dataclass(frozen=True, slots=True)
class PackedDense:
    """The packed weight of one linear layer, still on disk."""

    name: str  # of the module
    layout: WeightLayout
    parts: tuple[tuple[StoredTensor, int], ...]  # and where each begins in memory
    num_bytes: int
    moved: Undo | None  # what undoes a change of the order of columns

    @property
    def is_one_stretch(self) -> bool:
        """True if the file has the weight as memory would, so that it can be used there."""
        return len(self.parts) == 1 and self.parts[0][0].undo is None

    def put_into(self, model: nn.Module, reader: Reader, *, in_page_cache: bool) -> int:
        """Read the weight, and replace the linear layer by one that multiplies with it. It stays in
        the page cache if it may: returns its bytes there. Raises CheckpointError.
        """
        first = self.parts[0][0].extent
        is_mapped = in_page_cache and self.is_one_stretch and reader.can_map(first)
        if is_mapped:
            memory = torch.frombuffer(reader.mapped(first), dtype=torch.uint8)
        else:
            memory = uint8_memory(self.num_bytes)
        for tensor, offset in self.parts:
            part = memory[offset : offset + tensor.extent.num_bytes]
            reader.read_into(tensor.extent, part.numpy().data)
            if tensor.undo is not None:
                part[:] = tensor.undo(part.view(tensor.shape)).flatten()
        owner, _, name = self.name.rpartition(".")
        linear: Any = model.get_submodule(self.name)
        packed: Any = PackedLinear(linear, PackedWeight(self.layout, memory), linear.weight.dtype)
        if self.moved is not None:
            columns = torch.arange(linear.in_features, device="cpu")[None]
            config = model.config.get_text_config()  # type: ignore[operator, union-attr]
            packed = ReorderedLinear(packed, self.moved.undone([columns], config)[0])
        setattr(model.get_submodule(owner), name, packed)
        return self.num_bytes if is_mapped else 0


def find_packed_dense(
    model: Any, plan: Plan, rules: list[Any], reads: Callable[[WeightLayout], bool]
) -> list[PackedDense]:
    """The linear layers, of a model on the meta device, whose weights can stay packed: kernels read
    them, as `reads` says.
    """
    packed = []
    for name, module, weight, moved in modules_as_stored(model, plan, rules):
        if type(module) is not nn.Linear or not isinstance(weight, PackedTensor):
            continue
        dense = None if weight.format.is_transposed else _packed_dense(name, weight, moved)
        if dense is not None and reads(dense.layout):
            packed.append(dense)
    return packed


def modules_as_stored(
    model: Any, plan: Plan, rules: list[Any]
) -> Iterator[tuple[str, nn.Module, StoredTensor | PackedTensor, Undo | None]]:
    """Yield the linear layers and embeddings, of a model on the meta device, whose weight the
    checkpoint has as it is, under its own name or that of the weight it is tied to. At most its
    columns have another order, which the last undoes.
    """
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    meta = model.state_dict()
    prefix = model.base_model_prefix
    for name, module in model.named_modules():
        param = f"{name}.weight"
        source = source_of(param, model)
        weight = plan.dense.get(source)
        if weight is None or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if weight.shape != module.weight.shape or (source != param and param in plan.dense):
            continue
        renamed, pattern = rename_source_key(source, renamings, converters, prefix, meta)
        moved = None if pattern is None else _moved_columns(pattern, converters)
        if renamed == source and (pattern is None or moved is not None):
            yield name, module, weight, moved


def source_of(param: str, model: Any) -> str:
    """Return the name of the parameter that this one is tied to; its own if it is tied to none."""
    source: str = model.all_tied_weights_keys.get(param, param)
    return source


def _moved_columns(pattern: str, converters: list[WeightConverter]) -> Undo | None:
    """Return what undoes a change of columns if the rules with this pattern do nothing else."""
    rules = [rule for rule in converters if pattern in rule.source_patterns]
    operations = [operation for rule in rules for operation in rule.operations]
    moves = [each for each in operations if isinstance(each, Undo) and each.dim == 1]
    return moves[0] if len(operations) == len(moves) == 1 else None


def _packed_dense(name: str, weight: PackedTensor, moved: Undo | None) -> PackedDense:
    shapes = {role: (tensor.shape, tensor.dtype) for role, tensor in weight.parts}
    layout = ExpertLayout.of(shapes)
    specs = {spec.name: spec for spec in layout.params}
    return PackedDense(
        name,
        weight.format.layout_of(specs, is_transposed=False),
        tuple((tensor, specs[role].offset) for role, tensor in weight.parts),
        layout.slot_bytes,
        moved,
    )


def packed_on_load(plan: Plan, expert_dtype: str, formats: Mapping[str, WeightFormat]) -> Plan:
    """The plan with experts that take `expert_dtype` in slots, in one of these formats, by
    kind. Raises UnsupportedModelError for a checkpoint that is packed already, or weights that do
    not fit.
    """
    if plan.packing is not None:
        raise UnsupportedModelError(f"the checkpoint is quantized already ({plan.packing})")
    precision = precision_of(expert_dtype, GROUP_SIZE)
    made: dict[int, LayerRecipes] = {}  # layers may have tied experts
    for layer, recipes in zip(plan.layers, plan.recipes, strict=True):
        if id(recipes) not in made:
            is_transposed = bool(layer.is_transposed)
            packed = [
                PackedRecipe(
                    recipe, precision, formats[precision.name], is_transposed=is_transposed
                )
                for recipe in recipes.recipes
            ]
            made[id(recipes)] = LayerRecipes(packed, is_transposed=is_transposed)
    if not any(recipes.is_packed for recipes in made.values()):
        raise UnsupportedModelError(
            f"no expert has a weight that {expert_dtype} fits"
            + (f": groups of {GROUP_SIZE} columns" if precision.group_size else "")
        )
    return dataclasses.replace(
        plan, recipes=[made[id(recipes)] for recipes in plan.recipes], packing=expert_dtype
    )
