"""Experts that stay packed while they compute: near what unpacked ones give, as small as they were
packed, named in the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_infinity import ConfigError, MoE, UnsupportedModelError
from moe_infinity.checkpoint.recipe import Recipe
from moe_infinity.engine.fused import FusedWork
from moe_infinity.kernels import many_rows
from moe_infinity.kernels.cpu import experts as experts_cpu
from moe_infinity.kernels.cpu.experts import FusedExperts
from moe_infinity.kernels.many_rows import RowPath
from moe_infinity.quantize.pack import pack_checkpoint
from tests import conftest
from tests.architectures.test_architectures import SMALL
from tests.closeness import distance, logits_of_steps
from tests.on_demand import ON_DEMAND
from tests.quantized_checkpoints import CHECKPOINTS, build, has_kernels
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(5)]

IDS = torch.arange(3, 3 + 12).view(1, 12) * 4 % 128
WIDE = {"hidden_size": 256, "num_attention_heads": 4}  # as many columns as the kernels need
# Largest difference of float32 logits, of the largest logit. The kernels do not round a weight to
# the dtype of its scale, as unpacking does: 2 ** -9 for bfloat16, 2 ** -12 for float16.
TOLERANCE = {
    "int4": 0.02,
    "int8": 0.02,
    "auto-round": 0.002,
    "gptq": 0.002,
    "awq": 0.002,
    **dict.fromkeys(("fp8", "mxfp8", "mxfp4", "nvfp4"), 1e-4),
}


def kind_of(name: str) -> str:
    (kind,) = [kind for kind in TOLERANCE if name.startswith(kind)]
    return kind


@pytest.fixture(scope="module", params=CHECKPOINTS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory) -> Path:
    width = "intermediate_size" if name == "mxfp4" else "moe_intermediate_size"
    return build(name, tmp_path_factory.mktemp("packed") / "model", **WIDE, **{width: 128})


def token_by_token(folder: Path, ids: Tensor = IDS, **options: Any) -> Tensor:
    """Logits of a model that is given one token after the other."""
    with MoE(folder, **({"host_memory": "50%", "dtype": "float32"} | options)) as moe:
        found = logits_of_steps(moe.model, ids)
        moe.check_invariants()
    return found


@pytest.mark.sample(3)
def test_kernels_give_what_unpacked_experts_give_and_wrong_experts_do_not(
    name, folder, monkeypatch
):
    expected = token_by_token(folder, experts_implementation="grouped_mm")
    tolerance = TOLERANCE[kind_of(name)]
    with mock.patch.object(
        experts_cpu.FusedRows, "compute", autospec=True, side_effect=experts_cpu.FusedRows.compute
    ) as fused:
        assert distance(token_by_token(folder), expected) < tolerance
    assert fused.called == has_kernels(name)

    extents = Recipe.extents

    def swapped(recipe: Recipe, expert_idx: int) -> Any:
        return extents(recipe, 1 - expert_idx if expert_idx < 2 else expert_idx)

    monkeypatch.setattr(Recipe, "extents", swapped)
    assert distance(token_by_token(folder), expected) > 10 * tolerance


@pytest.mark.parametrize("num_tokens", [32, 100])
def test_many_rows_are_computed_from_packed_experts(name, folder, num_tokens):
    """To rounding what unpacked experts give, in float32."""
    ids = torch.full((1, num_tokens), 7)  # nearly all routed alike
    logits = []
    begin = mock.patch.object(FusedExperts, "begin", autospec=True, side_effect=FusedExperts.begin)
    for exact in (False, True):
        with MoE(folder, dtype="float32", exact=exact) as moe, torch.no_grad(), begin as begun:
            logits.append(moe.model(ids).logits)
            counts = moe.request_eams()[0].prefill
            paths = {call.kwargs["path"] for call in begun.call_args_list}
            path = RowPath.PANELS if num_tokens > many_rows.MOST_TOKENS else RowPath.FEW
            assert paths == ({path} if has_kernels(name) and not exact else set())
    assert counts[counts > 0].min() > 8
    assert distance(*logits) < TOLERANCE[kind_of(name)]
    assert distance(logits[0].roll(1, dims=2), logits[1]) > 10 * TOLERANCE[kind_of(name)]


# packed when they are loaded


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    conftest.make_model(hidden_size=256, moe_intermediate_size=128).save_pretrained(folder)
    conftest.save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("expert_dtype", ["int4", "int8", "fp8"])
def test_packing_on_load_gives_the_bits_of_the_packed_checkpoint(source, expert_dtype, tmp_path):
    pack_checkpoint(str(source), tmp_path / "packed", experts=expert_dtype, rounding="nearest")
    for implementation in ("grouped_mm", "auto"):
        arithmetic = {"experts_implementation": implementation}
        on_load = token_by_token(source, IDS, expert_dtype=expert_dtype, **arithmetic)
        packed = token_by_token(tmp_path / "packed", IDS, **arithmetic)
        if (
            implementation == "grouped_mm"
        ):  # on the way to a kernel gate and up are one matrix or two
            assert torch.equal(on_load, packed)
        else:
            assert distance(on_load, packed) < 1e-4


@pytest.mark.parametrize(("expert_dtype", "bits"), [("int4", 4.5), ("int8", 8), ("fp8", 8)])
def test_slots_take_the_packed_bytes_and_the_report_says_so(source, expert_dtype, bits):
    with MoE(source, host_memory="100%", expert_dtype=expert_dtype, **ON_DEMAND) as moe:
        moe.generate(IDS, max_new_tokens=2, do_sample=False)
        report = moe.report()
    host = report.tiers[0]
    num_weights, num_rows = 3 * 256 * 128, 256 + 256
    scales = 0 if expert_dtype == "int4" else 4 * num_rows
    assert host.capacity_bytes == host.capacity * (num_weights * bits / 8 + scales)
    assert report.experts.startswith(expert_dtype)
    assert report.bytes_read == (report.prefill.misses + report.decode.misses) * num_weights * 2


def test_experts_stored_transposed_are_packed_along_their_inputs(tmp_path):
    """gpt-oss: fused, transposed, with biases that stay as they are."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = SMALL | {
        "hidden_size": 256, "intermediate_size": 128, "num_local_experts": 4, "head_dim": 16,
        "num_experts_per_tok": 2, "initializer_range": 0.1,
    }  # fmt: skip
    GptOssForCausalLM(GptOssConfig(**sizes)).bfloat16().save_pretrained(tmp_path)
    plain = token_by_token(tmp_path)
    near = token_by_token(tmp_path, expert_dtype="int8")
    assert 0 < (near - plain).norm() < 0.15 * plain.norm()
    unpacked = token_by_token(tmp_path, expert_dtype="int8", experts_implementation="grouped_mm")
    assert distance(near, unpacked) < 1e-4


