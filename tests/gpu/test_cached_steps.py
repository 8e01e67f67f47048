"""Steps over caches of every kind as graphs that a CPU can record: keys and values, sliding windows
that fill up and move on, latents, recurrent states.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from moe_infinity import MoE
from moe_infinity.gpu.cached_step import CachedSteps
from moe_infinity.gpu.graphed_step import GraphedStep
from tests.cache_name import CACHE
from tests.gpu import recorded_graph
from tests.gpu.fast_device import experts_of, on_device
from tests.on_device import LONG_PROMPT, PROMPT, greedy
from tests.quantized_checkpoints import build
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(2)]

WINDOW = 16  # of gpt-oss here
PROMPTS = {
    name: (ids, torch.ones_like(ids))
    for name, ids in {
        "short": PROMPT,
        "one below the window": LONG_PROMPT[:, : WINDOW - 1],
        "as long as the window": LONG_PROMPT[:, :WINDOW],
        "long": LONG_PROMPT[:, :40],
    }.items()
} | {"padded": recorded_graph.PADDED}
# Whose layers keep states at addresses of their own: a graph serves one request.
RECURRENT = ["qwen3_next", "granitemoehybrid", "jamba", "kimi_linear", "qwen3_5_moe"]
NAMES = ["gpt_oss", "deepseek_v2", "qwen3_next"]
OTHERS = ["afmoe", "deepseek_v3", "gemma4", "glm4_moe", "longcat_flash", "mixtral", *RECURRENT[1:]]
OF_ALL = [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(name) -> a tiny model of that architecture."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
            if name == "gpt_oss":
                found[name] = build("mxfp4", found[name] / "model")
            else:
                tiny_model(architectures_in(name)[-1]).save_pretrained(found[name])
        return found[name]

    return folder


@pytest.fixture(scope="module")
def expected(folder_of):
    """expected(name) -> logits without a graph, of each prompt."""
    found: dict[str, dict[str, Tensor]] = {}

    def of_all_prompts(name: str) -> dict[str, Tensor]:
        if name not in found:
            found[name] = recorded_graph.logits_without_graph(folder_of(name), PROMPTS)
        return found[name]

    return of_all_prompts


@pytest.mark.parametrize("name", OF_ALL)
def test_graphs_have_the_bits_of_no_graph(folder_of, expected, name, graphs, caplog):
    """One graph for each number of sequences, whatever the prompt."""
    with on_device(folder_of(name), "10%") as moe:
        for which, prompt in PROMPTS.items():
            found = recorded_graph.logits(moe, *prompt)
            assert torch.equal(found, expected(name)[which]), which
            assert experts_of(moe).graphed.has_graph
            moe.check_invariants()
    assert len(graphs) == (len(PROMPTS) if name in RECURRENT else 2)
    assert "no CUDA graph" not in caplog.text


@pytest.mark.parametrize("run", [recorded_graph.conversation, recorded_graph.beams])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_a_cache_may_go_on_or_be_put_in_another_order(folder_of, graphs, monkeypatch, name, run):
    found = recorded_graph.without_and_with_graph(monkeypatch, folder_of(name), run)
    assert all(map(torch.equal, *found))
    if name not in RECURRENT or run is recorded_graph.conversation:  # beams move states
        assert graphs


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decode_steps_give_what_the_models_own_code_gives(folder_of, monkeypatch, name):
    found = []
    for of in (CachedSteps.of, lambda *_: None):
        monkeypatch.setattr(CachedSteps, "of", of)
        with on_device(folder_of(name), "100%", dtype="float32") as moe:
            found.append([recorded_graph.logits(moe, *prompt) for prompt in PROMPTS.values()])
    for ours, stock in zip(*found, strict=True):
        assert not torch.equal(ours, stock)  # another way to compute the same
        assert (ours - stock).abs().max() < 1e-4 * stock.abs().max()


def taken(moe: MoE, cache: object, mask: Tensor | None = None, num_seqs: int = 1) -> bool:
    cached = experts_of(moe).graphed._cached
    assert cached is not None
    return cached.of(cache, num_seqs, mask) is not None


@torch.no_grad()
def test_caches_that_are_not_known_are_left_to_the_model(folder_of):
    with on_device(folder_of("deepseek_v2"), "100%") as moe:
        config = moe.model.config
        cache = DynamicCache(config=config)
        assert not taken(moe, cache)  # has nothing yet
        greedy(moe, **{CACHE: cache})
        length = cache.get_seq_length()
        assert taken(moe, cache)
        assert not taken(moe, cache, num_seqs=2)
        assert taken(moe, cache, torch.ones(1, length + 1, dtype=torch.int64))
        assert not taken(moe, cache, torch.ones(1, length - 1, dtype=torch.int64))
        cache.offloading = True
        assert not taken(moe, cache)
        assert not taken(moe, StaticCache(config=config, max_cache_len=8))
        assert not taken(moe, None)


@torch.no_grad()
def test_a_step_that_fails_leaves_the_cache_as_it_was(folder_of, monkeypatch):
    with on_device(folder_of("deepseek_v2"), "100%") as moe:
        cache = DynamicCache(config=moe.model.config)
        moe.model(input_ids=PROMPT, **{CACHE: cache})
        last = {"input_ids": PROMPT[:, :1], "position_ids": torch.full((1, 1), 8)}
        with monkeypatch.context() as patched:
            compute = GraphedStep._compute
            patched.setattr(GraphedStep, "_compute", lambda *a, **k: compute(*a, **k) and 1 / 0)
            with pytest.raises(ZeroDivisionError):
                moe.model(**{CACHE: cache}, **last)
        assert cache.get_seq_length() == PROMPT.shape[1]
        assert not any("update" in vars(layer) for layer in cache.layers)
        again = moe.model(**{CACHE: cache}, **last).logits
        fresh = DynamicCache(config=moe.model.config)
        moe.model(input_ids=PROMPT, **{CACHE: fresh})
        assert torch.equal(moe.model(**{CACHE: fresh}, **last).logits, again)
