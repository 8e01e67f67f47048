"""Tries whether the kernel of a decoder layer computes what the layer's own code computes: on
random tokens, in float32, with every way to rotate heads that there is.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moe_infinity.architectures.cache_argument import cache_parameter
from moe_infinity.architectures.decoder_parts import described
from moe_infinity.architectures.layer_parts import (
    ATTENTION,
    NORM,
    feed_forward,
)
from moe_infinity.architectures.trials import in_float32, is_close
from moe_infinity.kernels.cpu.decoder import HALVES, NEIGHBOURS, Attention, DecoderKernel
from moe_infinity.kernels.cpu.decoder_steps import Cached, DecoderSteps

STRONGER = 8  # the norm in a second trial, so that what limits large numbers is seen

logger = logging.getLogger(__name__)


def find_attention(layer: nn.Module, rotation: nn.Module) -> Attention | None:
    """The layer as the kernel has to see it, so that both give the same; None if they never do."""
    for gives_two in (False, True):
        try:
            with torch.no_grad():
                return _matching(layer, rotation, gives_two=gives_two)
        except Exception as error:  # whatever a module does that wants other arguments or shapes
            logger.debug("%s is computed by its own code: %s", type(layer).__name__, error)
    return None


def _matching(layer: nn.Module, rotation: nn.Module, *, gives_two: bool) -> Attention | None:
    trials = [
        _Trial(layer, rotation, strength=strength, gives_two=gives_two)
        for strength in (1, STRONGER)
    ]
    attention: Any = layer.get_submodule(ATTENTION)
    for rotated, pairs in _rotations(trials[0].cos.shape[-1], attention.head_dim):
        if all(trial.passes(rotated, pairs) for trial in trials):
            return described(layer, rotated, pairs)
    return None


def _rotations(width: int, head_width: int) -> Iterator[tuple[int, int]]:
    for rotated, pairs in product((width, 2 * width), (HALVES, NEIGHBOURS)):
        if rotated <= head_width:
            yield rotated, pairs


class _Trial:
    """A layer's own code on random tokens, in float32: two of a prompt, then one more."""

    def __init__(
        self, layer: nn.Module, rotation: nn.Module, *, strength: float, gives_two: bool
    ) -> None:
        make = torch.Generator().manual_seed(1)
        self._layer = _with_stub(layer, gives_two=gives_two)
        norm: Any = getattr(self._layer, NORM)
        norm.weight.mul_(strength)
        width = len(norm.weight)
        x = torch.randn(1, 3, width, generator=make, dtype=torch.float32, device="cpu")
        positions = torch.tensor([[3, 4, 5]], dtype=torch.long, device="cpu")
        cos, sin = in_float32(rotation)(x, positions)
        self.cos = cos
        self._x = x[:, 2:]
        self._angles = cos[:, 2], sin[:, 2]
        stub = feed_forward(self._layer)
        assert isinstance(stub, _FeedForward)
        cache = DynamicCache()
        mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cpu").tril()
        self._run(x[:, :2], (cos[:, :2], sin[:, :2]), cache, mask)
        (own,) = [kept for kept in cache.layers if kept.is_initialized]
        self._keys = own.keys.clone(), own.values.clone()
        self._wanted = self._run(x[:, 2:], (cos[:, 2:], sin[:, 2:]), cache, None)
        self._wanted_keys = own.keys, own.values
        self._normed = stub.given

    def _run(self, x: Tensor, angles: Any, cache: Any, mask: Tensor | None) -> Tensor:
        out = self._layer(
            x,
            attention_mask=mask,
            position_ids=None,
            use_cache=True,
            position_embeddings=angles,
            **{cache_parameter(self._layer.forward): cache},
        )
        if not isinstance(out, Tensor):
            raise TypeError(f"a decoder layer that returns {type(out).__name__}")
        return out

    def passes(self, rotated: int, pairs: int) -> bool:
        """Whether the kernel gives the same, with these columns rotated in such pairs."""
        kernel = DecoderKernel(described(self._layer, rotated, pairs), torch.float32)
        cos, sin = (angle[:, : rotated // 2].contiguous() for angle in self._angles)
        keys, values = (torch.cat([kept, kept[:, :, :1]], dim=2) for kept in self._keys)
        cached = Cached(keys, values)
        given = DecoderSteps([kernel]).attend(0, self._x[:, 0], (cos, sin), cached, None)
        found = given.residual + _FeedForward.of(given.normed), given.normed, keys, values
        wanted = self._wanted[:, 0], self._normed[:, 0], *self._wanted_keys
        return all(is_close(one, other) for one, other in zip(found, wanted, strict=True))


class _FeedForward(nn.Module):
    """In place of the experts: notes what it is given."""

    def __init__(self, *, gives_two: bool) -> None:
        super().__init__()
        self._gives_two = gives_two
        self.given: Any = None

    @staticmethod
    def of(x: Tensor) -> Tensor:
        return x.flip(-1) * 0.5

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = x
        return (self.of(x), None) if self._gives_two else self.of(x)


def _with_stub(layer: nn.Module, *, gives_two: bool) -> Any:
    """A copy without what comes after attention."""
    own = copy.copy(layer)
    last = feed_forward(layer)
    own._modules = {
        name: _FeedForward(gives_two=gives_two) if module is last else in_float32(module)
        for name, module in layer.named_children()
    }
    return own
