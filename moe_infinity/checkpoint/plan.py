"""Locates every expert of a model in its checkpoint.

The experts modules are found in the model on the meta device; which tensors of the checkpoint
become their parameters follows from transformers' own renaming and conversion rules. The result
are the recipes of each MoE layer (recipe.py).

Private names of transformers used here: `rename_source_key`, `dot_natural_key`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moe_infinity.architectures.adapters import (
    INTERFACE,
    INTERFACE_ATTRIBUTES,
    Adapter,
    ExpertsModule,
    ParameterLocation,
)
from moe_infinity.architectures.module_list import LIST, is_list_of_experts
from moe_infinity.architectures.outside_interface import ADAPTERS
from moe_infinity.checkpoint.headers import Headers, StoredTensor
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.packed_recipes import Order, RowsRecipe, order_of, with_biases
from moe_infinity.checkpoint.packing import Format, PackedTensor, refuse_unsaid_scales
from moe_infinity.checkpoint.recipe import Recipe, Source
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.memory.needs import StepBytes, number_of
from moe_infinity.memory.part_bytes import PartBytes, part_bytes_of

SHARED_EXPERT = re.compile(r"\.shared?_(experts?|mlp)\b")
TOP_K_NAMES = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts",
)  # fmt: skip

FLOATS = ("F64", "F32", "F16", "BF16")
Weights = dict[str, StoredTensor | PackedTensor]  # by name in the checkpoint


@dataclass(slots=True)
class Plan:
    """The location of every expert of a model on disk."""

    architecture: str  # name of the model's class
    config: Any  # transformers'
    layers: list[ExpertsModule]
    recipes: list[LayerRecipes]  # one per MoE layer
    top_k: int | None  # experts per token, if the config says it by a usual name
    packing: str | None  # how the checkpoint is quantized
    dense: dict[str, StoredTensor | PackedTensor]  # what belongs to no expert
    header_bytes: int  # read to know all this
    part_bytes: PartBytes  # that a layer allocates beside attention and experts
    row_bytes: int = 0  # of packed embeddings in `dense`, which a CPU reads by row
    dense_in_page_cache: int = 0  # bytes of weights that are used there, as mapped experts are

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts as slots hold them, alignment left out."""
        pairs = zip(self.layers, self.recipes, strict=True)
        once = {id(recipes): (layer.num_experts, recipes.layout) for layer, recipes in pairs}
        return sum(num_experts * layout.num_bytes for num_experts, layout in once.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the checkpoint that are not experts."""
        return stored_bytes(self.dense.values())

    def step_bytes(self, kv_dtype: str, is_exact: bool) -> StepBytes:
        """The memory that a pass needs beside the weights, with keys and values of this type."""
        layout = self.layers[0].layout
        params = sum(prod(spec.shape) for spec in layout.params)
        return StepBytes.of(
            self.config,
            top_k=self.top_k or 1,
            expert_params=params,
            item_bytes=getattr(torch, layout.params[0].dtype).itemsize,
            kv_dtype=kv_dtype,
            is_exact=is_exact,
            part=self.part_bytes,
        )

    @property
    def shared_expert_bytes(self) -> int:
        """The dense bytes of shared experts, which every token uses, by the usual names."""
        found = (weight for name, weight in self.dense.items() if SHARED_EXPERT.search(name))
        return stored_bytes(found)


def stored_bytes(weights: Iterable[StoredTensor | PackedTensor]) -> int:
    """Return the bytes that some weights take in their files."""
    return sum(part.extent.num_bytes for weight in weights for _, part in weight.parts)


def top_k_of(config: Any) -> int | None:
    """Experts per token, the most if layers have their own."""
    for part in (config.get_text_config(), getattr(config, "ffn_config", None)):
        for name in TOP_K_NAMES:
            if found := number_of(part, name):
                return found
    return None


def find_experts(model: nn.Module) -> list[ExpertsModule]:
    """The experts modules of the model, in model order. Raises UnsupportedModelError for an unknown
    dtype.
    """
    layers: list[ExpertsModule] = []
    for name, module in model.named_modules():
        adapter = adapter_of(name, module)
        if adapter is not None:
            layers.append(adapter.describe(name, module))
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no routed experts that we know how to take out\n"
            "hint: a dense model needs no offloading, load it with transformers"
        )
    return layers


def adapter_of(name: str, module: nn.Module) -> Adapter | None:
    """The adapter that knows this module; None if it is not the experts of a layer."""
    if vars(module).keys() >= INTERFACE_ATTRIBUTES:
        return INTERFACE
    if type(module).__name__ in ADAPTERS:
        return ADAPTERS[type(module).__name__]
    return LIST if name.rpartition(".")[2] == "experts" and is_list_of_experts(module) else None


@dataclass(frozen=True, slots=True)
class Contents:
    """The weights of a checkpoint, as they are to be loaded into a model."""

    weights: Weights
    rules: list[Any]  # of transformers: what else than their names make them parameters
    packing: str | None  # how the checkpoint is quantized
    header_bytes: int


def contents_of(headers: Headers, packing: Format | None, rules: list[Any]) -> Contents:
    """The contents of a checkpoint in safetensors or PyTorch's files. Raises CheckpointError where
    parts of packed weights are missing.
    """
    weights: Weights = dict(headers.tensors) if packing is None else packing.group(headers.tensors)
    refuse_unsaid_scales(weights, headers.tensors)
    if packing is None:
        return Contents(weights, rules, None, headers.num_bytes)
    return Contents(weights, rules, packing.described(weights.values()), headers.num_bytes)


def plan_experts(model: Any, contents: Contents) -> Plan:
    """Locate every expert in the checkpoint. Raises CheckpointError where tensors are missing or do
    not fit.
    """
    weights = contents.weights
    layers = find_experts(model)
    _check_top_k(model.config, layers)
    members = {
        f"{layer.name}.{path}": Member(layer, key, expert_idx)
        for layer in layers
        for key, location in layer.locations.items()
        for expert_idx, path in enumerate(location.paths)
    }
    groups, not_dense = _group_sources(model, weights, contents.rules, members)
    tied = _find_tied(model, groups, members)
    trials: dict[Any, bool] = {}
    orders: dict[Any, Order | None] = {}
    recipes: dict[str, list[Recipe]] = {layer.name: [] for layer in layers}
    for group in groups:
        recipe = _make_recipe(group, members, weights, model.config)
        kind = recipe.kind()
        if kind not in trials:
            trials[kind] = recipe.try_out()
            if recipe.is_packed and not trials[kind]:
                orders[kind] = order_of(recipe, is_transposed=bool(group.layer.is_transposed))
        recipe.only_concatenates = trials[kind]
        if (order := orders.get(kind)) is not None:
            recipe = RowsRecipe(recipe, order, is_transposed=bool(group.layer.is_transposed))
        recipes[group.layer.name].append(recipe)
    own = {
        name: LayerRecipes(with_biases(recipes[name]), is_transposed=bool(layer.is_transposed))
        for name, layer in ((layer.name, layer) for layer in layers)
        if name not in tied
    }
    dense = {name: weight for name, weight in weights.items() if name not in not_dense}
    return Plan(
        architecture=type(model).__name__,
        config=model.config,
        layers=layers,
        recipes=[own[tied.get(layer.name, layer.name)] for layer in layers],
        top_k=top_k_of(model.config),
        packing=contents.packing,
        dense=dense,
        header_bytes=contents.header_bytes,
        part_bytes=part_bytes_of(model, [layer.name for layer in layers]),
    )


def _check_top_k(config: Any, layers: list[ExpertsModule]) -> None:
    """Raise CheckpointError for a number of experts per token that no layer has."""
    top_k = top_k_of(config)
    stored = (location.num_stored for layer in layers for location in layer.locations.values())
    most = max(*(layer.num_experts for layer in layers), *stored)
    if top_k is not None and not 1 <= top_k <= most:
        raise CheckpointError(
            f"config.json wants {top_k} experts per token (num_experts_per_tok or the like), "
            f"but a layer has {most}"
        )


class Member(NamedTuple):
    """A parameter of the model that belongs to experts."""

    layer: ExpertsModule
    key: str  # its name in a slot
    expert_idx: int  # of a parameter that belongs to one expert

    @property
    def location(self) -> ParameterLocation:
        return self.layer.locations[self.key]

    @property
    def group_name(self) -> str:
        """A name that all experts of a layer share."""
        return f"{self.layer.name}.{self.location.paths[0]}"


@dataclass(slots=True)
class SourceGroup:
    """Tensors of the checkpoint that together become some parameters of all experts of a layer."""

    name: str  # the name transformers gives the first of those parameters
    layer: ExpertsModule
    converter: WeightConverter | None
    targets: list[str]  # names of parameters
    keys: dict[str, list[tuple[int, str]]]  # by pattern: (expert, name of its tensor), in order


def _find_tied(model: Any, groups: list[SourceGroup], members: dict[str, Member]) -> dict[str, str]:
    """MoE layers whose experts are those of another layer, and that layer. Raises CheckpointError
    if a parameter is neither in the checkpoint nor tied to one that is.
    """
    found = {target for group in groups for target in group.targets}
    tied: dict[str, str] = {}
    missing = sorted(name for name in members if name not in found)
    for name in missing:
        tied_to = getattr(model, "all_tied_weights_keys", {}).get(name)
        if tied_to not in found or tied_to not in members:
            raise CheckpointError(
                f"the checkpoint has no tensors for {name} ({len(missing)} parameters in all)"
            )
        tied[members[name].layer.name] = members[tied_to].layer.name
    return tied


def _group_sources(
    model: Any, weights: Weights, weight_mapping: list[Any], members: dict[str, Member]
) -> tuple[list[SourceGroup], set[str]]:
    """Group the checkpoint's tensors by the expert parameters that they become, by transformers'
    own renaming and conversion rules. Beside the groups return the names of what is not dense:
    these tensors, and those that the model's class leaves out.
    """
    renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
    converter_of = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    meta = model.state_dict()
    prefix = model.base_model_prefix
    groups: dict[tuple[str, str], SourceGroup] = {}  # by MoE layer and name
    not_dense: set[str] = set()
    left_out = list(model._keys_to_ignore_on_load_unexpected or ())
    for key in sorted(weights, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, meta)
        if name not in meta and key in meta:  # it has its final name already
            name, pattern = rename_source_key(key, [], [], prefix, meta)
        converter = converter_of.get(pattern) if pattern is not None else None
        targets = [name]
        if converter is not None:
            first = converter.target_patterns[0]
            targets = [name.replace(first, target, 1) for target in converter.target_patterns]
        if name not in meta and any(re.search(pattern, name) for pattern in left_out):
            not_dense.add(key)
        wanted = [members[target] for target in targets if target in members]
        for member in {member.layer.name: member for member in wanted}.values():
            if not member.location.is_stacked:
                name = member.group_name
            group = groups.setdefault(
                (member.layer.name, name), SourceGroup(name, member.layer, converter, [], {})
            )
            for target in targets:
                of = members.get(target)
                if of is not None and of.layer is member.layer and target not in group.targets:
                    group.targets.append(target)
            group.keys.setdefault(pattern or name, []).append((member.expert_idx, key))
            not_dense.add(key)
    for group in groups.values():
        group.keys = _in_order(group)
    return list(groups.values()), not_dense


def _in_order(group: SourceGroup) -> dict[str, list[tuple[int, str]]]:
    """The keys in the order of the converter's patterns, in which it concatenates."""
    patterns = list(group.keys)
    if group.converter is not None:
        patterns.sort(key=group.converter.source_patterns.index)
    return {
        pattern: sorted(group.keys[pattern], key=lambda expert_and_key: expert_and_key[0])
        for pattern in patterns
    }


def _make_recipe(
    group: SourceGroup, members: dict[str, Member], weights: Weights, config: Any
) -> Recipe:
    specs = {spec.name: spec for spec in group.layer.layout.params}
    wanted = [members[target] for target in group.targets]
    sources = tuple(
        source
        for pattern, keys in group.keys.items()
        for source in _make_sources(
            group, pattern, [weights[key] for _, key in keys], wanted[0].location
        )
    )
    targets = {member.group_name: specs[member.key] for member in wanted}
    is_mixed = any(source.is_mixed for source in sources)
    return Recipe(group.name, sources, targets, group.converter, config, is_mixed=is_mixed)


def _make_sources(
    group: SourceGroup,
    pattern: str,
    weights: list[StoredTensor | PackedTensor],
    location: ParameterLocation,
) -> list[Source]:
    """Sources with a weight per expert, or with one whose first dimension is the experts. There
    are several weights per expert, one list after the other, where a layer has several sets of
    experts (ERNIE-VL).
    """
    num_experts = group.layer.num_experts
    first = weights[0]
    num_sets = len(group.converter.target_patterns) if group.converter is not None else 1
    counts = {num_experts, location.num_stored}
    if isinstance(first, PackedTensor) and location.rows > 1:
        raise UnsupportedModelError(
            f"{group.name}: {first.format.name} experts that are runs of rows of one weight"
        )
    num_rows = first.shape[0] if len(weights) == 1 and first.shape else 0
    if num_rows in {n * location.rows for n in counts}:
        return [Source(pattern, (first,), num_rows // location.rows)]
    if len(weights) == location.num_stored:  # more than compute
        weights = weights[:num_experts]
    if len(weights) not in (num_experts, num_sets * num_experts):
        raise CheckpointError(
            f"{group.name}: {num_experts} experts need {num_experts} tensors like "
            f"{first.name} or one stacked over experts, found {len(weights)}"
        )
    starts = range(0, len(weights), num_experts)
    lists = [tuple(weights[start : start + num_experts]) for start in starts]
    for each in lists:
        for weight in each:
            if weight.kind != each[0].kind:
                _refuse_other_experts(weight, each[0])
    return [Source(pattern, each, 0) for each in lists]


def _refuse_other_experts(weight: StoredTensor | PackedTensor, first: Any) -> None:
    """Raise CheckpointError unless both become the same parameter of two experts of a layer."""
    plain = [each for each in (weight, first) if isinstance(each, StoredTensor)]
    if weight.shape != first.shape or not all(each.stored_dtype in FLOATS for each in plain):
        raise CheckpointError(
            f"tensor {_describe(weight)}, but {_describe(first)}\n"
            "hint: experts of one layer need one shape, each in floating point or packed; download "
            f"{weight.parts[0][1].extent.file.name} again, or convert the checkpoint anew"
        )


def _describe(weight: StoredTensor | PackedTensor) -> str:
    parts = ", ".join(f"{part.stored_dtype} {list(part.shape)}" for _, part in weight.parts)
    return f"{weight.name} is {parts}"
