"""Steps as one graph whose cache has more than keys and values: recurrent and convolution states,
keys of an indexer, with graphs that a CPU can record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import StaticCache, StoppingCriteria

from moe_infinity import MoE
from tests.cuda import recorded_graph
from tests.cuda.fast_device import on_device
from tests.cuda.on_device import LONG_PROMPT, PROMPT
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(2)]

PROMPTS = {
    "short": (PROMPT, torch.ones_like(PROMPT)),
    "long": (LONG_PROMPT[:, :40], torch.ones(1, 40, dtype=torch.int64)),
    "padded": recorded_graph.PADDED,
}
INDEXED = "deepseek_v32"
# Beside recurrent layers: keys and values in the same layer (zaya), a sliding window (inkling).
OTHERS = ["axk2", "glm_moe_dsa", "granitemoehybrid", "jamba", "kimi_linear", "qwen3_5_moe"]
ONE_FAST = [
    "qwen3_next",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (INDEXED, "inkling", "zaya", *OTHERS)),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(name) -> a tiny model of that architecture."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
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


def assert_same(moe: MoE, expected: dict[str, Tensor]) -> None:
    for which, prompt in PROMPTS.items():
        assert torch.equal(recorded_graph.logits(moe, *prompt), expected[which]), which
        moe.check_invariants()


@pytest.mark.parametrize("name", ONE_FAST)
def test_one_graph_of_a_request_has_the_bits_of_no_graph(folder_of, expected, name, graphs, caplog):
    with on_device(folder_of(name), "10%", "100%") as moe:
        for number, (which, prompt) in enumerate(PROMPTS.items(), 1):
            assert torch.equal(recorded_graph.logits(moe, *prompt), expected(name)[which]), which
            assert len(graphs) == number
            moe.check_invariants()
    assert "no CUDA graph" not in caplog.text


@pytest.mark.parametrize("run", [recorded_graph.conversation, recorded_graph.beams])
@pytest.mark.parametrize("name", ONE_FAST)
def test_a_second_turn_is_captured_and_beams_are_not(folder_of, graphs, monkeypatch, name, run):
    found = recorded_graph.without_and_with_graph(monkeypatch, folder_of(name), run)
    assert all(map(torch.equal, *found))
    assert len(graphs) == (2 if run is recorded_graph.conversation else 0)


class Between(StoppingCriteria):  # type: ignore[misc]
    """Called between two steps with the cache, once."""

    def __init__(self, change: Any, cache: StaticCache) -> None:
        self.steps_left, self._change, self._cache = 8, change, cache

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.steps_left -= 1
        if self.steps_left == 0:
            self._change(self._cache)
        return torch.zeros(len(ids), dtype=torch.bool)


def move(held: dict[Any, Any], name: Any) -> None:
    before = held[name]
    held[name] = before.clone()
    before.zero_()


def move_conv_state(cache: StaticCache) -> None:
    move(cache.layers[0].conv_states, 0)


def move_recurrent_state(cache: StaticCache) -> None:
    move(cache.layers[0].recurrent_states, 0)


def move_values(cache: StaticCache) -> None:
    move(vars(cache.layers[-1]), "values")


def move_indexer_keys(cache: StaticCache) -> None:
    move(vars(cache.layers[-1]), "indexer_keys")


def record_past(cache: StaticCache) -> None:
    cache.activate_past_recording()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "change", "num_graphs"),
    [
        ("qwen3_next", move_conv_state, 2),
        ("qwen3_next", move_recurrent_state, 2),
        ("qwen3_next", move_values, 2),
        (INDEXED, move_indexer_keys, 2),
        ("qwen3_next", record_past, 1),  # its states then are new tensors after every step
    ],
)
def test_what_moves_a_tensor_between_two_steps_ends_a_graph(
    folder_of, graphs, monkeypatch, name, change, num_graphs
):
    def run(moe: MoE) -> list[Tensor]:
        cache = StaticCache(config=moe.model.config, max_cache_len=40)
        out = moe.generate(
            input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), past_key_values=cache,
            max_new_tokens=20, do_sample=False, output_logits=True,
            return_dict_in_generate=True, stopping_criteria=[Between(change, cache)],
        )  # fmt: skip
        states = [v for layer in cache.layers for v in tree_leaves(vars(layer))]
        return [*out.logits, *(v for v in states if isinstance(v, Tensor))]

    found = recorded_graph.without_and_with_graph(monkeypatch, folder_of(name), run)
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
    assert len(graphs) == num_graphs


@pytest.mark.slow
def test_what_a_model_adds_to_its_cache_is_part_of_a_graph(folder_of, expected, graphs):
    """Qwen4 keeps all positions so far: they are a longer tensor in every step."""
    with on_device(folder_of("qwen4_exp"), "100%", "100%") as moe:
        assert_same(moe, expected("qwen4_exp"))
    assert not graphs


@pytest.mark.slow
def test_what_has_a_size_that_the_device_says_is_not_captured(folder_of, expected, graphs, caplog):
    """GLM 5 keeps those pools of keys that are complete."""
    with on_device(folder_of("glm5_next"), "100%", "100%") as moe:
        assert_same(moe, expected("glm5_next"))
    assert not graphs
    assert "no CUDA graph" in caplog.text


@pytest.mark.parametrize("name", [INDEXED, "qwen3_next"])
@torch.no_grad()
def test_a_cache_that_was_reset_begins_anew(folder_of, graphs, monkeypatch, name):
    """Even with a prompt of one token."""
    with on_device(folder_of(name), "100%", "100%") as moe:
        cache, found = StaticCache(config=moe.model.config, max_cache_len=40), []
        for ids in (PROMPT, PROMPT[:, :1], PROMPT, PROMPT[:, :1]):
            cache.reset()
            out = moe.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            found.append(torch.stack(out.logits))
            if len(found) == 2:
                assert len(graphs) == 2
                recorded_graph.without_graphs(monkeypatch)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
