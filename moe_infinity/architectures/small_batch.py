"""Decode steps on a CPU, in which kernels made for few tokens compute what surrounds the experts.
exact=True does not use them, since their bits are not those of transformers.

    layers            decoder_layers.py, those that decoder_search.py finds
    linear layers     kernels/cpu/linear.py, those that are given the same tensor together
    attention         kernels/cpu/attention.py, in layers that were not found
    convolutions      kernels/cpu/convolution.py, depthwise ones, for inputs of any length
    other products    kernels/cpu/half_products.py, of longer inputs, in half precision
    threads           kernels have them all, torch has one; see kernels/cpu/team.py

Attention of longer inputs gets keys and values once, too, not once for each head that looks at
them. The "sdpa" function in transformers' registry is shared by all models, so it is wrapped once,
and calls the stock function for modules of other models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_infinity.architectures.answered_ahead import AnsweredAhead, TensorVersion
from moe_infinity.architectures.attention_inputs import Angles
from moe_infinity.architectures.decoder_layers import DecoderLayer, LayersAhead
from moe_infinity.architectures.decoder_search import (
    LayerKind,
    dtype_of,
    find_kind,
    key_of,
    unusual_part,
)
from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.model_parts import (
    Linear,
    PackedLinear,
    ReorderedLinear,
    feed_forward,
    is_linear,
    rotations_of,
    router_of,
    weight_of,
)
from moe_infinity.architectures.module_state import (
    has_hooks,
    is_stock,
    is_watched,
    replace_forward,
    stock_forward,
)
from moe_infinity.architectures.prompt_blocks import PromptBlocks
from moe_infinity.architectures.trial import FellBack, Found, Verdict, path_taken
from moe_infinity.architectures.without_experts import uncompiled
from moe_infinity.kernels.cpu.attention import as_wide_as, attend_grouped
from moe_infinity.kernels.cpu.convolution import DepthwiseConvolutions, has_convolution
from moe_infinity.kernels.cpu.decoder_steps import DecoderSteps
from moe_infinity.kernels.cpu.delta_states import SpareStates
from moe_infinity.kernels.cpu.half_products import HalfProducts
from moe_infinity.kernels.cpu.linear import fused_linear
from moe_infinity.kernels.cpu.team import give_torch_all, leave_torch_one
from moe_infinity.kernels.many_rows import (
    MOST_TOKENS,
    MOST_TOKENS_UNPACKED,
    has_products_of_bfloat16,
    is_for_torch,
)
from moe_infinity.layout import WORDS
from moe_infinity.report import PathTaken

MARK = "_moe_infinity_takes_small_batches"  # set on every module of a model that we run
PLAIN: dict[type, Any] = {
    kind: kind.forward for kind in (nn.Linear, PackedLinear) if is_stock(kind.forward)
}
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


class SmallBatchSteps:
    """The steps of few tokens of one model, which our kernels compute until `close`."""

    def __init__(
        self,
        model: nn.Module,
        early_router: EarlyRouter | None,
        kv_dtype: str,
        blocks: PromptBlocks | None = None,  # that long prompts go in; None: as a whole
    ) -> None:
        self._layers = KernelLayers(model, early_router, kv_dtype, blocks)
        for module in model.modules():
            siblings = Siblings()
            is_reordered = isinstance(module, ReorderedLinear)
            for child in [module.linear] if is_reordered else module.children():
                if is_linear(child):
                    replace_forward(child, partial(siblings.forward, child))
            vars(module)[MARK] = True
            if has_convolution(module):
                convolutions = DepthwiseConvolutions().around(stock_forward(module))
                replace_forward(module, uncompiled(convolutions))
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if is_stock(sdpa):  # neither somebody's own nor ours already
            AttentionInterface.register("sdpa", _SmallBatchSdpa(sdpa))
        self._layers.connect()
        stock = stock_forward(model)

        @wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [*map(kwargs.get, ("decoder_input_ids", "input_ids", "inputs_embeds")), *args]
            inputs = next((value for value in given if isinstance(value, Tensor)), None)
            try:
                if inputs is not None and inputs.shape[:2].numel() <= MOST_TOKENS:
                    leave_torch_one()
                    return stock(*args, **kwargs)
                is_fast = has_products_of_bfloat16() or is_watched()
                with nullcontext() if is_fast else HalfProducts():
                    return stock(*args, **kwargs)
            finally:  # also after Ctrl-C, for which torch calls no hook
                give_torch_all()

        self._undo = replace_forward(model, uncompiled(forward))

    def paths(self) -> Iterator[PathTaken]:
        """Yield which path each layer, router and block of experts takes, as of now."""
        yield from self._layers.paths()

    def close(self) -> None:
        """Give the model its own forward method back."""
        self._undo()


class KernelLayers:
    """The layers of a model. Those that the kernel can compute get another forward method."""

    def __init__(
        self,
        model: nn.Module,
        early_router: EarlyRouter | None,
        kv_dtype: str,
        blocks: PromptBlocks | None = None,
    ) -> None:
        self._verdicts: dict[nn.Module, Verdict[LayerKind]] = {}
        self._connected: dict[nn.Module, DecoderLayer] = {}
        self._kv_dtype = kv_dtype
        names: dict[nn.Module, str] = {}
        kinds: dict[Any, Verdict[LayerKind]] = {}
        for name, layer in list(model.named_modules()):
            unusual = unusual_part(layer)
            if unusual is None:
                key = key_of(layer)
                if key not in kinds:
                    kinds[key] = find_kind(layer, rotations_of(model))
                self._verdicts[layer] = kinds[key]
                names[layer] = name
            elif isinstance(layer, GradientCheckpointingLayer):
                self._verdicts[layer] = FellBack(unusual)
        if blocks is not None:  # now: the search has copied layers
            blocks.connect()
        self._take(names, early_router)

    def _take(self, names: dict[nn.Module, str], early_router: EarlyRouter | None) -> None:
        """Describe the layers that were found to kernels."""
        kinds = {
            layer: verdict.path
            for layer, verdict in self._verdicts.items()
            if isinstance(verdict, Found)
        }
        dtypes = {dtype_of(layer) for layer in kinds}
        if len(dtypes) > 1 or torch.float64 in dtypes:
            reason = FellBack("layers have several dtypes, or float64")
            self._verdicts |= dict.fromkeys(kinds, reason)
            return
        angles: dict[int, Angles] = {}
        spare = SpareStates()
        before = ""
        for layer, kind in kinds.items():
            num_pairs = kind.attention.num_pairs
            parent, _, index = before.rpartition(".")
            self._connected[layer] = DecoderLayer(
                layer,
                kind,
                angles.setdefault(num_pairs, Angles(num_pairs)) if num_pairs else None,
                spare,
                early_router,
                kv_dtype=self._kv_dtype,
                may_follow=index.isdecimal() and names[layer] == f"{parent}.{int(index) + 1}",
            )
            before = names[layer]

    def connect(self) -> None:
        """Let kernels compute the layers that were found."""
        layers = list(self._connected.values())
        if layers:
            LayersAhead(DecoderSteps([layer.kernel for layer in layers]), layers)

    def paths(self) -> Iterator[PathTaken]:
        """Yield which path each layer, router and block of experts takes, as of now."""
        for layer, verdict in self._verdicts.items():
            of_layer = of_router = of_block = None
            if isinstance(verdict, Found):
                of_layer, of_router, of_block = self._connected[layer].changes()
            verdict = _unless(of_layer, verdict)
            yield path_taken("layer", layer, verdict)
            if isinstance(verdict, FellBack):
                continue
            block = feed_forward(layer)
            if (router := router_of(block)) is not None:
                yield path_taken("router", router, _unless(of_router, verdict.path.gate))
                yield path_taken("block", block, _unless(of_block, verdict.path.shared_expert))


def _unless(change: str | None, verdict: Verdict[Any]) -> Verdict[Any]:
    """Return the verdict, or that the module's own code runs because of a change."""
    return verdict if change is None else FellBack(change)


