"""The KV cache of the sequences that decode together, which they join and leave between steps.

Rows are aligned at their ends, as in a batch that was padded on the left: what generate() does with
one, so every model that takes padded batches takes this. A batch of one has no padding and is what
generate() makes of a single sequence, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

# Not DynamicIndexedLayer: sparse attention picks its places among those of the padding, too, so a
# sequence's tokens change with its neighbours (DeepSeek-V3.2 and GLM-5, tiny and random).
JOINABLE = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def layers_that_cannot_join(config: Any) -> list[str]:
    """Kinds of cache layer of a model that this module cannot put together."""
    layers = DynamicCache(config=config).layers
    return sorted({type(layer).__name__ for layer in layers if type(layer) not in JOINABLE})


def has_recurrent_layers(config: Any) -> bool:
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionLayer) for layer in layers)


class DecodeBatch:
    """Caches of B sequences as one, and how long each is."""

    def __init__(self) -> None:
        self.cache: DynamicCache | None = None
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def longest(self) -> int:
        return max(self._lengths, default=0)

    def join(self, cache: DynamicCache, length: int) -> None:
        """One more sequence, the last row from now on; its cache becomes part of this one."""
        if self.cache is None:
            self.cache = cache
        else:
            total = max(self.longest, length)
            for layer, other in zip(self.cache.layers, cache.layers, strict=True):
                _join_layer(layer, other, total)
        self._lengths.append(length)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order; the memory of the others is free."""
        self._lengths = [self._lengths[row] for row in rows]
        if self.cache is None or not rows:
            self.cache = None
            return
        rows_B = torch.tensor(rows, dtype=torch.long, device="cpu")
        for layer in self.cache.layers:
            _keep_rows(layer, rows_B, self.longest)

    def inputs(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """What the model is called with for one new token of each sequence."""
        lengths_B1 = torch.tensor(self._lengths, dtype=torch.long, device="cpu")[:, None]
        places_T = torch.arange(self.longest + 1, device="cpu")
        mask_BT = (places_T >= self.longest - lengths_B1).to(torch.long)
        return {
            "input_ids": torch.tensor(token_ids, dtype=torch.long, device="cpu")[:, None],
            "attention_mask": mask_BT,
            "position_ids": lengths_B1,
            "past_key_values": self.cache,
        }

    def grow(self) -> None:
        """A step has added one token to each sequence."""
        self._lengths = [length + 1 for length in self._lengths]

    def clear(self) -> None:
        self.cache = None
        self._lengths = []

    @property
    def num_bytes(self) -> int:
        """What the cache takes."""
        layers = [] if self.cache is None else self.cache.layers
        return sum(t.nbytes for layer in layers for t in _tensors(layer))


def _recurrent_states(layer: Any) -> list[dict[int, Tensor | None]]:
    is_recurrent = isinstance(layer, LinearAttentionLayer)
    return [layer.conv_states, layer.recurrent_states] if is_recurrent else []


def _growing(layer: Any) -> tuple[str, ...]:
    """Attributes that grow with the sequence; none of a layer without attention, or of one that
    shares another one's keys and values.
    """
    is_growing = isinstance(layer, DynamicLayer) and layer.is_initialized
    return ("keys", "values") if is_growing else ()


def _tensors(layer: Any) -> list[Tensor]:
    states = [state for states in _recurrent_states(layer) for state in states.values()]
    growing = [getattr(layer, name) for name in _growing(layer)]
    return [tensor for tensor in (*states, *growing) if tensor is not None]


def _width(layer: Any, total: int) -> int:
    """How many places of a batch of this length the layer keeps."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return min(total, int(layer.sliding_window) - 1)
    return total


def _join_layer(layer: Any, other: Any, total: int) -> None:
    for states, more in zip(_recurrent_states(layer), _recurrent_states(other), strict=True):
        for idx, state in states.items():
            if state is not None:
                states[idx] = torch.cat([state, more[idx]])  # type: ignore[list-item]
    width = _width(layer, total)
    for name in _growing(layer):
        both = [_widened(getattr(one, name), width) for one in (layer, other)]
        setattr(layer, name, torch.cat(both))
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = total


def _widened(x_BHTD: Tensor, width: int) -> Tensor:
    """With zeros before the beginning, where the mask hides them."""
    return pad(x_BHTD, (0, 0, width - x_BHTD.shape[2], 0))


def _keep_rows(layer: Any, rows_B: Tensor, total: int) -> None:
    for states in _recurrent_states(layer):
        for idx, state in states.items():
            if state is not None:
                states[idx] = state[rows_B]
    width = _width(layer, total)
    for name in _growing(layer):
        x_BHTD = getattr(layer, name)
        at_end = slice(x_BHTD.shape[2] - width, None)
        setattr(layer, name, x_BHTD[rows_B, :, at_end])  # a copy: nothing of the others stays
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = total
