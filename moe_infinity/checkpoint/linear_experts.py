"""Rules for experts that are stored as linear layers, where the model's class has them stacked in
another way and transformers has no rule for it.

    model.layers.0.mlp.experts.3.gate_proj.weight [R, C]      in the checkpoint
    model.layers.0.mlp.experts.gate_up_proj [E, C, 2 R]       gpt-oss: gate and up in turn

Quantizers pack linear layers, so they take stacked experts apart: AutoRound, llm-compressor, whose
names have `experts` twice, and GPTQModel from 5.8 on do so with gpt-oss or Llama 4.
"""

from __future__ import annotations

import re
from typing import Any

from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.plan import Weights, find_experts

NUMBERED = r"(?:\.experts)+\.\d+\."
OF_ONE = re.compile(NUMBERED + r"(gate|up|down)_proj\.(weight|bias)$")
BIAS = "_bias"
# By parameter of experts modules.
LINEAR_LAYERS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def rules_of_linear_experts(model: Any, weights: Weights, rules: list[Any]) -> list[Any]:
    """Rules of transformers for such experts of a model on the meta device; none where the
    checkpoint has no such weights, or where `rules` or the model's names know them.
    """
    name = next(filter(OF_ONE.search, weights), None)
    if name is None:
        return []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    meta = model.state_dict()
    renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
    if pattern is not None or renamed in meta:
        return []
    layer = find_experts(model)[0]
    return [
        _rule(layer, key)
        for key, location in layer.locations.items()
        if location.is_stacked and location.rows == 1 and key.removesuffix(BIAS) in LINEAR_LAYERS
    ]


def _rule(layer: ExpertsModule, key: str) -> WeightConverter:
    suffix = "bias" if key.endswith(BIAS) else "weight"
    linears = LINEAR_LAYERS[key.removesuffix(BIAS)]
    return WeightConverter(
        [rf"{NUMBERED}{linear}\.{suffix}$" for linear in linears],
        [f".experts.{key}"],
        [MergeModulelist(dim=0), *stacking(layer, key, num_linears=len(linears))],
    )


def stacking(layer: ExpertsModule, key: str, *, num_linears: int) -> list[ConversionOps]:
    """The operations that make a parameter of a layer's experts of the weights [E, R, C], or biases
    [E, R], of so many linear layers.
    """
    operations: list[ConversionOps] = [Concatenate(1)] if num_linears > 1 else []
    is_gate_up = key.removesuffix(BIAS) == "gate_up_proj"
    if is_gate_up and not getattr(layer.module, "is_concatenated", True):
        operations.append(Interleave(1, inverse=True))
    if layer.is_transposed and not key.endswith(BIAS):
        operations.append(Transpose(1, 2))
    return operations
