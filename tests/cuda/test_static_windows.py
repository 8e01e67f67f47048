"""Steps with sliding windows as one graph: gpt-oss, whose window of 16 tokens fills up and moves
on, with graphs that a CPU can record.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from moe_infinity import MoE
from moe_infinity.cuda.static_windows import StaticWindows
from tests.cuda import recorded_graph
from tests.cuda.fast_device import on_device
from tests.cuda.on_device import LONG_PROMPT, PROMPT
from tests.quantized_checkpoints import build

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(2)]

ONE_BELOW = LONG_PROMPT[:, :13]  # captured with 15 of 16 tokens in the window
FULL = LONG_PROMPT[:, :16]
PROMPTS = {
    "fills up": (PROMPT, torch.ones_like(PROMPT)),
    "fills up at once": (ONE_BELOW, torch.ones_like(ONE_BELOW)),
    "is full": (FULL, torch.ones_like(FULL)),
    "was overrun": (LONG_PROMPT, torch.ones_like(LONG_PROMPT)),
    "padded": recorded_graph.PADDED,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("mxfp4", tmp_path_factory.mktemp("gpt_oss") / "model")


@pytest.fixture(scope="module")
def expected(folder):
    return recorded_graph.logits_without_graph(folder, PROMPTS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("device_memory", ["7%", "100%"])
def test_one_graph_of_a_request_has_the_bits_of_no_graph(
    folder, expected, graphs, device_memory, caplog
):
    with on_device(folder, device_memory, "100%") as moe:
        for number, (name, prompt) in enumerate(PROMPTS.items(), 1):
            assert torch.equal(recorded_graph.logits(moe, *prompt), expected[name]), name
            assert len(graphs) == number
            moe.check_invariants()
    assert "no CUDA graph" not in caplog.text


def test_the_count_of_stock_would_be_frozen_in_a_graph(
    folder, expected, graphs, monkeypatch, caplog
):
    """What the tests above see: a window that fills up is full too late, a full one is refused."""
    monkeypatch.setattr(StaticWindows, "on_device", lambda self: nullcontext())
    with on_device(folder, "100%", "100%") as moe:
        with pytest.raises((AssertionError, IndexError, RuntimeError)):
            assert torch.equal(
                recorded_graph.logits(moe, *PROMPTS["fills up"]), expected["fills up"]
            )
        assert len(graphs) == 1
        recorded_graph.logits(moe, *PROMPTS["is full"])
        assert "not permitted when stream is capturing" in caplog.text


@pytest.mark.parametrize("run", [recorded_graph.conversation, recorded_graph.beams])
@pytest.mark.parametrize("has_windows", [True, False])
def test_a_cache_that_changes_between_steps_is_no_longer_that_of_the_graph(
    folder, tiny_checkpoint, graphs, monkeypatch, run, has_windows
):
    model = folder if has_windows else tiny_checkpoint
    found = recorded_graph.without_and_with_graph(monkeypatch, model, run)
    assert all(map(torch.equal, *found))
    assert bool(graphs) == (run is recorded_graph.conversation)


def test_a_mask_made_inside_the_step_is_of_the_devices_count_or_refused(
    folder, graphs, monkeypatch, caplog
):
    """generate() makes it outside."""

    def run(moe: MoE) -> list[Tensor]:
        cache = StaticCache(config=moe.model.config, max_cache_len=48)
        return [
            moe.model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True).logits
            for token in torch.arange(3, 33)
        ]

    assert all(map(torch.equal, *recorded_graph.without_and_with_graph(monkeypatch, folder, run)))
    assert graphs or "not permitted when stream is capturing" in caplog.text
