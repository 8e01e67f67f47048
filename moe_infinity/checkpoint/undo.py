"""Operations that undo what llama.cpp's converter changes in a weight.

What it changed (values) is undone by a function, because transformers rounds before its rules
apply. What it moved is moved back: rows as they are stored, packed or not; columns and parts of
several tensors by an operation of transformers' rules.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

Tensors = dict[str, Any]  # by pattern: a tensor, or a list with one


class Undo(ConversionOps):  # type: ignore[misc]
    """An operation of transformers' rules that makes one parameter of the weights of its
    patterns.
    """

    dim = 0  # in which the converter moved something

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str],
        config: Any = None, **kwargs: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        found = [input_dict[pattern] for pattern in source_patterns]
        weights = [each[0] if isinstance(each, list) else each for each in found]
        return {target_patterns[0]: self.undone(weights, config.get_text_config())}

    @abstractmethod
    def undone(self, weights: list[Tensor], config: Any) -> Tensor:
        """Return the parameter. Each subclass undoes one change of the converter."""


class UndoRotaryOrder(Undo):
    """Rows of queries or keys, whose rotary pairs the converter made neighbours."""

    def __init__(self, heads: str) -> None:
        self.heads = heads  # the config's name for how many there are

    def undone(self, weights: list[Tensor], config: Any) -> Tensor:
        (weight,) = weights
        pairs = weight.reshape(getattr(config, self.heads), -1, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


class JoinHeads(Undo):
    """in_proj_qkvz of Qwen3-Next's linear attention, which has queries, keys, values and gates of
    one head after the other. The converter made two tensors of it: queries of all heads, then keys,
    then values; and gates.
    """

    def undone(self, weights: list[Tensor], config: Any) -> Tensor:
        rest, gates = weights
        heads = config.linear_num_key_heads
        key_rows = heads * config.linear_key_head_dim
        queries, keys, values = rest.split([key_rows, key_rows, len(rest) - 2 * key_rows])
        parts = [part.reshape(heads, -1, part.shape[1]) for part in (queries, keys, values, gates)]
        return torch.cat(parts, dim=1).flatten(0, 1).contiguous()


class GroupValueHeads(Undo):
    """Value heads of Qwen3.5's linear attention, which stand together if they share a key head. The
    converter put the first of each key head before the second of each.
    """

    def __init__(self, width: str | None = None, dim: int = 0) -> None:
        self.width = width  # the config's name for the rows of a head; None: one
        self.dim = dim  # whose last rows they are

    def undone(self, weights: list[Tensor], config: Any) -> Tensor:
        (weight,) = weights
        heads = config.linear_num_value_heads
        count = heads * (1 if self.width is None else getattr(config, self.width))
        others, values = weight.split([weight.shape[self.dim] - count, count], self.dim)
        by_place = values.unflatten(self.dim, (-1, config.linear_num_key_heads, count // heads))
        grouped = by_place.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2)
        return torch.cat([others, grouped], self.dim)


class JoinKeysAndValues(Undo):
    """kv_b_proj of DeepSeek's attention, of which the converter made two tensors of heads: keys
    [heads, C, R] and values [heads, R, C].
    """

    def undone(self, weights: list[Tensor], config: Any) -> Tensor:
        keys, values = weights
        both = torch.cat([keys.transpose(1, 2), values], dim=1)
        return both.reshape(-1, both.shape[-1])


class JoinConvolutions(Undo):
    """conv1d of Kimi Linear's attention, of which the file has queries, keys and values
    [1, C, 1, K].
    """

    def undone(self, weights: list[Tensor], config: Any) -> Tensor:
        return torch.cat([weight.reshape(-1, 1, weight.shape[-1]) for weight in weights])


def subtract_one(weight: Tensor) -> Tensor:
    """The weight of a norm, to which the converter added what the model's code adds."""
    return weight - 1


def log_of_negative(weight: Tensor) -> Tensor:
    """A_log of a recurrent layer, of which the converter stored -exp(A_log)."""
    return torch.log(-weight)
