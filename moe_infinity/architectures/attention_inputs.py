"""The inputs of attention in a step: keys and values with room for the next token, and the cosines,
sines and masks that all layers share.

transformers copies a layer's cache for every new token. Here the tensors of a cache layer become
views of larger buffers, and a new token is written behind the last. If other code replaced a
layer's tensors, cropped them or kept an older view, the next token begins with a copy.

Legend: B sequences, G heads of keys and values, N tokens of the cache, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moe_infinity.architectures.module_state import is_stock
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.kernels.cpu.decoder_steps import Cached, States
from moe_infinity.kernels.kv_layers import GROWING, WINDOWS, kind_of, with_capacity

BUFFERS = "_moe_infinity_buffers"  # an attribute of cache layers
MIN_ROOM = 64  # tokens
MASK = "attention_mask"  # the argument of a layer
# Tensors that a prompt of text has.
OF_TEXT = (
    "input_ids", "inputs", MASK, "position_ids", "cache_position", "token_type_ids",
)  # fmt: skip


@dataclass(slots=True)
class _Buffers:
    keys: Tensor  # [B, G, capacity, d]
    values: Tensor
    start: int  # of the layer's tokens
    stop: int  # of the layer's tokens; the buffer is free from there on

    def hold(self, cache_layer: Any) -> bool:
        """Return True if the layer's tensors are these tokens, all of them and nothing more."""
        return all(
            tokens.shape[2] == self.stop - self.start
            and tokens.shape[0] == buffer.shape[0]
            and tokens.data_ptr()
            == buffer.data_ptr() + self.start * buffer.stride(2) * tokens.itemsize
            for tokens, buffer in (
                (cache_layer.keys, self.keys),
                (cache_layer.values, self.values),
            )
        )


def _updates() -> tuple[Any, ...]:
    """Return the methods by which caches take new tokens, which `with_room` replaces."""
    return DynamicCache.update, DynamicLayer.update, DynamicSlidingWindowLayer.update


STOCK_UPDATES = _updates()
ARE_STOCK = all(map(is_stock, STOCK_UPDATES))


def takes_as_stock(cache: Any) -> bool:
    """Return True for a DynamicCache whose methods nobody has replaced."""
    return (
        ARE_STOCK
        and type(cache) is DynamicCache
        and "update" not in vars(cache)
        and _updates() == STOCK_UPDATES
    )


def can_grow(cache_layer: Any) -> bool:
    """Return True if the layer has tokens, and is of a class that this module knows."""
    if "update" in vars(cache_layer):  # somebody's own method
        return False
    is_window = type(cache_layer) in WINDOWS and not cache_layer.record_past
    is_known = (is_window or type(cache_layer) in GROWING) and cache_layer.is_initialized
    return is_known and cache_layer.keys.numel() > 0


def keeps_nothing(layer: Any) -> bool:
    """Return True for the cache of a layer that has no tokens of its own. transformers 5.17 has no
    such class.
    """
    return type(layer).__name__ == "DummyLayer"


def is_text_alone(named: Mapping[str, Any]) -> bool:
    """Return True if no other tensor comes with the tokens of a prompt, as those of images, videos
    and sound do. `named` are the arguments of `generate()`.
    """
    return not any(
        isinstance(value, Tensor) for name, value in named.items() if name not in OF_TEXT
    )


def can_be_cut(config: Any) -> bool:
    """Return True if a prompt may be computed in several passes: nothing but keys and values goes
    from one to the next.
    """
    if config.is_encoder_decoder:
        return False
    layers = DynamicCache(config=config).layers
    grows = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in grows or keeps_nothing(layer) for layer in layers)


