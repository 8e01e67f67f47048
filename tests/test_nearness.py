"""By default logits are at least as near to float64 as those of stock transformers in bfloat16,
which exact=True gives. benchmarks/nearness.py prints the figures.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.kernels import many_rows
from moe_infinity.kernels.cpu.compiler import multiplies_bfloat16
from tests.float64 import ARCHITECTURES, DEMO, Error, errors, save_tiny, text_for_demo
from tests.gguf_files import widen
from tools.convert_to_gguf import convert

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


@pytest.mark.slow
def test_long_prompts_of_packed_weights_are_as_near_as_stock_with_unpacked_ones(
    tmp_path, monkeypatch
):
    """Without products of bfloat16, of pairs and of matrices: paths that have bits of their own."""
    packed = tmp_path / "packed.gguf"
    convert(DEMO, packed, "q8_0")
    wide = widen(packed, tmp_path / "wide.gguf")
    ids_BN = text_for_demo()
    monkeypatch.setattr(many_rows, "MEAN_ROWS", 0)
    monkeypatch.setattr(many_rows, "MEAN_ROWS_HALF", 0)
    monkeypatch.setattr(many_rows, "MEAN_ROWS_WIDENED", 0)

    def logits(file: Path, **options: Any) -> Tensor:
        with MoE(file, config_from=str(DEMO), device="cpu", **options) as moe, torch.no_grad():
            found: Tensor = moe.model(ids_BN).logits.double()
        return found

    exact = logits(wide, dtype="float32", exact=True)

    def median_error(found_BNV: Tensor) -> float:
        return (found_BNV - exact).square().mean(-1).sqrt().median().item()

    stock = median_error(logits(wide, dtype="bfloat16", exact=True))
    found = {}
    paths = ["none", *(["pairs"] if multiplies_bfloat16() else []), "matrices"]
    for path in paths:
        monkeypatch.setattr(many_rows, "multiplies_bfloat16", lambda has=path != "none": has)
        monkeypatch.setattr(
            many_rows, "has_products_of_matrices", lambda has=path == "matrices": has
        )
        found[path] = logits(packed, dtype="bfloat16")
        assert 0 < median_error(found[path]) < RMS_RATIO * stock
        halves = logits(packed, dtype="bfloat16", host_memory="50%")
        assert torch.equal(halves, found[path]), "the budget changes nothing"
    for one, other in combinations(paths, 2):
        assert not torch.equal(found[one], found[other])


def test_weights_of_four_bits_are_not_as_near(tmp_path):
    """Or else the tests above would not notice a worse arithmetic."""
    ids = save_tiny("Qwen3MoeForCausalLM", tmp_path)
    ways = {"exact": WAYS["exact"], "int4": {"expert_dtype": "int4"}}
    found = errors(tmp_path, ids, ways, imposes_experts=True)
    assert found["int4", "steps"].rms > RMS_RATIO * found["exact", "steps"].rms