def test_routing_may_weigh_what_goes_into_packed_experts(tmp_path):
    tiny_model(architectures_in("llama4")[-1]).save_pretrained(tmp_path)
    found = token_by_token(tmp_path, expert_dtype="int8")
    unpacked = token_by_token(tmp_path, expert_dtype="int8", experts_implementation="grouped_mm")
    assert distance(found, unpacked) < 1e-4


def test_what_cannot_be_packed_on_load_is_refused(folder, tiny_checkpoint, tmp_path):
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        MoE(folder, expert_dtype="int8")
    with pytest.raises(ConfigError, match="expected one of: None, int4, int8, fp8"):
        MoE(tiny_checkpoint, expert_dtype="int3")
    conftest.make_model(hidden_size=36, moe_intermediate_size=20).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no expert has a weight that int4 fits"):
        MoE(tmp_path, expert_dtype="int4")


# weights as they are


@torch.no_grad()
def test_kernels_are_near_the_bits_of_stock_and_with_wrong_experts_are_not(source, monkeypatch):
    for ids, host_memory in ((IDS, "50%"), (torch.arange(3, 3 + 72).view(6, 12), "20%")):
        exact = token_by_token(source, ids, host_memory=host_memory, exact=True)
        with MoE(source, dtype="float32", host_memory=host_memory) as moe:
            assert distance(logits_of_steps(moe.model, ids), exact) < 1e-4
            assert moe.report().experts == "as stored, fast"
    compute = FusedWork.compute

    def exchanged(self: Any, expert_idxs: list[int], slot_ids: list[int]) -> None:
        compute(self, expert_idxs, slot_ids[::-1])

    monkeypatch.setattr(FusedWork, "compute", exchanged)
    assert distance(token_by_token(source), token_by_token(source, exact=True)) > 0.1
