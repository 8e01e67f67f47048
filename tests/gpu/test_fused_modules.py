"""Which modules compute in few kernels on a GPU, and that they give what their own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moe_infinity.architectures.adapters import CALL_ATTRIBUTE
from moe_infinity.architectures.trial import FellBack, Found, Trial
from moe_infinity.gpu import routers
from moe_infinity.gpu.attention_modules import fuse_attention
from moe_infinity.gpu.cached_step import AttentionSwitch, CachedSteps
from moe_infinity.gpu.kernels import kernels_for
from moe_infinity.gpu.residuals import find_norms, fuse_layers, parts_of
from moe_infinity.gpu.routers import (
    FusedMlp,
    activation_of,
    fuse_routers,
    joined,
    try_router,
)
from tests.cache_name import CACHE
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

pytestmark = pytest.mark.arithmetic

CPU = torch.device("cpu")
PLAIN = kernels_for(CPU)
# Those that are named in docs/gpu.md: the rule of scores, and what weights are.
ROUTERS = {
    "qwen2_moe": ("softmax", "as they are"),
    "qwen3_moe": ("softmax", "as they are"),
    "mixtral": ("softmax", "divided by their sum"),
    "olmoe": ("softmax", "as they are"),
    "gpt_oss": ("softmax", "divided by their sum"),  # of the chosen logits: the same
    "deepseek_v2": ("softmax", "as they are"),
    "deepseek_v3": ("sigmoid", "divided by their sum"),
    "glm4_moe": ("sigmoid", "divided by their sum"),
}


def model_of(folder: str) -> Any:
    torch.manual_seed(0)
    model = tiny.tiny_model(architectures_in(folder)[0]).float()
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "bias" in name or "sinks" in name:  # else ones and zeros
            each.data = each.data + 0.1 * torch.randn_like(each.data)
    return model


@pytest.mark.parametrize("folder", ROUTERS)
def test_routers_are_found_and_choose_as_their_own_code_does(folder):
    model = model_of(folder)
    fused = dict(fuse_routers(model, PLAIN))
    assert fused
    for router, forward in fused.items():
        found = try_router(router)
        assert isinstance(found, Found)
        choice = found.path.choice
        assert (choice.scores, choice.weights) == ROUTERS[folder]
        num_experts, width = router.get_parameter("weight").shape
        x_TD = torch.randn(17, width)
        with torch.no_grad():
            _, weights, index = forward(x_TD)
            _, own_weights, own_index = router(x_TD)
        spread = [
            torch.zeros(17, num_experts).scatter_(1, i, s.float())
            for i, s in ((index, weights), (own_index, own_weights))
        ]
        torch.testing.assert_close(*spread)


class Jitters(nn.Module):
    """It scales the third of what it has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(x, self.weight)
        weights, index = logits.softmax(-1).topk(3)
        return logits, weights * torch.tensor([1.0, 1.0, 0.9]), index


def test_a_router_with_a_rule_of_its_own_is_left_alone():
    assert try_router(Jitters()) == FellBack("it weighs otherwise", has_run=True)
    assert not list(fuse_routers(nn.Sequential(Jitters(), nn.Linear(16, 8)), PLAIN))


def test_gradients_take_the_routers_own_code():
    (router, forward), *_ = fuse_routers(model_of("qwen3_moe"), PLAIN)
    x = torch.randn(2, router.get_parameter("weight").shape[1], requires_grad=True)
    assert forward(x)[1].requires_grad


