"""Which tensors of a checkpoint `moe-infinity pack` can store in fewer bits, and how config.json
tells that they are.

    plan --choose--> ChosenTensors: matrices per expert, or stacked over experts
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_infinity.checkpoint.headers import StoredTensor
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.recipe import Source
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.kernels.pack import Precision

UNPACKED = ("BF16", "F16", "F32")


@dataclass(slots=True)
class ChosenTensors:
    """The experts' tensors."""

    experts: dict[tuple[int, int], dict[str, StoredTensor]]  # by MoE layer and expert
    stacked: dict[str, StoredTensor]  # [E, R, C]

    @property
    def packed(self) -> list[StoredTensor]:
        """All that get fewer bits."""
        each = [tensor for tensors in self.experts.values() for tensor in tensors.values()]
        return [tensor for tensor in each if len(tensor.shape) == 2] + list(self.stacked.values())

    def check(self, precision: Precision) -> None:
        """Raises UnsupportedModelError if they cannot be packed so."""
        for tensor in self.packed:
            if tensor.stored_dtype not in UNPACKED:
                raise UnsupportedModelError(
                    f"{tensor.name} is stored as {tensor.stored_dtype}, which cannot be packed, "
                    f"expected one of: {', '.join(UNPACKED)}"
                )
            if 0 in tensor.shape:
                raise UnsupportedModelError(f"{tensor.name} {list(tensor.shape)} is empty")
            if precision.group_of(tensor.shape[-1]) is None:
                raise UnsupportedModelError(
                    f"{tensor.name} {list(tensor.shape)}: its {tensor.shape[-1]} columns are no "
                    "multiple of 8\n"
                    "hint: --experts int8 or fp8"
                )


def choose(plan: Plan) -> ChosenTensors:
    """Raises UnsupportedModelError for a checkpoint whose experts we cannot pack."""
    if plan.packing is not None:
        raise UnsupportedModelError(f"the checkpoint is quantized already ({plan.packing})")
    chosen = ChosenTensors({}, {})
    for moe_layer_idx, (layer, recipes) in enumerate(zip(plan.layers, plan.recipes, strict=True)):
        if recipes in plan.recipes[:moe_layer_idx]:
            continue  # tied to the experts of another layer
        sources = [source for recipe in recipes.recipes for source in recipe.sources]
        for source in sources:
            if source.num_parts:
                if (tensor := _stacked(source, is_transposed=layer.is_transposed)) is not None:
                    chosen.stacked[tensor.name] = tensor
                continue
            for expert_idx, weight in enumerate(source.weights):
                tensor = _as_stored(weight)
                if len(tensor.shape) > 2 or (
                    len(tensor.shape) == 2 and not tensor.name.endswith(".weight")
                ):
                    raise UnsupportedModelError(
                        f"{tensor.name} {list(tensor.shape)} is no matrix named .weight"
                    )
                chosen.experts.setdefault((moe_layer_idx, expert_idx), {})[tensor.name] = tensor
    return chosen


def _as_stored(weight: StoredTensor | PackedTensor) -> StoredTensor:
    assert isinstance(weight, StoredTensor), weight  # checkpoints quantized already are refused
    return weight


def _stacked(source: Source, *, is_transposed: bool | None) -> StoredTensor | None:
    """The one weight of all experts of a layer; None if it is a bias."""
    tensor = _as_stored(source.weights[0])
    if len(tensor.shape) <= 2 and tensor.shape[0] == source.num_parts:
        return None
    if len(tensor.shape) != 3 or tensor.shape[0] != source.num_parts:
        raise UnsupportedModelError(
            f"{tensor.name} {list(tensor.shape)} has the experts one below the other in one matrix,"
            " expected one matrix each or [experts, out, in]"
        )
    if is_transposed:
        raise UnsupportedModelError(
            f"{tensor.name} {list(tensor.shape)} is stored transposed, as [experts, in, out]: "
            "columns that share a scale would belong to different outputs"
        )
    return tensor


def quantization_config(
    precision: Precision, chosen: ChosenTensors, stored: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """For config.json: how the experts of a checkpoint with these tensors are stored."""
    stored_format, kind, bits = {
        "int4": ("pack-quantized", "int", 4),
        "int8": ("int-quantized", "int", 8),
        "fp8": ("float-quantized", "float", 8),
    }[precision.name]
    packed = {tensor.name for tensor in chosen.packed}
    dense = [name for name, tensor in stored.items() if len(tensor.shape) == 2]
    by_size: dict[int | None, list[str]] = {}
    for tensor in chosen.packed:
        size = precision.group_of(tensor.shape[-1]) if precision.group_size else None
        by_size.setdefault(size, []).append(tensor.name)
    groups: dict[str, Any] = {}
    for number, size in enumerate(by_size):
        weights = {
            "num_bits": bits, "type": kind, "symmetric": True, "dynamic": False,
            "strategy": "group" if size else "channel", "group_size": size,
        }  # fmt: skip
        groups[f"group_{number}"] = {
            "targets": _patterns(by_size[size]), "weights": weights,
            "format": stored_format, "input_activations": None, "output_activations": None,
        }  # fmt: skip
    packed_patterns = {each for group in groups.values() for each in group["targets"]}
    ignored = [
        name if _pattern(name) in packed_patterns else _pattern(name)
        for name in (name.removesuffix(".weight") for name in dense if name not in packed)
    ]
    return {
        "quant_method": "compressed-tensors", "format": stored_format,
        "quantization_status": "compressed", "config_groups": groups,
        "ignore": list(dict.fromkeys(ignored)), "kv_cache_scheme": None,
    }  # fmt: skip


def _patterns(names: Iterable[str]) -> list[str]:
    """Patterns of the modules that have these weights."""
    return list(dict.fromkeys(_pattern(name.removesuffix(".weight")) for name in sorted(names)))


def _pattern(module: str) -> str:
    """For all modules whose names differ from this one only in numbers."""
    parts = module.split(".")
    return "re:" + r"\.".join(r"\d+" if p.isdigit() else p for p in parts) + "$"
