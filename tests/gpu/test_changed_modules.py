"""A model that somebody has changed, hooked or patched runs its own code, and no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moe_infinity import MoE
from tests.cache_name import CACHE
from tests.gpu.fast_device import experts_of, on_device
from tests.gpu.recorded_graph import record_graphs
from tests.on_device import PROMPT

pytestmark = [pytest.mark.arithmetic]
IDS = torch.cat([PROMPT, PROMPT.flip(1)], dim=1)
NUM_PROMPT = 8


class Adapted(nn.Module):
    """As an adapter of low rank around a product."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(0)
        device = base.weight.device
        self.down = nn.Linear(base.in_features, 2, bias=False).to(device)
        self.up = nn.Linear(2, base.out_features, bias=False).to(device)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x))
        return 3 * added + self.base(x)


def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **kwargs) / 2


def adapt(layer: Any) -> None:
    layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)


def hook(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda module, given, out: out * 3)


def hook_before(layer: Any) -> None:
    layer.mlp.register_forward_pre_hook(lambda module, given: (given[0] * 3,))


def patch_a_norm(layer: Any) -> None:
    layer.input_layernorm.forward = halved(layer.input_layernorm.forward)


def patch_a_layer(layer: Any) -> None:
    layer.forward = halved(layer.forward)


def set_an_attribute(layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon = 0.5


def give_a_weight(layer: Any) -> None:
    weight = layer.self_attn.k_norm.weight
    layer.self_attn.k_norm.weight = nn.Parameter(2.5 * weight, requires_grad=False)


def choose_fewer(layer: Any) -> None:
    layer.mlp.gate.top_k = 1


@torch.no_grad()
def change_in_place(layer: Any) -> None:
    layer.self_attn.v_proj.weight.mul_(3)


CHANGES = [
    adapt, hook, hook_before, patch_a_norm, patch_a_layer, set_an_attribute, give_a_weight,
    choose_fewer, change_in_place,
]  # fmt: skip


@torch.no_grad()
def logits(moe: MoE) -> Tensor:
    """[N, V]: after the prompt, and after each token that follows it."""
    cache, found = DynamicCache(config=moe.model.config), []
    ids = IDS.to(moe.model.device)
    for piece in (ids[:, :NUM_PROMPT], *ids[:, NUM_PROMPT:].split(1, dim=1)):
        start = cache.get_seq_length()
        positions = torch.arange(start, start + piece.shape[1], device=ids.device)[None]
        given = {"input_ids": piece, "position_ids": positions, CACHE: cache, "use_cache": True}
        found.append(moe.model(**given).logits[0, -1].cpu())
    return torch.stack(found)


def assert_own_code_runs(change: Callable[[Any], None], exact: MoE, graphed: MoE) -> None:
    """In `graphed`, after it has captured its steps and one layer is changed as in `exact`."""
    change(exact.model.model.layers[1])
    expected = logits(exact)
    unchanged = logits(graphed)
    assert experts_of(graphed).graphed.has_graph
    change(graphed.model.model.layers[1])
    found = logits(graphed)
    assert experts_of(graphed).graphed.has_graph == (change is change_in_place)
    graphed.check_invariants()
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (found - unchanged).norm() > 0.01 * unchanged.norm()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_gives_what_its_own_code_gives(tiny_checkpoint, monkeypatch, change):
    record_graphs(monkeypatch)
    options = {"gpu_engine": "host", "exact": True, "dtype": "float32"}
    with (
        on_device(tiny_checkpoint, "100%", **options) as exact,
        on_device(tiny_checkpoint, "30%", dtype="float32") as graphed,
    ):
        assert_own_code_runs(change, exact, graphed)


def test_a_hook_that_is_taken_away_gives_the_graph_back(tiny_checkpoint, monkeypatch, caplog):
    record_graphs(monkeypatch)
    with on_device(tiny_checkpoint, "30%") as moe:
        expected = logits(moe)
        seen: list[Any] = []
        handle = moe.model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        logits(moe)
        assert len(seen) == 1 + IDS.shape[1] - NUM_PROMPT
        handle.remove()
        assert torch.equal(logits(moe), expected)
        assert experts_of(moe).graphed.has_graph
    assert [r.getMessage() for r in caplog.records if "own code" in r.getMessage()] == [
        "the model runs its own code, which is slower: a hook on Qwen3MoeDecoderLayer"
    ]
