"""Decoder layers that are given other masks than the layer before them: they are computed with it
in one call only if that gives the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from moe_infinity import MoE
from tests.architectures.test_decoder_layers import TOKENS, logits_of, saved
from tests.cache_name import CACHE

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(5)]


@pytest.mark.parametrize("padding", [None, 3])
def test_layers_with_a_window_join_others_while_no_mask_hides_a_token(tmp_path, runs, padding):
    """Their masks are as long as the window, so no two of them are the same tensor."""
    folder = saved("GptOss", tmp_path)
    tokens = TOKENS[:1] if padding is None else TOKENS
    mask = None
    if padding is not None:
        mask = torch.ones_like(tokens)
        mask[0, :padding] = 0
    with MoE(folder, host_memory="50%", expert_dtype="int8") as moe:
        expected = logits_of(moe.model, tokens, mask=mask)
    assert runs == []
    with MoE(folder, expert_dtype="int8") as moe:
        moe.preload()
        found = logits_of(moe.model, tokens, mask=mask)
    first = 0 if padding is None else padding
    assert torch.equal(found[:, first:], expected[:, first:])
    assert sum(runs) >= 3 * 35
    if padding is None:
        assert runs == [3] * 35


def test_a_mask_that_hides_a_token_from_one_layer_reaches_it(tmp_path, runs):
    """That layer computes again, and later steps do not compute it ahead."""
    folder = saved("GptOss", tmp_path)

    @torch.no_grad()
    def logits(moe: MoE, *, hides: bool) -> Tensor:
        cache = DynamicCache(config=moe.model.config)
        moe.model(TOKENS[:1, :5], **{CACHE: cache})
        found = []
        for t in range(5, 12):
            full, sliding = torch.zeros(2, 1, 1, 1, t + 1)
            full[..., 2] = torch.finfo(full.dtype).min if hides else 0
            masks = {"full_attention": full, "sliding_attention": sliding}
            step = moe.model(TOKENS[:1, t : t + 1], attention_mask=masks, **{CACHE: cache})
            found.append(step.logits)
        return torch.cat(found)

    with MoE(folder, host_memory="50%", expert_dtype="int8") as moe:
        seen, hidden = (logits(moe, hides=hides) for hides in (False, True))
    assert not torch.equal(seen, hidden)
    with MoE(folder, expert_dtype="int8") as moe:
        moe.preload()
        assert torch.equal(logits(moe, hides=False), seen)
        assert runs == [3] * 7
        runs.clear()
        assert torch.equal(logits(moe, hides=True), hidden)
        assert runs == [3, 2, 1] + [1, 1, 1] * 6
