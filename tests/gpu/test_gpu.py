"""What only a GPU can show of the engine with graphs. Run by hand: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from moe_infinity import MoE
from tests.gpu.fast_device import GRAPHS, experts_of
from tests.gpu.recorded_graph import logits, without_graphs
from tests.gpu.test_changed_modules import CHANGES, assert_own_code_runs
from tests.on_device import BUDGETS, LONG_PROMPT, PROMPT, greedy
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("device_memory", BUDGETS)
def test_steps_that_the_device_decides_give_the_same_tokens_with_and_without_a_graph(
    tiny_checkpoint, monkeypatch, device_memory
):
    options = {"device": "cuda", "preload": "wait", **GRAPHS}
    prompts = PROMPT, LONG_PROMPT
    with monkeypatch.context() as patched:
        without_graphs(patched)
        with MoE(tiny_checkpoint, device_memory="100%", **options) as moe:
            expected = [greedy(moe, prompt) for prompt in prompts]
    with MoE(tiny_checkpoint, device_memory=device_memory, **options) as moe:
        for _ in range(3):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert torch.equal(greedy(moe, prompt), tokens)
                moe.check_invariants()
                assert experts_of(moe).graphed.has_graph


KINDS = {
    "aria": "weights that lie transposed",
    "deepseek_v2": "latents",
    "deepseek_v32": "an indexer",
    "gemma4": "sliding windows, another function",
    "gpt_oss": "biases, gate and up in turn, transposed",
    "granitemoehybrid": "convolutions and recurrent states",
    "inkling": "a window beside them",
    "lfm2_moe": "convolutions",
    "longcat_flash": "pairs without an expert",
    "minimax_m3_vl": "limits",
    "nemotron_h": "no gate",
    "qwen3_next": "linear attention",
}


NO_GRAPH = {"deepseek_v32", "inkling"}  # nor are their caches read by our attention


@pytest.mark.parametrize("folder", KINDS)
def test_a_graph_of_each_kind_of_model_has_the_bits_of_no_graph(folder, tmp_path, monkeypatch):
    """And in float32 nearly the logits of the exact path."""
    tiny_model(architectures_in(folder)[-1]).save_pretrained(tmp_path)
    options = {"device": "cuda", "device_memory": "30%", "dtype": "float32", "preload": "wait"}
    with MoE(tmp_path, exact=True, **options) as moe:
        exact = logits(moe, PROMPT, torch.ones_like(PROMPT))
    found = []
    for is_graph in (False, True):
        with monkeypatch.context() as patched:
            if not is_graph:
                without_graphs(patched)
            with MoE(tmp_path, **options, **GRAPHS) as moe:
                found.append(logits(moe, PROMPT, torch.ones_like(PROMPT)))
                moe.check_invariants()
                may_be = is_graph and folder not in NO_GRAPH
                assert experts_of(moe).graphed.has_graph == may_be
    without, with_graph = found
    assert torch.equal(with_graph, without)
    assert (without - exact).abs().max() < 1e-3 * exact.abs().max()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_is_changed_after_a_graph_runs_its_own_code(tiny_checkpoint, change):
    options = {"device": "cuda", "device_memory": "30%", "dtype": "float32", "preload": "wait"}
    with (
        MoE(tiny_checkpoint, exact=True, **options) as exact,
        MoE(tiny_checkpoint, **options, **GRAPHS) as graphed,
    ):
        assert_own_code_runs(change, exact, graphed)
