"""Parts of a KV cache as bytes that can be kept, and back.

    tokens   keys and values: so many bytes for each token
    state    what is that of all tokens so far and of no fewer: recurrent and convolution states,
             and beside these the keys and values of sliding windows

The cache of a model without recurrent layers has no state: its windows are tokens like others.

Legend: H heads, d width of a head, T tokens, N blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

KEYS_AND_VALUES = ("keys", "values")
STATES = ("conv_states", "recurrent_states")
MOST_AT_ONCE = 64 << 20  # bytes that are in memory twice while blocks are made of them


class Part(NamedTuple):
    """One tensor of a layer, as it is for one sequence."""

    layer_idx: int
    name: str
    state_idx: int  # which of a layer's states of this name; 0 for keys and values
    dtype: torch.dtype
    shape: tuple[int, ...]  # of keys and values (H, d)

    @property
    def num_bytes(self) -> int:
        """The bytes of a state, or of one token."""
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self, cache: DynamicCache) -> Tensor:
        """The tensor of all sequences of a batch."""
        found = getattr(cache.layers[self.layer_idx], self.name)
        return found[self.state_idx] if self.name in STATES else found  # type: ignore[no-any-return]


class Block(NamedTuple):
    """Some tokens that follow each other, of one sequence."""

    num_tokens: int
    data: Tensor  # uint8; of one part after the other


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """The parts that the caches of one model consist of."""

    tokens: tuple[Part, ...]
    states: tuple[Part, ...]
    windows: tuple[Part, ...]  # keys and values that belong to the state

    @classmethod
    def of(cls, cache: DynamicCache) -> CacheBytes:
        """Look at a cache that has been through the model once."""
        states = tuple(_states_of(cache))
        tokens: list[Part] = []
        windows: list[Part] = []
        for layer_idx, layer in enumerate(cache.layers):
            if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
                continue  # it has none, or shares another's
            is_window = bool(states) and isinstance(layer, DynamicSlidingWindowLayer)
            for name in KEYS_AND_VALUES:
                x_BHTd: Tensor = getattr(layer, name)
                part = Part(layer_idx, name, 0, x_BHTd.dtype, (x_BHTd.shape[1], x_BHTd.shape[3]))
                (windows if is_window else tokens).append(part)
        return cls(tuple(tokens), states, tuple(windows))

    def text(self) -> str:
        """Return it as JSON, for `read`."""
        kinds = (self.tokens, self.states, self.windows)
        return json.dumps(
            [[[*part[:3], str(part.dtype)[6:], *part.shape] for part in parts] for parts in kinds]
        )

    @classmethod
    @lru_cache(4)
    def read(cls, text: str) -> CacheBytes:
        """Raises ValueError or AttributeError for a text that is none of `text`."""
        kinds = [
            tuple(
                Part(idx, name, state_idx, _dtype(dtype), tuple(shape))
                for idx, name, state_idx, dtype, *shape in parts
            )
            for parts in json.loads(text)
        ]
        tokens, states, windows = kinds
        return cls(tokens, states, windows)

    @property
    def token_bytes(self) -> int:
        """The bytes of one token."""
        return sum(part.num_bytes for part in self.tokens)

    @property
    def state_bytes(self) -> int:
        """The bytes of one state, without windows."""
        return sum(part.num_bytes for part in self.states)

    def has_tokens(self, cache: DynamicCache, num_tokens: int) -> bool:
        """Return True if the cache has so many of the last tokens in every layer."""
        return all(part.tensor(cache).shape[2] >= num_tokens for part in self.tokens)

    def blocks(
        self, cache: DynamicCache, row: int, *, behind: int, size: int, num_blocks: int
    ) -> Iterator[Block]:
        """Yield blocks of `size` tokens of one sequence. The first begins `behind` tokens before
        the end of the cache.
        """
        most = max(MOST_AT_ONCE // max(self.token_bytes * size, 1), 1)
        for done in range(0, num_blocks, most):
            num_now = min(most, num_blocks - done)
            rows = [torch.empty((num_now, 0), dtype=torch.uint8, device="cpu")]
            for part in self.tokens:
                x_HTd = part.tensor(cache)[row]
                first = x_HTd.shape[1] - behind + done * size
                x_HNTd = x_HTd[:, first : first + num_now * size].unflatten(1, (num_now, size))
                rows.append(_bytes_of(x_HNTd.transpose(0, 1)))
            for data in torch.cat(rows, dim=1):
                yield Block(size, data.clone())

    def state_of(self, cache: DynamicCache, row: int, num_tokens: int) -> Tensor:
        """The bytes of one sequence's state, which has seen so many tokens."""
        found = [_bytes_of(part.tensor(cache)[row : row + 1]) for part in self.states]
        for part in self.windows:
            width = _window(cache, part, num_tokens)
            x_1HTd = part.tensor(cache)[row : row + 1]
            found.append(_bytes_of(x_1HTd[:, :, x_1HTd.shape[2] - width :]))
        return torch.cat(found, dim=1)[0]

    def fill(
        self,
        cache: DynamicCache,
        blocks: Sequence[Block],
        state: Tensor | None,
        device: torch.device,
        *,
        num_tokens: int | None = None,
    ) -> None:
        """Put these tokens, and the state behind them, into an empty cache of one sequence. All
        blocks but the last have as many tokens as the first. `num_tokens`: only so many of them.
        """
        if num_tokens is None:
            num_tokens = sum(block.num_tokens for block in blocks)
        start = 0  # in bytes for each token
        found: dict[int, dict[str, Tensor]] = {}
        for part in self.tokens:
            end = start + part.num_bytes
            pieces = [Block(num, data[num * start : num * end]) for num, data in blocks]
            x_1HTd = _joined(pieces, part)[:, :, :num_tokens].to(device)
            found.setdefault(part.layer_idx, {})[part.name] = x_1HTd
            start = end
        if state is not None:
            found |= self._restored(cache, state, num_tokens, device)
        for layer_idx, tensors in found.items():
            _give_tokens(cache.layers[layer_idx], tensors, num_tokens)

    def _restored(
        self, cache: DynamicCache, state: Tensor, num_tokens: int, device: torch.device
    ) -> dict[int, dict[str, Tensor]]:
        """Give the cache its states. Returns keys and values of windows by layer."""
        start = 0
        for part in self.states:
            end = start + part.num_bytes
            x = _typed(state[start:end], part.dtype).view(1, *part.shape).to(device)
            layer: Any = cache.layers[part.layer_idx]
            update = {"conv_states": "update_conv_state"}.get(part.name, "update_recurrent_state")
            getattr(layer, update)(x, state_idx=part.state_idx)
            start = end
        windows: dict[int, dict[str, Tensor]] = {}
        for part in self.windows:
            width = _window(cache, part, num_tokens)
            end = start + part.num_bytes * width
            x_1HTd = _joined([Block(width, state[start:end])], part).to(device)
            windows.setdefault(part.layer_idx, {})[part.name] = x_1HTd
            start = end
        return windows


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def _states_of(cache: DynamicCache) -> Iterator[Part]:
    for layer_idx, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            for name in STATES:
                for state_idx, x in getattr(layer, name).items():
                    if x is not None:
                        yield Part(layer_idx, name, state_idx, x.dtype, tuple(x.shape[1:]))


