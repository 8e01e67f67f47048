"""The KV cache of the sequences that decode together. They join and leave it between steps.

Rows are aligned at their ends, as generate() aligns a batch that is padded on the left. So every
model that takes padded batches can be served. A batch of one sequence has no padding: its cache has
the bits that generate() gives a single sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from moe_infinity.architectures import attention_inputs
from moe_infinity.kernels.kv_layers import joined
from moe_infinity.prefixes.cache_layers import (
    growing_names_of,
    recurrent_states_of,
    tensors_of,
)


class DecodeBatch:
    """The joined caches of B sequences, and the length of each in tokens."""

    def __init__(self) -> None:
        self.cache: DynamicCache | None = None
        self._lengths: list[int] = []
        self._overwritten: list[dict[str, Any]] = []  # of each layer, what a step writes over

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sequence."""
        return self._lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._lengths, default=0)

    def join(self, cache: DynamicCache, length: int) -> None:
        """Add a sequence of `length` tokens as the last row."""
        if self.cache is None:
            self.cache = cache
        else:
            total = max(self.longest, length)
            for layer, other in zip(self.cache.layers, cache.layers, strict=True):
                _join_layer(layer, other, total)
        self._lengths.append(length)

    def num_to_join(self, length: int) -> int:
        """For how many tokens' keys and values `join` takes memory."""
        if self.cache is None:
            return 0
        num_joined = (len(self) + 1) * max(self.longest, length)
        in_a_layer = num_joined // len(self.cache.layers)  # beside those that they replace
        return num_joined - len(self) * self.longest + in_a_layer

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order, and free the memory of the others."""
        self._lengths = [self._lengths[row] for row in rows]
        if self.cache is None or not rows:
            self.cache = None
            return
        rows_B = torch.tensor(rows, dtype=torch.long, device="cpu")
        for layer in self.cache.layers:
            _keep_rows(layer, rows_B, self.longest)

    def inputs(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Arguments of the model for one new token of each sequence."""
        lengths_B1 = torch.tensor(self._lengths, dtype=torch.long, device="cpu")[:, None]
        positions_T = torch.arange(self.longest + 1, device="cpu")
        mask_BT = (positions_T >= self.longest - lengths_B1).to(torch.long)
        return {
            "input_ids": torch.tensor(token_ids, dtype=torch.long, device="cpu")[:, None],
            "attention_mask": mask_BT,
            "position_ids": lengths_B1,
            "cache": self.cache,
        }

    def begin_step(self) -> None:
        """Keep what `undo` needs. One sequence needs nothing: without its step it ends."""
        layers = self.cache.layers if self.cache is not None and len(self) > 1 else []
        self._overwritten = [_overwritten(layer) for layer in layers]

    def grow(self) -> None:
        """Count the token that a step has added to each sequence."""
        self._lengths = [length + 1 for length in self._lengths]
        self._overwritten = []

    def undo(self) -> None:
        """Bring back the state before a step that failed in the middle."""
        layers = [] if self.cache is None else self.cache.layers
        for layer, overwritten in zip(layers, self._overwritten, strict=True):
            for name in growing_names_of(layer):
                setattr(layer, name, getattr(layer, name)[:, :, : self.longest])
            for name, value in overwritten.items():
                setattr(layer, name, value)
        self._overwritten = []

    def copy_of(self, row: int) -> DecodeBatch:
        """A batch of this one sequence."""
        assert self.cache is not None
        alone = DecodeBatch()
        alone.join(row_of(self.cache, row, self._lengths[row]), self._lengths[row])
        return alone

    @property
    def num_bytes(self) -> int:
        """Memory of the caches."""
        cache = self.cache  # the engine's thread may drop it meanwhile
        return 0 if cache is None else bytes_of(cache)


def bytes_of(cache: DynamicCache) -> int:
    """Memory of a cache."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in tensors_of(layer))


def row_of(cache: DynamicCache, row: int, length: int) -> DynamicCache:
    """A copy of one sequence of `length` tokens."""
    alone = copy(cache)
    alone.layers = [_copied(layer) for layer in cache.layers]
    for layer in alone.layers:
        _keep_rows(layer, torch.tensor([row], dtype=torch.long, device="cpu"), length)
    return alone


def _copied(layer: Any) -> Any:
    """A layer whose tensors are replaced without a change of the other's."""
    copied = copy(layer)
    # It would hold the memory of the other's tokens.
    vars(copied).pop(attention_inputs.BUFFERS, None)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(copied, name, dict(value))
    return copied


def _overwritten(layer: Any) -> dict[str, Any]:
    """Attributes of a layer that cannot be cut back to the state before a step: a window forgets
    its first token, and recurrent states change in place.
    """
    kept: dict[str, Any] = {}
    if isinstance(layer, DynamicSlidingWindowLayer):
        kept = {
            name: getattr(layer, name) for name in (*growing_names_of(layer), "cumulative_length")
        }
    if isinstance(layer, LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name).items()
            kept[name] = {idx: None if x is None else x.clone() for idx, x in states}
    return kept


def _width(layer: Any, total: int) -> int:
    """How many positions the layer keeps of a batch of `total` positions."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return min(total, int(layer.sliding_window) - 1)
    return total


def _join_layer(layer: Any, other: Any, total: int) -> None:
    vars(layer).pop(attention_inputs.BUFFERS, None)  # they hold what is replaced
    for states, more in zip(recurrent_states_of(layer), recurrent_states_of(other), strict=True):
        for idx, state in states.items():
            if state is not None:
                states[idx] = torch.cat([state, more[idx]])  # type: ignore[list-item]
    width = _width(layer, total)
    for name in growing_names_of(layer):
        setattr(layer, name, joined(getattr(layer, name), getattr(other, name), width))
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = total


def _keep_rows(layer: Any, rows_B: Tensor, total: int) -> None:
    vars(layer).pop(attention_inputs.BUFFERS, None)
    width = _width(layer, total)
    for name in growing_names_of(layer):
        x_BHTD = getattr(layer, name)
        setattr(layer, name, x_BHTD[:, :, x_BHTD.shape[2] - width :])
    layer.reorder_cache(rows_B)  # copies, so the other rows are freed
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = total
