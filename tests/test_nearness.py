"""By default logits are at least as near to float64 as those of stock transformers in bfloat16,
which exact=True gives. benchmarks/nearness.py prints the figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.float64 import ARCHITECTURES, DEMO, Error, errors, save_tiny, text_for_demo

pytestmark = pytest.mark.arithmetic

WAYS: dict[str, dict[str, Any]] = {"exact": {"exact": True}, "default": {}}
# Errors of one model and one text are a sample. With other texts the root mean squares had ratios
# of 0.88 to 1.03, the largest errors of 0.73 to 1.33.
RMS_RATIO, LARGEST_RATIO = 1.06, 1.6
FAST = ("Qwen3MoeForCausalLM",)


def ratios(folder: Path, ids_BN: Tensor) -> dict[str, Error]:
    """Of the default's errors and stock's, of the logits of a prompt and of steps."""
    found = errors(folder, ids_BN, WAYS, imposes_experts=True)
    return {
        kind: Error(
            *(a / b for a, b in zip(found["default", kind], found["exact", kind], strict=True))
        )
        for kind in ("prompt", "steps")
    }


def assert_as_near(folder: Path, ids_BN: Tensor) -> None:
    for kind, ratio in ratios(folder, ids_BN).items():
        assert ratio.rms < RMS_RATIO, (kind, ratio)
        assert ratio.largest < LARGEST_RATIO, (kind, ratio)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_logits_are_as_near_to_float64_as_those_of_stock(name, tmp_path):
    assert_as_near(tmp_path, save_tiny(name, tmp_path))


@pytest.mark.slow
def test_logits_of_the_demo_model_are_as_near_to_float64_as_those_of_stock():
    assert_as_near(DEMO, text_for_demo())


def test_weights_of_four_bits_are_not_as_near(tmp_path):
    """Or else the tests above would not notice a worse arithmetic."""
    ids = save_tiny("Qwen3MoeForCausalLM", tmp_path)
    found = errors(tmp_path, ids, WAYS | {"int4": {"expert_dtype": "int4"}}, imposes_experts=True)
    assert found["int4", "steps"].rms > RMS_RATIO * found["exact", "steps"].rms
