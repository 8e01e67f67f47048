"""The weight of a layer that stays packed can be computed with, and a change of it is an error: it
would be lost without a word, as an adapter that is merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_infinity.architectures.model_parts import PackedLinear, ReorderedLinear

WEIGHT = torch.arange(12.0).view(3, 4)
COLUMNS = torch.tensor([2, 0, 3, 1])


class Packed:
    num_unpacked = 0

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        self.num_unpacked += 1
        return WEIGHT.to(dtype)


def layer_of(packed: Any, kind: str) -> Any:
    linear = PackedLinear(nn.Linear(4, 3), packed, torch.float32)
    return linear if kind == "packed" else ReorderedLinear(linear, COLUMNS)


@pytest.mark.parametrize("kind", ["packed", "reordered"])
def test_its_weight_is_what_the_layer_multiplies_with(kind):
    packed = Packed()
    layer = layer_of(packed, kind)
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 4), torch.float32, "cpu")
    assert packed.num_unpacked == 0  # no number was asked for
    expected = WEIGHT if kind == "packed" else WEIGHT[:, COLUMNS]
    assert torch.equal(weight + 0, expected)
    assert torch.equal(weight.data.clone(), expected)
    assert type(weight.clone()) is Tensor
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.allclose(layer(input=x), nn.functional.linear(x, weight, layer.bias))
    assert layer.half().weight.dtype == torch.float16


@pytest.mark.parametrize("kind", ["packed", "reordered"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.add_(1),
        lambda weight: weight.data.mul_(2),
        lambda weight: setattr(weight, "data", WEIGHT),
        lambda weight: weight.detach().copy_(WEIGHT),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: torch.add(weight, 1, out=weight),
        lambda weight: weight.__iadd__(1),
        lambda weight: nn.init.zeros_(weight),
    ],
)
def test_a_change_is_an_error(kind: str, change: Callable[[Tensor], Any]):
    layer = layer_of(Packed(), kind)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be changed"):
        change(layer.weight)
    with pytest.raises(RuntimeError, match="cannot be changed"):
        layer.weight = nn.Parameter(torch.zeros(3, 4))


@pytest.mark.parametrize("kind", ["packed", "reordered"])
def test_a_weight_that_is_loaded_is_an_error_and_a_bias_is_not(kind: str):
    layer = nn.Sequential(layer_of(Packed(), kind))
    with pytest.raises(RuntimeError, match="0.weight: .*cannot be changed"):
        layer.load_state_dict({"0.weight": WEIGHT}, strict=False)
    assert [*layer.state_dict()] == ["0.bias"]
    layer.load_state_dict({"0.bias": torch.ones(3)})
    expected = WEIGHT.sum(dim=1) + 1
    assert torch.equal(layer(torch.ones(4)), expected)
    layer[0].bias = nn.Parameter(torch.full((3,), 2.0))
    assert torch.equal(layer(torch.ones(4)), expected + 1)


@pytest.mark.parametrize("kind", ["packed", "reordered"])
def test_adapters_see_one_linear_layer(kind: str):
    layer = layer_of(Packed(), kind)
    assert [module for module in layer.modules() if isinstance(module, nn.Linear)] == [layer]
    assert [*dict(layer.named_parameters())] == ["bias"]