@pytest.mark.parametrize("folder", ROUTERS)
@torch.no_grad()
def test_attention_modules_are_found_and_give_what_their_own_code_gives(folder):
    """A prompt of three tokens by either, then a step by either after one by their own code."""
    model = model_of(folder)
    fused = dict(fuse_attention(model, PLAIN))
    attention = [layer.self_attn for layer in model.model.layers]
    assert set(fused) == set(attention)
    x_BTD = torch.randn(2, 4, model.config.hidden_size)
    positions = torch.arange(4)[None].expand(2, -1)
    angles = model.model.rotary_emb(x_BTD, positions)
    parts = [
        angles[:, part] if isinstance(angles, Tensor) else tuple(a[:, part] for a in angles)
        for part in (slice(0, 3), slice(3, 4))
    ]
    mask = torch.ones(3, 3).tril().log()[None, None]
    for module, forward in fused.items():
        given: dict[str, Any] = {"position_embeddings": parts[0], "attention_mask": mask}
        found = [run(x_BTD[:, :3], **given)[0] for run in (forward, module)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        found = []
        for is_ours in (False, True):
            cache = DynamicCache(config=model.config)
            given = {CACHE: cache}
            for each in attention:  # every layer of the cache has something
                each(x_BTD[:, :3], position_embeddings=parts[0], attention_mask=mask, **given)
            given["position_embeddings"] = parts[1]
            last = x_BTD[:, 3:]
            if is_ours:
                cached = CachedSteps(CPU, PLAIN).of(cache, 2, None)
                assert cached is not None
                with cached.under_way(), AttentionSwitch(model).to():
                    found.append(forward(last, attention_mask=None, **given)[0])
            else:
                found.append(module(last, attention_mask=None, **given)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_joined_weights_are_those_of_the_layers():
    one, other = nn.Linear(4, 3), nn.Linear(4, 2, bias=False)
    before = [one.weight.clone(), other.weight.clone()]
    weight, bias = joined([one, other])
    assert torch.equal(weight, torch.cat(before))
    assert bias is not None
    with torch.no_grad():
        other.weight.add_(1)
        one.bias.add_(1)
    assert torch.equal(weight[3:], before[1] + 1)
    assert torch.equal(bias, torch.cat([one.bias, torch.zeros(2)]))
    assert other.bias is None
    assert joined([other, nn.Linear(4, 2, bias=False)])[1] is None


# MLPs, and layers


class Doubled(nn.Module):
    """Looks like an MLP of the usual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(4, 6)
        self.up_proj = nn.Linear(4, 6)
        self.down_proj = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
def test_an_mlp_gives_what_its_own_code_gives():
    model = model_of("deepseek_v2")
    found = [m for m in model.modules() if type(m).__name__ == "DeepseekV2MLP"]
    assert found
    for module in found:
        x = torch.randn(2, 3, module.hidden_size)
        expected = module(x)
        activation = activation_of(module)
        assert activation is not None
        fused = FusedMlp(module, activation, PLAIN)
        torch.testing.assert_close(fused.forward(x), expected)
    assert activation_of(Doubled()) is None


LAYERS = {"qwen2_moe": 1, "mixtral": 1, "gpt_oss": 1, "deepseek_v3": 2, "glm4_moe": 2}  # parts


@pytest.mark.parametrize("has_last_norm", [True, False])
@pytest.mark.parametrize("folder", LAYERS)
@torch.no_grad()
def test_layers_are_found_and_give_what_their_own_code_gives(folder, has_last_norm, monkeypatch):
    model = model_of(folder)
    for layer in model.model.layers:
        for experts in layer.mlp.children():
            if "experts" in type(experts).__name__.lower() and hasattr(experts, "num_experts"):
                setattr(experts, CALL_ATTRIBUTE, None)  # as if the engine computed them
    ids = torch.arange(3, 11).view(2, 4)
    expected = model(ids).logits
    norms = find_norms(model, PLAIN)
    if not has_last_norm:  # as a model whose norm after the layers is none of ours
        del norms[model.model.norm]
    for layer, forward in fuse_layers(model, norms):
        monkeypatch.setitem(vars(layer), "forward", forward)
    for module, norm in norms.items():
        monkeypatch.setitem(vars(module), "forward", norm.forward)
    assert all("forward" in vars(layer) for layer in model.model.layers)
    assert len(parts_of(model.model.layers[-1].mlp)(torch.randn(1, 2, 64))) == LAYERS[folder]
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """Looks like a decoder layer."""

    def __init__(self, layer: Any, scale: float) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self._scale = scale

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + self._scale * added


@pytest.mark.parametrize(("scale", "num_found"), [(1.0, 1), (0.5, 0)])
def test_a_layer_that_scales_is_left_alone(scale, num_found):
    model = model_of("qwen3_moe")
    layers = nn.Sequential(nn.ModuleList([Scaled(model.model.layers[0], scale)]))
    assert len(list(fuse_layers(layers, find_norms(layers, PLAIN)))) == num_found


@pytest.mark.parametrize("seed", range(8))
def test_how_groups_are_scored_is_found_whatever_numbers_are_drawn(seed, monkeypatch):
    """What is added for choosing once hid it on some processors, as random numbers differ."""
    monkeypatch.setattr(routers, "Trial", lambda module, **_: Trial(module, seed=seed))
    model = model_of("nemotron_h").float()
    found = [m for m in model.modules() if type(m).__name__ == "NemotronHTopkRouter"]
    path = try_router(found[0])
    assert isinstance(path, Found)
    assert path.path.choice.group_score == "sum of two best"
