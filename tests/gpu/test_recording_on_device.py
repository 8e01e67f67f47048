"""Recordings of steps that a device or the host decides, some of which do not end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from moe_infinity import MoE
from moe_infinity.engine.bookkeeping import Bookkeeping
from tests.cache_name import CACHE
from tests.gpu.fast_device import CACHES, let_the_host_decide, on_device
from tests.on_device import PROMPT, greedy

pytestmark = pytest.mark.arithmetic


@pytest.mark.sample(2)
@pytest.mark.grid
@pytest.mark.parametrize("is_called", [MoE, PreTrainedModel])
@pytest.mark.parametrize("is_decided_by_device", [True, False])
@pytest.mark.parametrize("cache", CACHES)
def test_a_recording_has_what_was_whole_when_a_step_is_interrupted(
    tiny_checkpoint, monkeypatch, cache, is_decided_by_device, is_called
):
    learn = Bookkeeping.note_routing
    remaining = -1

    def learning(self: Bookkeeping, moe_layer_idx: int, *args: Any) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            raise KeyboardInterrupt
        learn(self, moe_layer_idx, *args)

    monkeypatch.setattr(Bookkeeping, "note_routing", learning)
    if not is_decided_by_device:
        let_the_host_decide(monkeypatch)
    with on_device(tiny_checkpoint, "30%") as moe:
        for then in (0, 2):
            for n in range(4, 12):  # in the first step after the prompt, or the two after it
                with moe.recording() as finish:
                    greedy(moe, num_tokens=5, **cache)
                    remaining = n
                    with pytest.raises(KeyboardInterrupt):
                        greedy(moe if is_called is MoE else moe.model, **cache)
                    if then:
                        greedy(moe, num_tokens=then, **cache)
                    num_left = 8 + (n - 4) // 3
                    lengths = [len(trace.experts_TLK) for trace in finish()]
                    assert lengths == [12, num_left] + ([7 + then] if then else []), n


@torch.no_grad()
def test_a_step_that_ran_is_recorded_though_its_caller_never_hears_of_it(tiny_checkpoint):
    """Nor does the host, by then."""

    def fail(*_: object) -> None:
        raise ValueError("enough")

    with on_device(tiny_checkpoint, "100%") as moe, moe.recording() as finish:
        cache = moe.model(PROMPT, use_cache=True).past_key_values
        moe.model(PROMPT[:, :1], **{CACHE: cache})
        hook = moe.model.register_forward_hook(fail, prepend=True)
        with pytest.raises(ValueError, match="enough"):
            moe.model(PROMPT[:, 1:2], **{CACHE: cache})
        hook.remove()
        moe.model(PROMPT[:, 2:3], **{CACHE: cache})
        (trace,) = finish()
    assert trace.token_ids_T.tolist() == [*PROMPT[0].tolist(), *PROMPT[0, :3].tolist()]


@pytest.mark.parametrize("is_decided_by_device", [True, False])
def test_a_recording_has_the_last_step_of_a_caller_who_fails_after_it(
    tiny_checkpoint, monkeypatch, is_decided_by_device
):
    def fail(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] == 11:
            raise ValueError("enough")
        return torch.zeros(1, dtype=torch.bool)

    if not is_decided_by_device:
        let_the_host_decide(monkeypatch)
    with on_device(tiny_checkpoint, "30%") as moe, moe.recording() as finish:
        with pytest.raises(ValueError, match="enough"):
            greedy(moe, stopping_criteria=[fail])
        greedy(moe, num_tokens=2)
        assert [len(trace.experts_TLK) for trace in finish()] == [10, 9]