class Siblings:
    """The linear layers of one module. Some are given the very same tensor one after the other, as
    those of queries, keys and values are. From then on they are computed together, when the first
    of them is called. Under torch.inference_mode each is computed by itself, see `TensorVersion`.
    """

    def __init__(self) -> None:
        self._input: TensorVersion | None = None  # the last one, and
        self._first: Linear | None = None  # the layer that was given it first
        self._groups: dict[Linear, LinearGroup] = {}  # by their first
        self._products: AnsweredAhead[Linear, tuple[WeightPlace, Tensor]] = AnsweredAhead()

    def forward(self, linear: Linear, input: Tensor) -> Tensor:
        """Compute a linear layer: few tokens without gradients by a kernel, all others by the code
        of its class, which a user may have changed.
        """
        rows = input.shape[:-1]
        own: Callable[..., Tensor] = type(linear).forward
        is_plain = own is PLAIN.get(type(linear)) and is_linear(linear)
        fits = input.shape[-1:] == (linear.in_features,)
        is_for_kernel = is_plain and fits and not torch.is_grad_enabled() and not is_watched()
        if not is_for_kernel or _is_torchs(linear, rows.numel(), input.dtype):
            return own(linear, input)
        place, out = self._products.take(linear, input) or (None, None)
        if place != place_of(linear) or has_hooks(linear):  # one may have changed the weight
            out = self._multiply(linear, input)
        if out is None:
            return own(linear, input)
        # Without gaps, whether computed alone or together: torch's activations round by that.
        return out.to(input.dtype).contiguous().view(*rows, out.shape[-1])

    def _multiply(self, linear: Linear, x: Tensor) -> Tensor | None:
        """Return the product of x with a layer, plus its bias. Those of other layers of its group
        wait until these are called. None if kernels do not read the weight.
        """
        is_next = self._input is not None and self._input.is_of(x) and linear is not self._first
        if is_next:
            self._join(linear)
        else:
            self._products.clear()
            self._input = TensorVersion.of(x)
            self._first = linear
        group = self._groups.get(linear)
        if group is None or not group.is_current:
            group = self._groups[linear] = LinearGroup([linear])
        products = group.multiply(x)
        for sibling, place, product in products:
            if sibling is not linear:
                self._products.put(sibling, x, (place, product))
        return next((product for sibling, _, product in products if sibling is linear), None)

    def _join(self, linear: Linear) -> None:
        """Compute this layer with the first from the next step on."""
        assert self._first is not None
        linears = self._groups[self._first].linears
        if linear not in linears:
            group = LinearGroup([*linears, linear])
            if group.fused is not None:
                self._groups[self._first] = group


