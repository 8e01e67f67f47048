"""Routing that comes to the host later, while each expert has a slot on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_infinity.engine.slots import SlotWork
from moe_infinity.experts import Routing
from tests.gpu.fast_device import on_device
from tests.on_device import PROMPT


@torch.no_grad()
def test_with_a_slot_for_each_expert_a_prompt_waits_for_no_routing(tiny_checkpoint, monkeypatch):
    """It comes to the host later, and is counted as ever."""
    prompt = torch.arange(3, 103)[None]
    with on_device(tiny_checkpoint, "100%") as moe:
        found = []
        for is_waiting in (True, False):
            if not is_waiting:
                assert moe.engine.tiers[0].table.num_resident == moe.engine.tiers[0].table.num_slots
                monkeypatch.setattr(Routing, "of", lambda *_: pytest.fail("waits for the device"))
            before = moe.report().prefill
            logits = moe.model(prompt).logits
            routing = moe.last_routing()
            after = moe.report().prefill
            found.append((logits, routing, after.lookups - before.lookups))
            assert is_waiting or after.hits - before.hits == after.lookups - before.lookups
    (first, first_routing, *first_count), (second, second_routing, *second_count) = found
    assert torch.equal(first, second)
    assert first_routing is not None
    assert second_routing is not None
    assert np.array_equal(first_routing, second_routing)
    assert first_count == second_count


@torch.no_grad()
def test_routing_that_comes_later_belongs_to_its_step(tiny_checkpoint):
    with on_device(tiny_checkpoint, "100%") as moe:
        moe.model(torch.arange(3, 103)[None])
        with moe.recording() as finish:
            moe.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4)
            traces = finish()
        (eam,) = moe.request_eams()
        assert [trace.experts_TLK.shape[0] for trace in traces] == [PROMPT.shape[1] + 3]
        assert eam.prefill.sum() == PROMPT.shape[1] * traces[0].experts_TLK[0].size


@torch.no_grad()
def test_residents_of_a_layer_are_computed_together(tiny_checkpoint, monkeypatch):
    """In one call, however long the prompt: on a GPU a call costs as much as many experts."""
    given: list[int] = []
    compute = SlotWork.compute

    def noted(self, expert_idxs, slot_ids):
        given.append(len(expert_idxs))
        compute(self, expert_idxs, slot_ids)

    prompt = torch.randint(3, 127, (1, 2000), generator=torch.Generator().manual_seed(0))
    with on_device(tiny_checkpoint, "100%") as moe:
        monkeypatch.setattr(SlotWork, "compute", noted)
        moe.model(prompt)  # copies them, in a few groups
        given.clear()
        monkeypatch.setattr(type(moe._experts), "_pointers_of_residents", lambda *_: None)
        moe.model(prompt)
    assert given == [8, 8, 8]
