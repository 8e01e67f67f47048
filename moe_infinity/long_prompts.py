"""A prompt that memory has no room for in one pass of `generate()`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from moe_infinity.architectures.attention_inputs import cache_in, can_be_cut, is_text_alone
from moe_infinity.memory.room import LEAST_TOKENS, Room
from moe_infinity.streaming import has_own_generate, merged_settings

logger = logging.getLogger(__name__)


def in_passes(
    model: Any, room: Room, named: Mapping[str, Any], *, is_begun: bool
) -> dict[str, Any]:
    """Return the setting by which `generate()` takes a prompt in several passes, if memory has no
    room for it in one, or in one if it has begun. `named` are its arguments.
    """
    if is_begun:  # behind the tokens of a cache transformers 5.17 takes wrong pieces
        return {"prefill_chunk_size": None}
    ids = named.get("input_ids", named.get("inputs"))
    settings = merged_settings(model, named)
    is_set = settings.prefill_chunk_size is not None or "prefill_chunk_size" in named
    wants_all = settings.output_hidden_states or settings.output_attentions  # not of the last pass
    is_plain = isinstance(ids, torch.Tensor) and ids.ndim == 2 and settings.use_cache is not False
    is_plain &= not (settings.return_dict_in_generate and wants_all)
    is_plain &= not has_own_generate(model) and is_text_alone(named)  # nothing else can be cut
    if is_set or not is_plain or cache_in(named) is not None or not can_be_cut(model.config):
        return {}
    length = ids.shape[1]
    num_sequences = len(ids) * max(settings.num_beams or 1, settings.num_return_sequences or 1)
    num_new = num_sequences * length
    is_one = num_sequences == 1
    fitting = room.tokens_at_once(num_new, length, num_new, is_one_sequence=is_one)
    at_once = max(fitting // max(num_sequences, 1), LEAST_TOKENS)
    if at_once >= length:
        return {}
    logger.info("memory has room for %d of the prompt's %d tokens at once", at_once, length)
    return {"prefill_chunk_size": at_once}
