"""Keys and values of transformers' dynamic cache, with room for the tokens to come.

transformers copies a layer's cache for every new token. Here the tensors of a cache layer become
views of larger ones, and a new token is written behind the last. Who replaced a layer's tensors,
cropped them or kept an older view notices nothing: then the next token begins with a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

NAME = "_moe_infinity_buffers"  # an attribute of cache layers
MIN_ROOM = 256  # tokens


@dataclass(slots=True)
class _Buffers:
    keys: Tensor  # [B, G, capacity, d]
    values: Tensor
    start: int  # tokens in front of the first that the layer has
    stop: int  # and up to its last; all behind is free

    def is_of(self, layer: Any) -> bool:
        """Whether the layer's tensors are these tokens, all of them and nothing else."""
        return all(
            own.shape[2] == self.stop - self.start
            and own.shape[0] == buffer.shape[0]
            and own.data_ptr() == buffer.data_ptr() + self.start * buffer.stride(2) * own.itemsize
            for own, buffer in ((layer.keys, self.keys), (layer.values, self.values))
        )


def can_grow(layer: Any) -> bool:
    """Whether it is a layer that has tokens, of a class that is known here."""
    if type(layer) is DynamicSlidingWindowLayer:
        return bool(layer.is_initialized and not layer.record_past and layer.keys.numel())
    return type(layer) is DynamicLayer and layer.is_initialized and layer.keys.numel() > 0


def keeps_nothing(layer: Any) -> bool:
    """Whether it stands for a layer of the model that has no tokens of its own. transformers 5.17
    has no such class.
    """
    return type(layer).__name__ == "DummyLayer"


def with_room(layer: Any) -> tuple[Tensor, Tensor]:
    """The layer's keys and values [B, G, N, ...], and behind them a place for one more token. The
    layer itself has it after `take`.
    """
    buffers: _Buffers | None = vars(layer).get(NAME)
    if buffers is None or buffers.stop == buffers.keys.shape[2] or not buffers.is_of(layer):
        num_tokens = layer.keys.shape[2]
        room = max(MIN_ROOM, num_tokens // 2)
        keys, values = (_widened(own, num_tokens + room) for own in (layer.keys, layer.values))
        buffers = _Buffers(keys, values, 0, num_tokens)
        vars(layer)[NAME] = buffers
        _show(layer, buffers)
    tokens = slice(buffers.start, buffers.stop + 1)
    return buffers.keys[:, :, tokens], buffers.values[:, :, tokens]


def take(layer: Any) -> None:
    """The token that was written to the place of `with_room` belongs to the layer."""
    buffers: _Buffers = vars(layer)[NAME]
    buffers.stop += 1
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length += 1
        buffers.start = max(buffers.start, buffers.stop - (layer.sliding_window - 1))
    _show(layer, buffers)


def _show(layer: Any, buffers: _Buffers) -> None:
    tokens = slice(buffers.start, buffers.stop)
    layer.keys = buffers.keys[:, :, tokens]
    layer.values = buffers.values[:, :, tokens]


def _widened(x_BGNd: Tensor, capacity: int) -> Tensor:
    num_seqs, num_groups, num_tokens, width = x_BGNd.shape
    shape = num_seqs, num_groups, capacity, width
    wide = torch.empty(shape, dtype=x_BGNd.dtype, device=x_BGNd.device)
    wide[:, :, :num_tokens] = x_BGNd
    return wide
