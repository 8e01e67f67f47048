"""The layers of the caches that we make: transformers' own, but

    packed    keys and values are stored in 8 bits (kv_rows.py), and given back as they came
    windows   a layer with a sliding window holds the memory of its window alone, where stock keeps
              a view into all tokens of a prompt until the next step

Both keep what stock keeps, in tensors of the same names, so that joining, cutting, reordering and
copying them needs no more than stock layers do. Recurrent states stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from moe_infinity.errors import UnsupportedModelError
from moe_infinity.kernels.kv_rows import packed_rows, unpacked_rows
from moe_infinity.layout import KINDS
from moe_infinity.system.memory import return_free_memory, zeroed_memory

TRIMMED_BYTES = 32 << 20  # that are copied before freed memory is given back
_copied_bytes = 0  # since that was done last; of all caches, as they share the C library's memory


class _Windowed:
    """In front of a layer with a sliding window: leaves the tokens before the window."""

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole: Any = super().update(keys, values, *args, **kwargs)  # type: ignore[misc]
        if keys.shape[2] > 1:  # a step of one token leaves no more than that token
            keep_alone(self)
        return whole


class _Packed:
    """In front of a layer that grows: packs new tokens, and attention sees them as they are
    stored, so that it does not matter in which pass they came.
    """

    kv_dtype: str

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = (packed_rows(each, self.kv_dtype) for each in (keys, values))
        whole = super().update(*rows, *args, **kwargs)  # type: ignore[misc]
        dtypes = keys.dtype, values.dtype
        return tuple(map(unpacked_rows, whole, (self.kv_dtype, self.kv_dtype), dtypes))


class WindowLayer(_Windowed, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Keeps a sliding window."""


class HybridWindowLayer(_Windowed, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc]
    """Keeps a sliding window beside recurrent states."""


class PackedLayer(_Packed, DynamicLayer):  # type: ignore[misc]
    """Keeps all tokens, packed."""


class PackedWindowLayer(_Packed, WindowLayer):
    """Keeps a sliding window, packed."""


class PackedHybridLayer(_Packed, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Keeps all tokens, packed, beside recurrent states."""


class PackedHybridWindowLayer(_Packed, HybridWindowLayer):
    """Keeps a sliding window, packed, beside recurrent states."""


PLAIN: dict[type, Any] = {
    DynamicSlidingWindowLayer: WindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: HybridWindowLayer,
}
PACKED: dict[type, Any] = {
    DynamicLayer: PackedLayer,
    DynamicSlidingWindowLayer: PackedWindowLayer,
    LinearAttentionAndFullAttentionLayer: PackedHybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: PackedHybridWindowLayer,
}
GROWING = (DynamicLayer, PackedLayer)
WINDOWS = (DynamicSlidingWindowLayer, WindowLayer, PackedWindowLayer)


def new_cache(config: Any, kv_dtype: str) -> DynamicCache:
    """An empty cache of a model; `kv_dtype` is "auto" or one of kv_rows.LARGEST."""
    cache = DynamicCache(config=config)
    kinds = PLAIN if kv_dtype == "auto" else PACKED
    cache.layers = [
        _made(kinds[type(layer)], layer, kv_dtype) if type(layer) in kinds else layer
        for layer in cache.layers
    ]
    return cache


def _made(kind: Any, stock: Any, kv_dtype: str) -> Any:
    """A layer with the settings of a stock one, whatever they are called."""
    layer = kind.__new__(kind)
    vars(layer).update(vars(stock))
    if isinstance(layer, _Packed):
        layer.kv_dtype = kv_dtype
    return layer


def require_packable(model: Any, kv_dtype: str) -> None:
    """Raise UnsupportedModelError if the caches of a model have keys that cannot be packed."""
    if kv_dtype == "auto":
        return
    reason = None
    if model.config.is_encoder_decoder:
        reason = "it has an encoder"
    elif not model._supports_default_dynamic_cache():
        reason = "it has a cache of its own"
    else:
        kept = {*PACKED, LinearAttentionLayer}
        layers = DynamicCache(config=model.config).layers
        names = {type(layer).__name__ for layer in layers if type(layer) not in kept}
        if others := sorted(names - {"DummyLayer"}):  # which has no tokens
            reason = f"its cache has a {', '.join(others)}"
    if reason is not None:
        raise UnsupportedModelError(f"kv_dtype={kv_dtype!r} is not for this model: {reason}")


def keep_alone(layer: Any) -> None:
    """Copy the tokens of a layer that are a view into more, so that these are freed."""
    for name in ("keys", "values"):
        x: Tensor = getattr(layer, name)
        if x.untyped_storage().nbytes() > x.nbytes:
            setattr(layer, name, x.clone(memory_format=torch.contiguous_format))


def with_capacity(x_BGNd: Tensor, capacity: int) -> Tensor:
    """A copy of keys or values, with room for so many tokens; what is behind them is undefined. On
    a CPU they get pages of their own, which the system has back when they are freed. The pages are
    small, so that unused room takes none.

    A cache is copied layer by layer, and the C library would keep what the layers before have freed
    by now: it goes back to the system.
    """
    num_seqs, num_groups, num_tokens, width = x_BGNd.shape
    wide = _to_copy_to((num_seqs, num_groups, capacity, width), x_BGNd)
    wide[:, :, :num_tokens] = x_BGNd
    return wide


def joined(x_BGNd: Tensor, more_BGNd: Tensor, num_tokens: int) -> Tensor:
    """The sequences of both, with so many tokens each, in memory as with_capacity gives. Shorter
    ones have zeros in front.
    """
    num_seqs, num_groups, _, width = x_BGNd.shape
    num_all = num_seqs + len(more_BGNd)
    wide = _to_copy_to((num_all, num_groups, num_tokens, width), x_BGNd)
    wide[:num_seqs, :, num_tokens - x_BGNd.shape[2] :] = x_BGNd
    wide[num_seqs:, :, num_tokens - more_BGNd.shape[2] :] = more_BGNd
    return wide


def _to_copy_to(shape: tuple[int, ...], x: Tensor) -> Tensor:
    """Zeros where a copy of keys or values goes, in pages of their own on a CPU."""
    if x.device.type != "cpu":
        return x.new_zeros(shape)
    _note_copied(x.nbytes)
    pages = zeroed_memory(math.prod(shape) * x.itemsize, in_huge_pages=False)
    return torch.frombuffer(pages, dtype=x.dtype).view(shape)


def _note_copied(num_bytes: int) -> None:
    """Give back what was freed behind the copies before this one, if these were large enough."""
    global _copied_bytes
    if _copied_bytes >= TRIMMED_BYTES:
        return_free_memory()
        _copied_bytes = 0
    _copied_bytes += num_bytes


def kind_of(layer: Any) -> str | None:
    """The kind of numbers that a layer has, as kernels name it; None if they have no name."""
    return layer.kv_dtype if isinstance(layer, _Packed) else KINDS.get(layer.keys.dtype)
