"""Linear attention with the gated delta rule on a CPU, in steps of one new token of each sequence:
that of Qwen3-Next and Qwen3.5. Between its linear layers, which are called as before, one call of
kernels/cpu/delta_rule.py computes what the module's own code would.

One module of each kind is tried when the model is loaded (trial.py). All longer inputs run the
module's own code, and so does a call with arguments that are not known here, or to modules that
were changed or are watched (module_state.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from moe_infinity.architectures.attention_inputs import takes_as_stock
from moe_infinity.architectures.decoder_layers import MOST_SEQUENCES
from moe_infinity.architectures.decoder_search import plain_attributes
from moe_infinity.architectures.module_state import ModuleState, replace_forward, stock_forward
from moe_infinity.architectures.trial import (
    Differs,
    FellBack,
    Found,
    Trial,
    Verdict,
    is_close,
    path_taken,
    verdict,
)
from moe_infinity.architectures.without_experts import uncompiled
from moe_infinity.kernels.cpu.delta_rule import DTYPES, DeltaShape, DeltaWeights, delta_step
from moe_infinity.report import PathTaken

# The linear layers that go in: each kind of number apart, or those of a head of keys together.
APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
TOGETHER = ("in_proj_qkvz", "in_proj_ba")
PARTS = {"conv1d", "norm", "out_proj"}
CACHE_ARGUMENTS = ("cache", "cache_params")  # since transformers 5.24, and before
TRIED_TOKENS = 5  # of a prompt, before one more


class LinearAttentions:
    """The linear attentions of a model. Those that the kernel can compute get another forward
    method.
    """

    def __init__(self, model: nn.Module) -> None:
        self._connected: dict[nn.Module, LinearAttention] = {}
        self._verdicts: dict[nn.Module, Verdict[None]] = {}
        kinds: dict[Any, Verdict[None]] = {}
        for module in model.modules():
            names = products_of(module)
            if names is not None:
                key = tuple((type(each), plain_attributes(each)) for each in module.modules())
                if key not in kinds:
                    kinds[key] = verdict(partial(_search, module, names))
                self._verdicts[module] = kinds[key]
                if isinstance(kinds[key], Found):
                    self._connected[module] = LinearAttention(module, names)

    def paths(self) -> Iterator[PathTaken]:
        """Yield which path each of them takes, as of now."""
        for module, found in self._verdicts.items():
            connected = self._connected.get(module)
            change = None if connected is None else connected.change()
            yield path_taken("attention", module, found if change is None else FellBack(change))


class LinearAttention:
    """The forward method of one module that the kernel can compute."""

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self._module = module
        self._names = names
        self._shape = shape_of(module, names)
        self._stock = stock_forward(module)
        replace_forward(module, uncompiled(self.forward))
        self._state = ModuleState([module.conv1d, module.norm], around=[module])

    def change(self) -> str | None:
        """Return what is different from when the model was loaded; None if nothing is."""
        return self._state.change()

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module's own forward method would."""
        states = None if args else self._states_of(hidden_states, kwargs)
        if states is None or self.change() is not None:
            return self._stock(hidden_states, *args, **kwargs)
        return compute_step(self._module, self._names, self._shape, hidden_states, *states)

    def _states_of(self, x: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Return the states of its convolution and of its rule; None for arguments that the kernel
        does not know.
        """
        cache: Any = next((kwargs[name] for name in CACHE_ARGUMENTS if name in kwargs), None)
        index = self._module.layer_idx
        is_for_kernel = (
            x.shape[1] == 1
            and len(x) <= MOST_SEQUENCES
            and not torch.is_grad_enabled()
            and takes_as_stock(cache)
            and index < len(cache.layers)
            and kwargs.get("attention_mask") is None
            and kwargs.get("cu_seq_lens_q") is None
        )
        return states_in(cache.layers[index], x, self._shape) if is_for_kernel else None


def states_in(layer: Any, x: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor] | None:
    """Return both states of a layer of the cache if the kernel can go on with them."""
    if not isinstance(layer, LinearAttentionLayer) or layer.record_past:
        return None
    if not layer.has_previous_state[0]:
        return None
    window = layer.conv_states[0]
    state = layer.recurrent_states[0]
    heads = len(x), shape.num_value_heads, shape.key_width, shape.value_width
    fits = (
        state is not None
        and state.shape == heads
        and state.dtype == torch.float32
        and state.is_contiguous()
        and window.shape[:2] == (len(x), shape.num_channels)
        and window.shape[2] >= shape.taps - 1
        and window.dtype == x.dtype
        and window.dtype in DTYPES
        and window.is_contiguous()
    )
    return (window, state) if fits else None


def compute_step(
    module: Any,
    names: tuple[str, ...],
    shape: DeltaShape,
    x: Tensor,
    window: Tensor,
    state: Tensor,
) -> Tensor:
    """Compute a token of each sequence, [B, 1, D] -> [B, 1, D]. The states are changed in place."""
    products = torch.cat([getattr(module, name)(x) for name in names], dim=-1)
    weights = DeltaWeights(
        convolution=module.conv1d.weight,
        bias=module.conv1d.bias,
        decay=module.A_log,
        dt=module.dt_bias,
        norm=module.norm.weight,
        norm_eps=module.norm.variance_epsilon,
    )
    out = delta_step(shape, weights, products[:, 0], window, state)
    result: Tensor = module.out_proj(out.to(x.dtype)[:, None])
    return result


def products_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the linear layers that go into a module of this kind; None for others."""
    children = {name for name, _ in module.named_children()}
    return next((names for names in (APART, TOGETHER) if children == PARTS | {*names}), None)


def shape_of(module: Any, names: tuple[str, ...]) -> DeltaShape:
    """Return the heads of a module, and where its products have them."""
    num_heads = module.num_k_heads
    per_head = module.num_v_heads // num_heads
    key = module.head_k_dim
    value = per_head * module.head_v_dim
    sizes = {"query": key, "key": key, "value": value, "z": value, "b": per_head, "a": per_head}
    groups = [[name] for name in sizes] if names == APART else [[*sizes][:4], [*sizes][4:]]
    places: dict[str, int] = {}
    at = 0
    for group in groups:
        before = 0
        for name in group:
            places |= {name: at + before, f"{name}_step": sum(sizes[n] for n in group)}
            before += sizes[name]
        at += num_heads * before
    return DeltaShape(
        num_key_heads=num_heads,
        per_key_head=per_head,
        key_width=key,
        value_width=module.head_v_dim,
        taps=module.conv1d.kernel_size[0],
        **places,
    )


def _search(module: Any, names: tuple[str, ...]) -> None:
    """Run a prompt and one more token by the module's own code, and the token by the kernel, with
    random products.
    """
    shape = shape_of(module, names)
    stubs: dict[str, nn.Module] = {"out_proj": nn.Identity()}
    num_products = 0
    for name in names:
        stubs[name] = _Columns(num_products, getattr(module, name).out_features)
        num_products += getattr(module, name).out_features
    trial = Trial(module, seed=4, stubs=stubs)
    own = trial.module
    x = trial.random(2, TRIED_TOKENS + 1, num_products)
    cache = DynamicCache()
    layer = LinearAttentionLayer()
    cache.layers = [layer] * (own.layer_idx + 1)
    forward = type(own).forward
    forward(own, x[:, :-1], cache)
    states = states_in(layer, x[:, -1:], shape)
    if states is None:
        raise Differs("its states are not those that the kernel knows")
    window, state = (each.clone() for each in states)
    wanted = forward(own, x[:, -1:], cache)
    found = compute_step(own, names, shape, x[:, -1:], window, state)
    kept = layer.conv_states[0], layer.recurrent_states[0]
    if not all(map(is_close, (found, window, state), (wanted, *kept))):
        raise Differs("the kernel gives other numbers")


class _Columns(nn.Module):
    """A stub for a linear layer, which gives some columns of its input."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self._columns = slice(first, first + count)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self._columns]
