"""Which kernels of ours read the experts of an MoE layer where they lie in their slots.

Kernels read experts of any class that compute two products with a known activation between them
(architectures/adapters.py), and whose weights have one of the layouts that kernels know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from moe_infinity.architectures.adapters import ExpertsModule, find_activation
from moe_infinity.architectures.trial import FellBack, Found, Verdict
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.recipe import Recipe
from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton.slot_mlp import Matrix, SlotMlp, plain_matrix, slot_mlp
from moe_infinity.layout import WeightLayout

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts


def fused_layer(layer: ExpertsModule, recipes: LayerRecipes) -> Verdict[FusedExperts]:
    """Find the kernels of the CPU that compute all activated experts of a layer in one call."""
    mlp = _two_products(layer, recipes)
    if isinstance(mlp, FellBack):
        return mlp
    from moe_infinity.kernels.cpu.experts import fused_experts

    experts = fused_experts(
        mlp.path.up,
        mlp.path.down,
        mlp.path.activation,
        biases=mlp.path.biases,
        is_interleaved=mlp.path.is_interleaved,
    )
    return FellBack("kernels do not read its weights") if experts is None else Found(experts)


def slot_layer(
    layer: ExpertsModule,
    recipes: LayerRecipes,
    matrix_of: Callable[[WeightLayout], Matrix | None] = plain_matrix,
) -> Verdict[SlotMlp]:
    """Describe the experts of a layer for the kernel of a GPU. `matrix_of` knows the weights that
    it reads.
    """
    mlp = _two_products(layer, recipes)
    if isinstance(mlp, FellBack):
        return mlp
    described = None
    if len(mlp.path.down) == 1:
        described = slot_mlp(
            mlp.path.up,
            mlp.path.down[0],
            activation=mlp.path.activation,
            biases=mlp.path.biases,
            is_interleaved=mlp.path.is_interleaved,
            weighs_input=layer.adapter.weighs_input,
            matrix_of=matrix_of,
        )
    return FellBack("kernels do not read its weights") if described is None else Found(described)


class _TwoProducts(NamedTuple):
    """An expert that is one product, an activation, and another product."""

    up: Sequence[WeightLayout]  # one below the other
    down: Sequence[WeightLayout]
    biases: list[ParamSpec]  # one for each weight, or none
    activation: Activation
    is_interleaved: bool


def _two_products(layer: ExpertsModule, recipes: LayerRecipes) -> Verdict[_TwoProducts]:
    """Find the two products of the experts, and their weights in a slot."""
    is_plain = layer.is_transposed is not None
    hidden = layer.adapter.hidden(layer.module) if is_plain else None
    filled_by = {
        spec.name: recipe for recipe in recipes.recipes for spec in recipe.targets.values()
    }
    is_gated = "gate_up_proj" in filled_by
    names = ["gate_up_proj" if is_gated else "up_proj", "down_proj"]
    bias_names = [f"{name}_bias" for name in names if f"{name}_bias" in filled_by]
    if hidden is None:
        return FellBack("an expert is more than an activation between two products")
    if set(filled_by) != {*names, *bias_names} or len(bias_names) == 1:
        return FellBack(f"an expert's parameters are {', '.join(sorted(filled_by))}")
    activation = find_activation(hidden, is_gated=is_gated)
    if isinstance(activation, FellBack):
        return activation
    is_transposed = bool(layer.is_transposed)
    up, down = (_matrices(filled_by[name], is_transposed=is_transposed) for name in names)
    of_biases = [filled_by[name] for name in bias_names]
    biases = [bias for recipe in of_biases for bias in recipe.stored]
    is_packed = any(recipe.is_packed for recipe in of_biases)
    if up is None or down is None or is_packed or len(biases) not in (0, len(up) + len(down)):
        return FellBack("kernels do not read its weights as they lie in a slot")
    function, is_interleaved = activation.path
    orders = {filled_by[name].alternates for name in names[:1] + bias_names[:1]}
    if True in orders and (len(orders) > 1 or not is_interleaved):
        return FellBack("kernels do not read its rows in the order that they have in a slot")
    return Found(_TwoProducts(up, down, biases, function, is_interleaved and True not in orders))


def _matrices(recipe: Recipe, *, is_transposed: bool) -> Sequence[WeightLayout] | None:
    """The weights of a parameter, one below the other. None: kernels do not read them."""
    fits = all(
        len(weight.shape) == 2 and weight.is_transposed == is_transposed
        for weight in recipe.weights
    )
    return recipe.weights if fits and recipe.is_in_rows else None