def _is_torchs(linear: Linear, num_tokens: int, dtype: torch.dtype) -> bool:
    """Return True if torch is to multiply, with the weight unpacked if it is packed."""
    if not isinstance(linear, PackedLinear):
        return is_for_torch(num_tokens, dtype)
    is_widened = linear.packed.layout.kind not in WORDS  # by kernels
    return not is_widened and is_for_torch(num_tokens, dtype, most_tokens=MOST_TOKENS_UNPACKED)


class LinearGroup:
    """Linear layers that are computed together."""

    def __init__(self, linears: list[Linear]) -> None:
        self.linears = linears
        self._places = list(map(place_of, linears))
        self.fused = fused_linear(list(map(weight_of, linears)))

    @property
    def is_current(self) -> bool:
        """Return True if the weights were neither moved nor cast since the group was made."""
        return all(map(is_linear, self.linears)) and self._places == [*map(place_of, self.linears)]

    def multiply(self, x: Tensor) -> list[tuple[Linear, WeightPlace, Tensor]]:
        """[..., C] -> [T, R] of each layer."""
        if self.fused is None:
            return []
        biases = [linear.bias for linear in self.linears]
        out_TR = self.fused(x.reshape(-1, x.shape[-1]), biases)
        outs = out_TR.split([len(weight) for weight in self.fused.weights], dim=1)
        return list(zip(self.linears, self._places, outs, strict=True))


WeightPlace = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def place_of(linear: Linear) -> WeightPlace:
    """Return where in memory a layer's weight is, and how it lies there."""
    memory = linear.packed.memory if isinstance(linear, PackedLinear) else linear.weight
    return memory.data_ptr(), memory.dtype, memory.shape, memory.stride()


class _SmallBatchSdpa:
    """Transformers' function, but as `attend_grouped` does it where that can."""

    def __init__(self, stock: AttentionFunction) -> None:
        self._stock = stock

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, H, T, d], [B, G, N, d], [B, G, N, dv] -> [B, T, H, dv]."""
        is_ours = MARK in vars(module) and not torch.is_grad_enabled() and not is_watched()
        is_plain = not (kwargs.get("dropout") or kwargs.get("softcap"))
        if is_ours and is_plain and kwargs.get("position_bias") is None:
            scale = kwargs.get("scaling") or query.shape[3] ** -0.5
            is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
            out = attend_grouped(query, key, value, attention_mask, scale, is_causal=is_causal)
            if out is None:
                wide = as_wide_as(key, value)
                out, _ = self._stock(module, query, key, wide, attention_mask, **kwargs)
            return out[..., : value.shape[3]], None
        return self._stock(module, query, key, value, attention_mask, **kwargs)
