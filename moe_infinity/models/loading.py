"""Load a model without its experts: transformers loads the dense part, the experts stay where they
are on disk.

transformers calls `_load_pretrained_model` with the model on the meta device and the resolved list
of weight conversions. There we find the experts modules, plan where each expert's bytes lie, take
the parameters out of the modules, and hand the stock method the remaining tensors, each read on
demand.

Private names of transformers used here and nowhere else: `_load_pretrained_model`,
`rename_source_key`, `WeightConverter.collected_tensors` (recipes.py),
`LoadStateDictConfig.weight_mapping`, `_experts_implementation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.experts import DTYPE_BYTES, ExpertLayout
from moe_infinity.memory.checkpoint import Headers, StoredTensor, checkpoint_files, read_headers
from moe_infinity.memory.reader import Reader
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


@dataclass(slots=True)
class LoadedModel:
    """A model whose experts are still on disk."""

    model: transformers.PreTrainedModel
    plan: Plan
    reader: Reader
    startup_bytes_read: int = field(default=0)  # headers and dense weights


class StoredSlice:
    """A tensor of the checkpoint, read when transformers indexes it; the interface of a safetensors
    slice.
    """

    def __init__(self, tensor: StoredTensor, reader: Reader) -> None:
        self._tensor = tensor
        self._reader = reader

    def __getitem__(self, index: Any) -> Tensor:
        raw = bytearray(self._tensor.extent.num_bytes)
        self._reader.read_into(self._tensor.extent, memoryview(raw))
        dtype = getattr(torch, self._tensor.dtype)
        whole = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return whole.view(self._tensor.shape)[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._tensor.stored_dtype


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


def load_without_experts(
    checkpoint: str, *, dtype: str, experts_implementation: str
) -> LoadedModel:
    """The model of a folder or hub id with dense weights in memory and experts on disk.

    Raises UnsupportedModelError, CheckpointError.
    """
    stock_class = model_class(checkpoint)
    reader = Reader()
    plans: list[Plan] = []

    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        files: list[str] | None,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if load_config.hf_quantizer is not None:
            method = load_config.hf_quantizer.quantization_config.quant_method
            raise UnsupportedModelError(
                f"quantized checkpoints ({method}) are not supported yet, expected bf16 or fp32"
            )
        headers = read_headers(Path(file) for file in _safetensors_only(files))
        plan = plan_experts(model, headers, load_config.weight_mapping or [])
        for row in plan.rows:
            _take_out(row)
        dense = {
            key: StoredSlice(t, reader)
            for key, t in headers.tensors.items()
            if key not in plan.owned
        }
        plans.append(plan)
        return stock_class._load_pretrained_model(model, dense, files, load_config, *args, **kwargs)

    own_class: Any = type(
        stock_class.__name__,
        (stock_class,),
        {
            "__module__": stock_class.__module__,
            "__qualname__": stock_class.__qualname__,
            "_load_pretrained_model": staticmethod(_load_pretrained_model),
        },
    )
    if Path(checkpoint).is_dir():
        checkpoint_files(Path(checkpoint))  # names a missing shard better than transformers does
    try:
        model, info = own_class.from_pretrained(
            checkpoint,
            dtype=dtype,
            experts_implementation=experts_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with names
        )
    except SafetensorError as error:  # transformers opened a broken file before we could
        raise CheckpointError(f"{checkpoint}: transformers cannot load it: {error}") from error
    for name, found_shape, wanted_shape in sorted(info["mismatched_keys"]):
        raise CheckpointError(
            f"{checkpoint}: {name} has shape {list(found_shape)}, "
            f"the model wants {list(wanted_shape)}"
        )
    if info["missing_keys"]:  # transformers would make them up
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{checkpoint}: no tensor for {missing[0]} ({len(missing)} weights are missing)"
        )
    model.__class__ = stock_class
    (plan,) = plans
    return LoadedModel(model, plan, reader, plan.headers.num_bytes + reader.bytes_read)


def plan_from_headers(checkpoint: str, *, dtype: str) -> Plan:
    """What `load_without_experts` would find, reading nothing but headers. `checkpoint` is a
    folder.
    """
    stock_class = model_class(checkpoint)
    headers = read_headers(checkpoint_files(Path(checkpoint)))
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    if dtype != "auto":
        torch_dtype = getattr(torch, dtype)
    elif (torch_dtype := config.dtype) is None:  # then transformers takes the first floating one
        stored = (getattr(torch, tensor.dtype) for tensor in headers.tensors.values())
        torch_dtype = next((found for found in stored if found.is_floating_point), torch.float32)
    with torch.device("meta"):
        model = stock_class._from_config(config, dtype=torch_dtype)
    return plan_experts(model, headers, get_model_conversion_mapping(model))


def model_class(checkpoint: str) -> Any:
    """transformers' class for this checkpoint. Raises UnsupportedModelError, CheckpointError."""
    if not Path(checkpoint).is_dir() and (
        Path(checkpoint).exists() or checkpoint.startswith((".", "/", "~"))
    ):
        raise CheckpointError(f"{checkpoint}: not a folder; give a checkpoint folder or a hub id")
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{checkpoint}: transformers {transformers.__version__} does not understand "
            f"its config.json: {error}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: no usable config.json: {error}") from error
    for name in config.architectures or []:
        found = getattr(transformers, name, None)
        if found is not None and found.can_generate():
            return found
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in causal:
        return causal[type(config)]
    raise UnsupportedModelError(
        f"{checkpoint}: transformers {transformers.__version__} has no generating class for "
        f"architectures {config.architectures}"
    )


def _safetensors_only(files: list[str] | None) -> list[str]:
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise UnsupportedModelError(
            f"only safetensors checkpoints can be read in place, found {files}"
        )
    return files


def _take_out(row: ExpertsModule) -> None:
    """Remove the expert parameters; a meta tensor of the same name stays, which transformers' init
    may touch.
    """
    for key, param in row.params.items():
        del row.module._parameters[key]
        object.__setattr__(
            row.module, key, torch.empty_like(param, device="meta", requires_grad=False)
        )
