"""Where every expert of a model lies in its checkpoint.

The experts modules are found in the model on the meta device; which tensors of the checkpoint
become their parameters follows from transformers' own renaming and conversion rules. What comes out
is one recipe per MoE row (recipes.py).

Private names of transformers used here: `rename_source_key`, `dot_natural_key`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.experts import DTYPE_BYTES, ExpertLayout
from moe_infinity.memory.checkpoint import Headers, StoredTensor
from moe_infinity.models.recipes import Recipe, RowRecipes, Source

# Set by transformers' `use_experts_implementation` on every experts module of the interface.
INTERFACE_ATTRIBUTES = {"has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts"}


@dataclass(slots=True)
class ExpertsModule:
    """One experts module of the model: one MoE row."""

    name: str  # full name in the model, e.g. "model.layers.3.mlp.experts"
    module: nn.Module
    num_experts: int
    params: dict[str, Tensor]  # its expert parameters on the meta device, [E, ...]
    layout: ExpertLayout


@dataclass(slots=True)
class Plan:
    """Where every expert of a model lies on disk."""

    rows: list[ExpertsModule]
    recipes: list[RowRecipes]  # one per row
    owned: set[str]  # names of checkpoint tensors that belong to experts
    headers: Headers

    @property
    def dense_bytes(self) -> int:
        """Bytes of the checkpoint that are not experts."""
        return sum(
            t.extent.num_bytes for name, t in self.headers.tensors.items() if name not in self.owned
        )


def find_experts(model: nn.Module) -> list[ExpertsModule]:
    """The experts modules of the model, in model order. Raises UnsupportedModelError for an unknown
    dtype.
    """
    rows = []
    for name, module in model.named_modules():
        if not vars(module).keys() >= INTERFACE_ATTRIBUTES:
            continue
        num_experts = int(module.num_experts)
        params = {
            key: param
            for key, param in module.named_parameters(recurse=False)
            if param.ndim >= 2 and param.shape[0] == num_experts
        }
        dtypes = {key: str(param.dtype).removeprefix("torch.") for key, param in params.items()}
        if set(dtypes.values()) - set(DTYPE_BYTES):
            raise UnsupportedModelError(
                f"{name}: experts of dtype {dtypes}, expected one of {', '.join(DTYPE_BYTES)}"
            )
        shapes = {key: (tuple(param.shape[1:]), dtypes[key]) for key, param in params.items()}
        rows.append(ExpertsModule(name, module, num_experts, params, ExpertLayout.of(shapes)))
    if not rows:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no routed experts behind transformers' experts interface\n"
            "hint: a dense model needs no offloading, load it with transformers"
        )
    return rows


def plan_experts(model: Any, headers: Headers, weight_mapping: list[Any]) -> Plan:
    """Locate every expert in the checkpoint. Raises CheckpointError where tensors are missing or do
    not fit.
    """
    rows = find_experts(model)
    row_of_param = {f"{row.name}.{key}": (row, key) for row in rows for key in row.params}
    groups, owned = _group_sources(model, headers, weight_mapping, set(row_of_param))
    missing = sorted(set(row_of_param) - {t for _, _, targets in groups.values() for t in targets})
    if missing:
        raise CheckpointError(
            f"the checkpoint has no tensors for {missing[0]} ({len(missing)} parameters in all)"
        )
    byte_copies: dict[Any, bool] = {}
    recipes: dict[str, list[Recipe]] = {row.name: [] for row in rows}
    for name, (converter, keys_by_pattern, targets) in groups.items():
        row, _ = row_of_param[next(t for t in targets if t in row_of_param)]
        sources = tuple(
            _make_source(name, pattern, [headers.tensors[key] for key in keys], row.num_experts)
            for pattern, keys in keys_by_pattern.items()
        )
        specs = {spec.name: spec for spec in row.layout.params}
        wanted = {target: specs[target.rsplit(".", 1)[1]] for target in targets}
        recipe = Recipe(name, sources, wanted, converter, model.config)
        if recipe.kind() not in byte_copies:
            byte_copies[recipe.kind()] = recipe.try_out()
        recipe.is_byte_copy = byte_copies[recipe.kind()]
        recipes[row.name].append(recipe)
    by_row = [RowRecipes(row.layout, tuple(recipes[row.name])) for row in rows]
    return Plan(rows, by_row, owned, headers)


# converter, {pattern: keys}, target names
Group = tuple[WeightConverter | None, dict[str, list[str]], list[str]]


def _group_sources(
    model: Any, headers: Headers, weight_mapping: list[Any], wanted: set[str]
) -> tuple[dict[str, Group], set[str]]:
    """Which checkpoint tensors become which expert parameters, by transformers' own renaming and
    conversion rules.
    """
    renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
    converter_of = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    meta, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, Group] = {}
    owned: set[str] = set()
    for key in sorted(headers.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, meta)
        if name not in meta and key in meta:  # it has its final name already
            name, pattern = rename_source_key(key, [], [], prefix, meta)
        converter = converter_of.get(pattern) if pattern is not None else None
        targets = [name]
        if converter is not None:
            first = converter.target_patterns[0]
            targets = [name.replace(first, target, 1) for target in converter.target_patterns]
        if wanted.isdisjoint(targets):
            continue
        group = groups.setdefault(name, (converter, {}, targets))
        group[1].setdefault(pattern or key, []).append(key)
        owned.add(key)
    for converter, keys_by_pattern, _ in groups.values():
        if converter is not None:  # it concatenates in the order of its patterns, not of the keys
            for pattern in [p for p in converter.source_patterns if p in keys_by_pattern]:
                keys_by_pattern[pattern] = keys_by_pattern.pop(pattern)
    return groups, owned


def _make_source(name: str, pattern: str, tensors: list[StoredTensor], num_experts: int) -> Source:
    """One tensor per expert, or one whose first dimension is the experts; all of one shape and
    dtype.
    """
    is_stacked = len(tensors) == 1 and tensors[0].shape[:1] == (num_experts,)
    if not is_stacked and len(tensors) != num_experts:
        raise CheckpointError(
            f"{name}: {num_experts} experts need {num_experts} tensors like {tensors[0].name} "
            f"or one stacked over experts, found {len(tensors)}"
        )
    odd = [
        t
        for t in tensors
        if (t.shape, t.stored_dtype) != (tensors[0].shape, tensors[0].stored_dtype)
    ]
    if odd:
        raise CheckpointError(
            f"tensor {odd[0].name} is {odd[0].stored_dtype} {list(odd[0].shape)}, "
            f"but {tensors[0].name} is {tensors[0].stored_dtype} {list(tensors[0].shape)}"
        )
    return Source(pattern, tuple(tensors), is_stacked)
