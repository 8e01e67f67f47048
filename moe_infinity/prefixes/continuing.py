"""Finds out, by looking and by trying, whether a model can go on from a cache that was kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moe_infinity.architectures.attention_inputs import keeps_nothing
from moe_infinity.errors import MoEInfinityError
from moe_infinity.experts import Phase, Step
from moe_infinity.prefixes.cache_layers import has_recurrent_layers, layers_that_cannot_join
from moe_infinity.prefixes.loaded import Loaded
from moe_infinity.prefixes.prefix_tree import BLOCK

TRIAL_TOKENS = 32  # of `why_not_continued`
TRIAL_CUT = 19  # tokens of the first of two passes
# Of the largest logit. Models that continue were seen to differ by 1e-5 in float32 and by 0.01 in
# bfloat16, one that does not by 0.5.
TOLERANCE = {torch.float32: 1e-3}
COARSE_TOLERANCE = 0.05


def why_not(config: Any) -> str | None:
    """Why prefixes of a model cannot be reused; None if they can."""
    if has_recurrent_layers(config):
        return None  # its windows are part of a state
    for layer in DynamicCache(config=config).layers:
        kind = type(layer)
        if kind is DynamicSlidingWindowLayer and layer.sliding_window <= BLOCK:
            return f"its sliding windows have {layer.sliding_window} tokens"
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer) and not keeps_nothing(layer):
            return f"of a {kind.__name__} no part can be copied"
    return None


def why_not_in_parts(moe: Loaded) -> str | None:
    """Why a prompt has to be computed in one pass; None if several give the same logits."""
    apart = layers_that_cannot_join(moe.model.config)
    if apart:
        return f"the caches of this model cannot be put together ({', '.join(apart)})"
    return why_not_continued(moe) if has_recurrent_layers(moe.model.config) else None


def why_not_continued(moe: Loaded) -> str | None:
    """Why a model with recurrent layers cannot compute a prompt in several passes; None if it can.
    Some begin anew with every pass of several tokens. It shows in the logits of a prompt, computed
    in one and in two passes.
    """
    try:
        (whole,) = _logits_of(moe, [TRIAL_TOKENS])
        _, continued = _logits_of(moe, [TRIAL_CUT, TRIAL_TOKENS])
    except MoEInfinityError as error:
        return f"trying to continue a prompt failed: {error}"
    difference = (continued - whole[TRIAL_CUT:]).abs().max() / whole.abs().max()
    tolerance = TOLERANCE.get(moe.model.dtype, COARSE_TOLERANCE)
    if difference <= tolerance:
        return None
    return (
        f"a prompt in two passes has other logits than in one (by {difference:.2g} of the largest)"
    )


def _logits_of(moe: Loaded, ends: Sequence[int]) -> list[Tensor]:
    """[T, V] float32 of each pass over a prompt that is cut at `ends`."""
    cache = DynamicCache(config=moe.model.config)
    vocab_size = moe.model.config.get_text_config().vocab_size
    ids = torch.arange(TRIAL_TOKENS, device="cpu") * 5 % vocab_size
    logits = []
    for start, end in zip([0, *ends], ends, strict=False):
        begins_B = np.array([start == 0])
        output = moe.forward(
            Step(Phase.PREFILL, 1, end - start, begins_B=begins_B),
            input_ids=ids[None, start:end],
            attention_mask=torch.ones((1, end), dtype=torch.long, device="cpu"),
            position_ids=torch.arange(start, end, device="cpu")[None],
            cache=cache,
            use_cache=True,
        )
        logits.append(output.logits[0].to("cpu", torch.float32))
    return logits
