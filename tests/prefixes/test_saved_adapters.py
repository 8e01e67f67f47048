"""A prefix is for the adapters of PEFT with which it was computed. Needs the package peft, see
CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_infinity import ConfigError, MoE
from tests.peft_warnings import IGNORED
from tests.prefixes.tiny_models import TEXT, answer, assert_same

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.arithmetic, *IGNORED]

Change = Callable[[Any], None]  # of a model with the adapters "one" and "two", of which "one" is on
CHANGES: dict[str, tuple[Change, Change]] = {  # and what takes it back
    "off": (
        lambda tuner: tuner.disable_adapter_layers(),
        lambda tuner: tuner.enable_adapter_layers(),
    ),
    "other": (lambda tuner: tuner.set_adapter("two"), lambda tuner: tuner.set_adapter("one")),
    "scale": (lambda tuner: set_scale(tuner, 12.0), lambda tuner: set_scale(tuner, 4.0)),
}


def set_scale(tuner: Any, value: float) -> None:
    for module in tuner.modules():
        if hasattr(module, "lora_A"):
            module.scaling["one"] = value


@pytest.fixture
def moe(tiny_checkpoint) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, dtype="float32") as moe:
        yield moe


@pytest.fixture
def tuner(moe) -> Any:
    """Of the model, for a change."""
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(target_modules=targets, r=4, lora_alpha=16, init_lora_weights=False)
    adapted = peft.get_peft_model(moe.model, config, "one")
    adapted.add_adapter("two", config)
    adapted.eval()
    return adapted.base_model


@pytest.mark.parametrize("change", CHANGES)
def test_with_other_adapters_a_prefix_is_refused(change, moe, tuner, tmp_path):
    file = tmp_path / "a.prefix"
    prefix = moe.save_prefix(file, TEXT[:40])
    make, take_back = CHANGES[change]
    make(tuner)
    with pytest.raises(ConfigError, match="not those that this prefix was computed with"):
        answer(moe, TEXT[:60], prefix=prefix)
    with pytest.raises(ConfigError, match="weights in memory"):
        moe.load_prefix(file)
    take_back(tuner)
    for again in (prefix, moe.load_prefix(file)):
        assert_same(answer(moe, TEXT[:60], prefix=again), answer(moe, TEXT[:60]))
