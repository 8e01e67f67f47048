"""Linear attention with the gated delta rule on a CPU, in steps of one new token of each sequence:
that of Qwen3-Next and Qwen3.5. kernels/cpu/delta_rule.py computes it as a part of a decoder layer.

One layer of each kind is tried when the model is loaded (trial.py). All longer inputs run the
layer's own code, see decoder_layers.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from moe_infinity.architectures.attention_search import LayerTrial, norms_of
from moe_infinity.architectures.model_parts import (
    Linear,
    ReorderedLinear,
    attention_of,
    is_linear,
    weight_of,
)
from moe_infinity.architectures.trial import Differs, Verdict, first_found, is_close, verdict
from moe_infinity.kernels.cpu.decoder import DecoderKernel, LinearAttention, Router
from moe_infinity.kernels.cpu.decoder_steps import DecoderSteps, States
from moe_infinity.kernels.cpu.delta_rule import DTYPES, DeltaShape
from moe_infinity.kernels.cpu.delta_states import DeltaStates, SpareStates

# The linear layers that go in: each kind of number apart, or those of a head of keys together.
APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
TOGETHER = ("in_proj_qkvz", "in_proj_ba")
PARTS = {"conv1d", "norm", "out_proj"}
TRIED_TOKENS = 5  # of a prompt, before one more


class DeltaProducts(NamedTuple):
    """The linear layers that go into the gated delta rule."""

    names: tuple[str, ...]

    @property
    def num_pairs(self) -> int:
        """No columns are rotated."""
        return 0

    def describe(self, layer: nn.Module, router: Router | None = None) -> LinearAttention:
        """Describe a layer to the kernel. Raises Differs for parts that it does not know."""
        module: Any = attention_of(layer)
        linears = [module.get_submodule(name) for name in self.names]
        shape = shape_of(module, self.names)
        out, places = _out_of(module.out_proj, shape)
        convolution = module.conv1d.weight.detach()
        is_read = convolution.is_contiguous() and convolution.dtype in DTYPES
        if not all(map(is_linear, linears)) or any(linear.bias is not None for linear in linears):
            raise Differs("its products are not those that the kernel knows")
        if convolution.shape != (shape.num_channels, 1, shape.taps) or not is_read:
            raise Differs("its convolution is not one that the kernel knows")
        return LinearAttention(
            products=tuple(map(weight_of, linears)),
            out=weight_of(out),
            out_bias=module.out_proj.bias,
            router=router,
            shape=shape,
            convolution=convolution,
            convolution_bias=module.conv1d.bias,
            decay=module.A_log,
            dt=module.dt_bias,
            out_norm=module.norm.weight,
            out_norm_eps=module.norm.variance_epsilon,
            places=places,
            **norms_of(layer),
        )


def _out_of(module: nn.Module, shape: DeltaShape) -> tuple[Linear, list[int]]:
    """Return the last linear layer, and where each head of values is in its columns. Raises Differs
    if columns of a head are apart.
    """
    places = [*range(shape.num_value_heads)]
    if isinstance(module, ReorderedLinear):
        columns = module.inputs.view(shape.num_value_heads, shape.value_width)
        if not (columns.diff(dim=1) == 1).all():
            raise Differs("the columns of a head are apart")
        places = columns[:, 0].argsort().tolist()
        module = module.linear
    if not is_linear(module):
        raise Differs("its last product is not one that the kernel knows")
    return module, places


def is_delta_rule(module: nn.Module) -> bool:
    """Return True for modules with the parts of one of the two kinds."""
    return products_of(module) is not None


def products_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the linear layers that go into a module of this kind; None for others."""
    children = {name for name, _ in module.named_children()}
    return next((names for names in (APART, TOGETHER) if children == PARTS | {*names}), None)


def shape_of(module: Any, names: tuple[str, ...]) -> DeltaShape:
    """Return the heads of a module, and where its products have them."""
    return DeltaShape.of(
        module.num_k_heads,
        module.num_v_heads // module.num_k_heads,
        module.head_k_dim,
        module.head_v_dim,
        module.conv1d.kernel_size[0],
        are_apart=names == APART,
    )


def find_delta_rule(layer: nn.Module) -> Verdict[DeltaProducts]:
    """Find if the kernel computes what a layer does."""
    unpacked: dict[str, Tensor] = {}
    return first_found(
        verdict(partial(_search, layer, unpacked, gives_two=gives_two))
        for gives_two in (False, True)
    )


def _search(layer: nn.Module, unpacked: dict[str, Tensor], *, gives_two: bool) -> DeltaProducts:
    """Run a prompt and one more token by the layer's own code, and the token by the kernel."""
    names = products_of(attention_of(layer))
    assert names is not None
    found = DeltaProducts(names)
    trial = LayerTrial(layer, seed=4, gives_two=gives_two, unpacked=unpacked)
    described = found.describe(trial.module)
    x = trial.random(2, TRIED_TOKENS + 1, len(described.norm))
    cache = DynamicCache()
    own = LinearAttentionLayer()
    module: Any = attention_of(trial.module)
    cache.layers = [own] * (module.layer_idx + 1)
    trial.run(x[:, :-1], cache, None, None)
    access = DeltaStates(described.shape, SpareStates())
    if not access.fits(own, x[:, -1:], None):
        raise Differs("its states are not those that the kernel knows")
    states = States(*(each.clone() for each in access.open(own)))
    wanted = *trial.run(x[:, -1:], cache, None, None), *access.open(own)[:2]
    kernel = DecoderKernel(described, torch.float32)
    given = DecoderSteps([kernel]).attend(0, x[:, -1].contiguous(), None, states, None)
    got = *trial.outputs_of(given), states.next_window, states.next_recurrent
    if not all(map(is_close, got, wanted)):
        raise Differs("the kernel gives other numbers")
    return found