def _window(cache: DynamicCache, part: Part, num_tokens: int) -> int:
    """How many tokens a sliding window keeps of so many."""
    layer: Any = cache.layers[part.layer_idx]
    return min(num_tokens, int(layer.sliding_window) - 1)


def _bytes_of(x_NX: Tensor) -> Tensor:
    """uint8 [N, bytes], on the CPU."""
    return x_NX.flatten(1).contiguous().to("cpu").view(torch.uint8)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: values of a dtype have to begin at a multiple of their size."""
    return data.clone().view(dtype)


def _joined(blocks: Sequence[Block], part: Part) -> Tensor:
    """[1, H, T, d] of one part of several blocks."""
    num_heads, width = part.shape
    size = blocks[0].num_tokens
    whole = [data for num, data in blocks if num == size]
    rest = [block for block in blocks if block.num_tokens != size]
    x_NHTd = torch.stack(whole).view(part.dtype).view(len(whole), num_heads, size, width)
    x_1HTd = x_NHTd.transpose(0, 1).flatten(1, 2)[None]
    return torch.cat([x_1HTd, _joined(rest, part)], dim=2) if rest else x_1HTd


def _give_tokens(layer: Any, tensors: dict[str, Tensor], num_tokens: int) -> None:
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    first = 0
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = num_tokens
        width = tensors["keys"].shape[2]
        first = max(0, width - int(layer.sliding_window) + 1)
    layer.keys, layer.values = (
        tensors[name][:, :, first:].contiguous() for name in KEYS_AND_VALUES
    )
