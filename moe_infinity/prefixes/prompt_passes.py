"""Computes the prompt of one sequence in as many passes as memory asks for.

Legend: T tokens, L MoE layers, K experts of a token.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMode

from moe_infinity.architectures.attention_inputs import (
    cache_in,
    cache_parameter,
    is_text_alone,
)
from moe_infinity.errors import CheckpointError, ConfigError, UnsupportedModelError
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.kernels.kv_layers import new_cache
from moe_infinity.memory.room import LEAST_TOKENS, Room
from moe_infinity.prefixes.cache_layers import (
    cut_windows,
    has_recurrent_layers,
    has_tokens,
    keep_windows,
)
from moe_infinity.prefixes.continuing import why_not, why_not_in_parts
from moe_infinity.prefixes.lengths import Lengths
from moe_infinity.prefixes.loaded import Loaded
from moe_infinity.prefixes.prefix_tree import BLOCK
from moe_infinity.streaming import merged_settings

ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class PromptPasses:
    """The passes over prompts of one model. Raises UnsupportedModelError for a model that cannot go
    on from what was kept of a prompt.
    """

    def __init__(self, moe: Loaded, *, is_tried: bool = False) -> None:
        """`is_tried`: this model has gone on before. Else one with recurrent layers tries it, which
        computes some tokens.
        """
        reason = _why_not_kept(moe, is_tried)
        if reason is not None:
            raise UnsupportedModelError(f"prefixes of this model cannot be kept: {reason}")
        self._moe = moe
        self._accepts = inspect.signature(moe.model.forward).parameters
        self._lengths = Lengths(moe.model)
        self.has_states = has_recurrent_layers(moe.model.config)

    def is_usual(self, length: int) -> bool:
        """Return True if a prompt of this length computes its beginning as shorter ones do."""
        return self._lengths.is_usual(length)

    def regime(self, length: int) -> Hashable:
        """Return what is equal for lengths whose keys are computed alike."""
        return self._lengths.regime(length)

    def empty_cache(self) -> DynamicCache:
        """A cache without tokens."""
        return new_cache(self._moe.model.config, self._moe.config.kv_dtype)

    def arguments(self, cache: DynamicCache) -> dict[str, Any]:
        """Those by which `generate()` goes on from a cache, whatever kind of cache the model's
        settings name.
        """
        for part in self._moe.model.modules():
            if "rope_deltas" in vars(part):  # of an earlier prompt that had images
                part.rope_deltas = None
        name = cache_parameter(GenerationMixin.prepare_inputs_for_generation)
        return {name: cache, "cache_implementation": None}

    def begin(self, token_ids: Sequence[int], experts_TLK: Ints | None) -> None:
        """Begin a request whose first tokens are known, with the experts that they activated; None:
        these are not known.
        """
        if experts_TLK is None:
            experts_TLK = np.zeros((0, len(self._moe.engine.bookkeeping.keys), 1), dtype=np.int64)
            token_ids = []
        step = _step(token_ids, begins=True, context=len(token_ids))
        self._moe.note_known(step, experts_TLK.astype(np.int64))

    def end_of_pass(self, start: int, length: int) -> int:
        """Where a pass from `start` ends that memory has room for: behind whole blocks, or where
        the prompt of this length does.
        """
        num_left = length - start
        with self._room_for_windows() as room:
            fitting = room.tokens_at_once(num_left, length, num_left)
        return min(start + max(fitting // BLOCK * BLOCK, LEAST_TOKENS), length)

    def leave_one_pass(self, cache: DynamicCache, ids: Sequence[int], start: int) -> None:
        """Compute tokens of a prompt from `start` on, until memory has room for the others in one
        pass.
        """
        while not self._fits(start, len(ids)):
            end = min(self.end_of_pass(start, len(ids)), len(ids) - 1)
            with self.keeping_windows(cache, is_last=self._fits(end, len(ids))):
                self.compute(cache, ids, start, end)
            start = end

    def _fits(self, start: int, length: int) -> bool:
        num_left = length - start
        return num_left <= max(
            self._moe.engine.room.tokens_at_once(num_left, length, num_left), LEAST_TOKENS
        )

    @contextmanager
    def keeping_windows(self, cache: DynamicCache, *, is_last: bool) -> Iterator[None]:
        """Inside, a pass leaves in the cache the tokens that its sliding windows pass over, too.
        `is_last`: no other pass over the prompt follows.
        """
        if self.has_states:  # its windows belong to the state
            yield
            return
        keep_windows(cache)
        with self._room_for_windows():
            yield
        cut_windows(cache, is_last=is_last)

    @contextmanager
    def _room_for_windows(self) -> Iterator[Room]:
        """Inside, passes are planned with what is kept of windows."""
        room = self._moe.engine.room
        before = room.keeps_windows
        room.keeps_windows = not self.has_states
        try:
            yield room
        finally:
            room.keeps_windows = before

    def compute(
        self, cache: DynamicCache, token_ids: Sequence[int], start: int, end: int
    ) -> Ints | None:
        """Compute the tokens from `start` to `end` behind those that the cache has. Returns the
        experts [T, L, K] that they activated, None if layers choose different numbers. Raises
        UnsupportedModelError if the model leaves the cache as it was, and CheckpointError.
        """
        chunk = token_ids[start:end]
        inputs = {
            "input_ids": torch.tensor([chunk], dtype=torch.long, device="cpu"),
            "attention_mask": torch.ones((1, end), dtype=torch.long, device="cpu"),
            "position_ids": torch.arange(start, end, device="cpu")[None],
            "use_cache": True,
            "logits_to_keep": 1,
        }
        accepted = {name: value for name, value in inputs.items() if name in self._accepts}
        self._lengths.forget()
        step = _step(chunk, begins=False, context=end)
        logits = self._moe.forward(step, cache=cache, **accepted).logits
        require_number(self._moe, logits.amax().item())
        if not has_tokens(cache, end):
            raise UnsupportedModelError(
                f"a forward pass left the KV cache without its tokens; expected {end}"
            )
        return self._moe.last_routing()


def require_number(moe: Loaded, largest: float) -> None:
    """Raise CheckpointError unless the largest of some logits is finite, and forget the experts."""
    if not math.isfinite(largest):  # NaN is larger than any
        moe.engine.drop_experts()
        raise CheckpointError(
            f"{moe.checkpoint}: the model computed what is no number: its experts are read anew\n"
            "hint: if it goes on, a file is damaged: download it again"
        )


def one_prompt(model: Any, named: Mapping[str, Any]) -> list[int]:
    """The token ids of a prompt among the arguments of `generate()`. Raises ConfigError for what
    has no prefix: several sequences, padding, no cache or one of the caller's.
    """
    ids = named.get("input_ids", named.get("inputs"))
    mask = named.get("attention_mask")
    settings = merged_settings(model, named)
    mode = settings.get_generation_mode(named.get("assistant_model"))
    problems = {
        "one sequence of token ids": isinstance(ids, Tensor)
        and (ids.ndim, len(ids), ids.is_floating_point()) == (2, 1, False),
        "text alone": is_text_alone(named),
        "no padding": mask is None or bool(mask.all()),
        # transformers 5.24: with an assistant and a cache the tokens are wrong, without us as well
        "a prompt that is continued one token after another": mode in ONE_BY_ONE,
        "one answer": (settings.num_return_sequences or 1) == 1,
        "the cache that it brings": settings.use_cache is not False and cache_in(named) is None,
    }
    for wanted, is_so in problems.items():
        if not is_so:
            raise ConfigError(f"prefix= takes {wanted}")
    found: list[int] = ids[0].tolist()
    return found


def _step(token_ids: Sequence[int], *, begins: bool, context: int) -> Step:
    return Step(
        Phase.PREFILL,
        num_sequences=1,
        tokens_per_sequence=len(token_ids),
        begins_B=np.array([begins]),
        token_ids_T=np.array(token_ids, dtype=np.int64),
        context=context,
    )


def _why_not_kept(moe: Loaded, is_tried: bool) -> str | None:
    if moe.model.config.is_encoder_decoder:
        return "it has an encoder"
    if not moe.model._supports_default_dynamic_cache():
        return "it has a cache of its own"
    reason = why_not(moe.model.config)
    return reason if reason is not None or is_tried else why_not_in_parts(moe)
