"""Decoder layers whose attention kernels/cpu/decoder.py computes in one call, in steps of one token
of each sequence.

Whether a layer is one of them is found by trying, not by the model's name: it has the usual parts,
and on random tokens, in float32, it gives what the kernel gives. One layer of each kind is tried
when the model is loaded. The others, and all longer inputs, go the usual way; so does a call with
arguments that are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from moe_infinity.architectures import growing_cache
from moe_infinity.architectures.decoder_parts import (
    ATTENTION,
    NORM,
    RESIDUAL_NORM,
    described,
    feed_forward,
    has_usual_parts,
    kind_of,
    router_of,
)
from moe_infinity.architectures.decoder_trial import find_attention
from moe_infinity.kernels.cpu.decoder import Attention, DecoderAttention

MOST_SEQUENCES = 64  # of a step
# Arguments of a layer that the kernel serves, or that say nothing to it; others only if not given.
SERVED = {"attention_mask", "past_key_values", "position_embeddings"}
KNOWN = SERVED | {"position_ids", "use_cache", "cache_position"}


class DecoderLayer:
    """In place of the forward method of one decoder layer."""

    def __init__(self, layer: nn.Module, attention: Attention, angles: Angles) -> None:
        self._layer = layer
        self._attention = getattr(layer, ATTENTION)
        self._feed_forward = feed_forward(layer)
        self._stock: Callable[..., Any] = layer.forward
        self._angles = angles
        router = router_of(self._feed_forward)
        self._router = None if router is None else KnownLogits(router)
        self._norms = getattr(layer, NORM), getattr(layer, RESIDUAL_NORM)
        self._dtype = attention.out.dtype
        self._kernel = DecoderAttention(attention, self._dtype)
        modules = [*self._attention.modules(), *self._norms]
        self._weights = [
            (module._parameters, name, weight.data_ptr())
            for module in modules
            for name, weight in module.named_parameters(recurse=False)
        ]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the stock method."""
        cache_layer = None if args else self._cache_layer(hidden_states, kwargs)
        if cache_layer is None:
            return self._stock(hidden_states, *args, **kwargs)
        keys, values = growing_cache.with_room(cache_layer)
        mask = self._angles.mask_of(kwargs.get("attention_mask"), keys.shape[2])
        residual_BD, normed_BD, logits_BE = self._kernel(
            hidden_states[:, 0], self._angles.of(kwargs["position_embeddings"]), keys, values, mask
        )
        growing_cache.take(cache_layer)
        if self._router is not None:
            self._router.expect(normed_BD, logits_BE)
        out = self._feed_forward(normed_BD[:, None])
        return residual_BD[:, None] + (out[0] if isinstance(out, tuple) else out)

    def _cache_layer(self, x: Tensor, kwargs: dict[str, Any]) -> Any | None:
        """None if this call is not the kernel's."""
        cache: Any = kwargs.get("past_key_values")
        index = getattr(self._attention, "layer_idx", None)
        known = (
            x.shape[1] == 1
            and x.is_contiguous()
            and len(x) <= MOST_SEQUENCES
            and x.dtype == self._dtype
            and not torch.is_grad_enabled()
            and type(cache) is DynamicCache
            and index is not None
            and index < len(cache.layers)
            and all(kwargs[name] is None or kwargs[name] is False for name in kwargs.keys() - KNOWN)
            and not self._is_watched()
            and self._is_current()
        )
        if not known:
            return None
        cache_layer = cache.layers[index]
        if not growing_cache.can_grow(cache_layer) or len(cache_layer.keys) != len(x):
            return None
        mask = kwargs.get("attention_mask")
        fits = mask is None or mask.shape == (len(x), 1, 1, cache_layer.keys.shape[2] + 1)
        return cache_layer if fits and cache_layer.keys.dtype == x.dtype else None

    def _is_current(self) -> bool:
        """Whether the weights are still those that the kernel reads."""
        return all(
            (weight := parameters[name]) is not None and weight.data_ptr() == address
            for parameters, name, address in self._weights
        )

    def _is_watched(self) -> bool:
        """Whether somebody wants to see what the modules inside are called with."""
        return any(
            module._forward_hooks or module._forward_pre_hooks
            for module in (self._attention, *self._norms)
        )


class KnownLogits:
    """Gives a router the logits that the kernel has computed from its next input, in place of its
    product with its own weight; all else is the router's own code.
    """

    def __init__(self, router: nn.Module) -> None:
        self._weight: Any = router.weight
        self._stock = router.forward
        self._x: Tensor | None = None
        self._logits: Tensor | None = None
        vars(router)["forward"] = self._forward

    def expect(self, x_BD: Tensor, logits_BE: Tensor) -> None:
        """The next input, and its logits."""
        self._x = x_BD
        self._logits = logits_BE

    def _forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        expected = self._x
        self._x = None
        if expected is None or x.data_ptr() != expected.data_ptr() or len(args) + len(kwargs):
            return self._stock(x, *args, **kwargs)
        with _Answer(self._weight, self._logits):
            return self._stock(x)


class _Answer(TorchFunctionMode):
    """Answers one product with a weight."""

    def __init__(self, weight: Tensor, out: Any) -> None:
        super().__init__()
        self._weight = weight
        self._out = out

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is nn.functional.linear and args[1] is self._weight and len(args) == 2:
            return self._out.to(args[0].dtype).view(*args[0].shape[:-1], -1)
        return function(*args, **(kwargs or {}))


class Angles:
    """Cosines, sines and masks as the kernel wants them: the layers of a step are given the same,
    so each is made once.
    """

    def __init__(self, num_pairs: int) -> None:
        self._num_pairs = num_pairs
        self._given: Any = None
        self._angles: tuple[Tensor, Tensor]
        self._mask: Tensor | None = None
        self._numbers: Tensor | None = None

    def of(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B or 1, 1, ...] -> float32 [B or 1, pairs]."""
        if given is not self._given:
            cos, sin = (
                angle[:, 0, : self._num_pairs].to(torch.float32).contiguous() for angle in given
            )
            self._angles = cos, sin
            self._given = given
        return self._angles

    def mask_of(self, mask: Tensor | None, num_tokens: int) -> Tensor | None:
        """[B, 1, 1, N], added or True where to look -> float32 [B, N]."""
        if mask is None:
            return None
        if mask is not self._mask:
            numbers = mask.view(len(mask), num_tokens)
            if numbers.dtype == torch.bool:
                numbers = torch.zeros_like(numbers, dtype=torch.float32).masked_fill_(
                    ~numbers, -torch.inf
                )
            self._numbers = numbers.to(torch.float32).contiguous()
            self._mask = mask
        return self._numbers


def use_kernels(model: nn.Module) -> None:
    """Replace the forward methods of the decoder layers of a model that the kernel can compute."""
    rotations = [m for m in model.modules() if hasattr(m, "inv_freq") and not list(m.children())]
    found: dict[Any, Attention | None] = {}
    angles: dict[int, Angles] = {}
    for layer in list(model.modules()):
        if not has_usual_parts(layer):
            continue
        kind = kind_of(layer)
        if kind not in found:
            tried = (find_attention(layer, rotation) for rotation in rotations)
            found[kind] = next((good for good in tried if good is not None), None)
        example = found[kind]
        if example is not None:
            num_pairs = example.rotated // 2
            own = described(layer, example.rotated, example.pairs)
            of_step = angles.setdefault(num_pairs, Angles(num_pairs))
            vars(layer)["forward"] = DecoderLayer(layer, own, of_step).forward
