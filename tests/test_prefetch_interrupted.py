"""Prefetch in the engine when something else happens: Ctrl-C, prompts, calls below the top."""

from __future__ import annotations

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import TraceError
from moe_infinity.experts import ExpertKey

PROMPT = torch.tensor([[3, 17, 5, 9, 40, 2, 77, 31]])


def greedy(moe: MoE, num_tokens: int = 12) -> torch.Tensor:
    mask = torch.ones_like(PROMPT)
    return moe.generate(
        input_ids=PROMPT, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False
    )


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_between_two_reservations_leaves_nothing_behind(
    tiny_checkpoint, monkeypatch, at
):
    """Once a plan at the beginning of a step was cut short, its slots stayed LOADING for good."""
    with MoE(tiny_checkpoint, host_memory="60%", prefetch=True) as moe:
        expected = greedy(moe)
        begin_prefetch, calls = ResidencyTable.begin_prefetch, []

        def interrupted(self: ResidencyTable, key: ExpertKey) -> int:
            calls.append(key)
            if len(calls) == at:
                raise KeyboardInterrupt
            return begin_prefetch(self, key)

        monkeypatch.setattr(ResidencyTable, "begin_prefetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            greedy(moe, num_tokens=100)
        monkeypatch.undo()
        assert torch.equal(greedy(moe), expected)
        moe.check_invariants()
        table, mover = moe.engine.tiers[0].table, moe.engine.tiers[0].mover
        with moe.engine.deciding:
            assert set(table.loading_keys()) == set(mover._loading)


def test_a_model_called_below_its_top_begins_a_step_whenever_its_layers_come_round(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="50%") as moe:
        with torch.no_grad():
            for _ in range(5):
                moe.model.model(input_ids=PROMPT)
        assert moe.report().prefill.steps == 5
        (eam,) = moe.request_eams()
        assert set(eam.prefill.sum(axis=1).tolist()) == {PROMPT.numel() * 2}


@pytest.mark.parametrize("place", ["none/history.npz", "file/history.npz"])
def test_a_history_that_could_not_be_written_is_refused_at_the_start(
    tiny_checkpoint, tmp_path, place
):
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="could not be written"):
        MoE(tiny_checkpoint, history=tmp_path / place)