def with_room(cache_layer: Any) -> tuple[Tensor, Tensor]:
    """Return the layer's keys and values [B, G, N, ...] with one more token at the end, which the
    caller writes. It belongs to the layer once `add_token` was called.
    """
    buffers: _Buffers | None = vars(cache_layer).get(BUFFERS)
    if buffers is None or buffers.stop == buffers.keys.shape[2] or not buffers.hold(cache_layer):
        num_tokens = cache_layer.keys.shape[2]
        capacity = num_tokens + max(MIN_ROOM, num_tokens // 8)
        keys = with_capacity(cache_layer.keys, capacity)
        values = with_capacity(cache_layer.values, capacity)
        buffers = _Buffers(keys, values, 0, num_tokens)
        vars(cache_layer)[BUFFERS] = buffers
        _show(cache_layer, buffers)
    tokens = slice(buffers.start, buffers.stop + 1)
    return buffers.keys[:, :, tokens], buffers.values[:, :, tokens]


def add_token(cache_layer: Any) -> None:
    """Let the layer have the token that was written behind its last, see `with_room`."""
    buffers: _Buffers = vars(cache_layer)[BUFFERS]
    buffers.stop += 1
    if isinstance(cache_layer, DynamicSlidingWindowLayer):
        cache_layer.cumulative_length += 1
        buffers.start = max(buffers.start, buffers.stop - (cache_layer.sliding_window - 1))
    _show(cache_layer, buffers)


def _show(cache_layer: Any, buffers: _Buffers) -> None:
    tokens = slice(buffers.start, buffers.stop)
    cache_layer.keys = buffers.keys[:, :, tokens]
    cache_layer.values = buffers.values[:, :, tokens]


class KeysAndValues:
    """How the kernel reaches the keys and values that one layer has in a cache."""

    def __init__(self, kind: str, rows: tuple[int, int, int]) -> None:
        """`kind` is that of the numbers in the cache, `rows` the heads, and how many numbers a key
        and a value of one have.
        """
        self._kind = kind
        num_heads, of_key, of_value = rows
        self._shapes = (num_heads, of_key), (num_heads, of_value)

    def fits(self, cache_layer: Any, x: Tensor, mask: Tensor | None) -> bool:
        """Return True if the kernel can go on with its keys and values."""
        if not can_grow(cache_layer) or len(cache_layer.keys) != len(x):
            return False
        keys = cache_layer.keys
        values = cache_layer.values
        if (keys.shape[1::2], values.shape[1::2]) != self._shapes or keys.dtype != values.dtype:
            return False  # of another model
        mask_shape = len(x), 1, 1, cache_layer.keys.shape[2] + 1
        return (mask is None or mask.shape == mask_shape) and kind_of(cache_layer) == self._kind

    def open(self, cache_layer: Any) -> Cached:
        """Return the keys and values, with room for a token."""
        return Cached(*with_room(cache_layer))

    def add_token(self, cache_layer: Any, _: Cached) -> None:
        """Let the layer have the token that was written, see `open`."""
        add_token(cache_layer)

    def mark(self, cache_layer: Any) -> Tensor:
        """Return a tensor that is another one after each token."""
        keys: Tensor = cache_layer.keys
        return keys


def version_of(x: Tensor) -> object:
    """Return how often a tensor was changed in place. That of a tensor of torch.inference_mode,
    which is not counted, equals no other.
    """
    return object() if x.is_inference() else x._version


class Angles:
    """The cosines, sines and masks of a step in the form that kernels read. All layers of a step
    are given the same tensors, so each is converted once.
    """

    def __init__(self, num_pairs: int) -> None:
        self._num_pairs = num_pairs
        self._given: Any = None
        self._versions: tuple[object, ...] = ()  # of the given tensors
        self._angles: tuple[Tensor, Tensor]
        self._mask: Tensor | None = None
        self._mask_version: object = None
        self._numbers: Tensor | None = None

    def of(
        self, given: tuple[Tensor, Tensor] | Tensor, num_tokens: int = 1
    ) -> tuple[Tensor, Tensor]:
        """[B or 1, N, ...], or complex numbers -> float32 [tokens or 1, pairs]."""
        tensors = (given,) if isinstance(given, Tensor) else given
        versions = tuple(map(version_of, tensors))
        if given is not self._given or versions != self._versions:
            cos, sin = (given.real, given.imag) if isinstance(given, Tensor) else given
            self._angles = self._rows(cos, num_tokens), self._rows(sin, num_tokens)
            self._given = given
            self._versions = versions
        return self._angles

    def _rows(self, angle: Tensor, num_tokens: int) -> Tensor:
        rows = angle[..., : self._num_pairs].to(torch.float32).flatten(0, 1).contiguous()
        is_of_all = len(rows) in (1, num_tokens) or num_tokens == 1
        return rows if is_of_all else rows.repeat(num_tokens // len(rows), 1)

    def mask_of(self, mask: Tensor | None, num_tokens: int) -> Tensor | None:
        """[B, 1, 1, N], added or True where to look -> float32 [B, N]. None: it hides nothing."""
        if mask is None:
            return None
        if mask is not self._mask or version_of(mask) != self._mask_version:
            numbers = mask.view(len(mask), num_tokens)
            if numbers.dtype == torch.bool:
                numbers = torch.zeros_like(numbers, dtype=torch.float32).masked_fill_(
                    ~numbers, -torch.inf
                )
            self._numbers = None if hides_nothing(mask) else numbers.to(torch.float32).contiguous()
            self._mask = mask
            self._mask_version = version_of(mask)
        return self._numbers


def angles_and_mask(
    angles: Angles | None, kwargs: dict[str, Any], cached: Cached | States
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Return angles and mask of a layer's arguments, as kernels read them; None if it has none."""
    if angles is None:
        return None, None
    mask = angles.mask_of(kwargs.get(MASK), cached.num_tokens)
    return angles.of(kwargs["position_embeddings"]), mask


def hides_nothing(mask: Tensor | None) -> bool:
    """Return True if each token may look at all. A mask is added, or has True where to look."""
    if mask is None:
        return True
    return bool(mask.all()) if mask.dtype == torch.bool else not mask.any()


CACHE_NAMES = ("cache", "past_key_values")  # if a call has both, transformers takes the first


def cache_name(names: Container[str]) -> str | None:
    """Return the KV cache's name among names of parameters or arguments; None without one."""
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the KV cache among the arguments of a call; None if there is none."""
    return arguments.get(cache_name(arguments) or "")


def cache_parameter(forward: Callable[..., Any]) -> str:
    """Return the name by which a forward method takes a KV cache. Raises UnsupportedModelError if
    it takes none: a cache that is dropped leaves each token without those before it.
    """
    name = cache_name(signature(forward).parameters)
    if name is None:
        raise UnsupportedModelError(
            f"{getattr(forward, '__qualname__', forward)}() takes no KV cache; "
            f"expected a parameter named {' or '.join(CACHE_NAMES)}\n"
            "hint: without one there is no decode step; generate() with use_cache=False may run it"
        )
    return name
