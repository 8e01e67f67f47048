"""Which kernels of ours read the experts of an MoE layer where they lie in their slots.

Kernels read experts of any class that compute two products with a known activation between them
(kernels/activation.py), and whose weights have one of the layouts that kernels know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.recipe import Recipe
from moe_infinity.experimental.gpu.kernels.slot_mlp import SlotMlp, slot_mlp
from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.activation import Activation, find_activation
from moe_infinity.layout import WeightLayout

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts


def fused_layer(layer: ExpertsModule, recipes: LayerRecipes) -> FusedExperts | None:
    """For the CPU. None: the experts can only be computed one by one."""
    mlp = _two_products(layer, recipes)
    if mlp is None:
        return None
    from moe_infinity.kernels.cpu.experts import fused_experts

    return fused_experts(
        mlp.up,
        mlp.down,
        mlp.activation,
        biases=mlp.biases,
        is_interleaved=mlp.is_interleaved,
    )


def slot_layer(layer: ExpertsModule, recipes: LayerRecipes) -> SlotMlp | None:
    """For a GPU. None: its kernels do not read the experts."""
    mlp = _two_products(layer, recipes)
    if mlp is None or len(mlp.down) != 1:
        return None
    return slot_mlp(
        mlp.up,
        mlp.down[0],
        activation=mlp.activation,
        biases=mlp.biases,
        is_interleaved=mlp.is_interleaved,
        weighs_input=layer.adapter.weighs_input,
    )


class _TwoProducts(NamedTuple):
    """An expert that is one product, an activation, and another product."""

    up: Sequence[WeightLayout]  # one below the other
    down: Sequence[WeightLayout]
    biases: list[ParamSpec]  # one for each product, or none
    activation: Activation
    is_interleaved: bool


def _two_products(layer: ExpertsModule, recipes: LayerRecipes) -> _TwoProducts | None:
    """None if the experts compute anything else, or if their slots are laid out otherwise."""
    hidden = layer.adapter.hidden(layer.module)
    filled_by = {spec.name: found for found in recipes.recipes for spec in found.targets.values()}
    is_gated = "gate_up_proj" in filled_by
    names = ["gate_up_proj" if is_gated else "up_proj", "down_proj"]
    bias_names = [f"{name}_bias" for name in names if f"{name}_bias" in filled_by]
    if hidden is None or set(filled_by) != {*names, *bias_names} or len(bias_names) == 1:
        return None
    activation = find_activation(hidden, is_gated=is_gated)
    is_transposed = bool(layer.is_transposed)
    up, down = (_matrices(filled_by[name], is_transposed=is_transposed) for name in names)
    biases = [_bias(filled_by[name]) for name in bias_names]
    if activation is None or up is None or down is None or None in biases:
        return None
    return _TwoProducts(up, down, [bias for bias in biases if bias is not None], *activation)


def _matrices(recipe: Recipe, *, is_transposed: bool) -> Sequence[WeightLayout] | None:
    """The weights of a parameter, one below the other. None: kernels do not read them."""
    fits = all(
        len(weight.shape) == 2 and weight.is_transposed == is_transposed
        for weight in recipe.weights
    )
    return recipe.weights if fits and recipe.is_in_rows else None


def _bias(recipe: Recipe) -> ParamSpec | None:
    is_plain = len(recipe.stored) == 1 and not recipe.is_packed
    return recipe.stored[0] if is_plain else None
