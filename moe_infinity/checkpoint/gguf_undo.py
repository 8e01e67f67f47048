"""Undoes what llama.cpp's converter does to weights beside naming them. What moves rows is an
operation of transformers' conversion rules. What changes values is a function, because transformers
rounds before its rules apply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

Tensors = dict[str, Any]  # by pattern: a tensor, or a list with one


def _only(found: Tensor | list[Tensor]) -> Tensor:
    return found[0] if isinstance(found, list) else found


class UndoRotaryOrder(ConversionOps):  # type: ignore[misc]
    """Rows of queries or keys, whose rotary pairs the converter made neighbours."""

    def __init__(self, heads: str) -> None:
        self.heads = heads  # the config's name for how many there are

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        config: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        weight = _only(next(iter(input_dict.values())))
        pairs = weight.reshape(getattr(config, self.heads), -1, 2, *weight.shape[1:])
        return {target_patterns[0]: pairs.transpose(1, 2).reshape(weight.shape).contiguous()}


class JoinHeads(ConversionOps):  # type: ignore[misc]
    """in_proj_qkvz of Qwen3-Next's linear attention, which has queries, keys, values and gates of
    one head after the other. The converter made two tensors of it: queries of all heads, then keys,
    then values; and gates.
    """

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        config: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        rest, gates = (_only(input_dict[pattern]) for pattern in source_patterns)
        heads = config.linear_num_key_heads
        key_rows = heads * config.linear_key_head_dim
        queries, keys, values = rest.split([key_rows, key_rows, len(rest) - 2 * key_rows])
        parts = [part.reshape(heads, -1, part.shape[1]) for part in (queries, keys, values, gates)]
        return {target_patterns[0]: torch.cat(parts, dim=1).flatten(0, 1).contiguous()}


def subtract_one(weight: Tensor) -> Tensor:
    """Of a norm, to which the converter added what the model's code adds."""
    return weight - 1


def log_of_negative(weight: Tensor) -> Tensor:
    """A_log of a recurrent layer, of which the converter stored -exp(A_log)."""
    return torch.log(-weight)


class JoinKeysAndValues(ConversionOps):  # type: ignore[misc]
    """kv_b_proj of DeepSeek's attention, of which the converter made two tensors of heads: keys
    [heads, C, R] and values [heads, R, C].
    """

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        keys, values = (_only(input_dict[pattern]) for pattern in source_patterns)
        both = torch.cat([keys.transpose(1, 2), values], dim=1)
        return {target_patterns[0]: both.reshape(-1, both.shape[-1])}
