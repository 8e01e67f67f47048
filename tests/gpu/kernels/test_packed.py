"""Packed experts, read by Triton's kernels and by their reference, against the definition in
float64 with weights of kernels/unpack.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_infinity.experts import ExpertKey, ParamSpec
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.kernels.packed_matrix import PackedMatrix, any_matrix
from moe_infinity.kernels.triton.slot_mlp import SlotMlp, slot_mlp
from moe_infinity.layout import WeightLayout
from tests.kernels.stored_weights import layout_of
from tests.kernels.triton.slot_experts import (
    DEVICE,
    OF_GPT_OSS,
    REFERENCE,
    SILU,
    TRITON,
    inputs,
    routing,
    slot_moe,
)
from tests.kernels.triton.slot_experts import Experts as PlainExperts

from moe_infinity.gpu.kernels import resolve  # isort: skip
from moe_infinity.gpu.kernels.packed import any_tile  # isort: skip

PACKED: Any = SimpleNamespace(
    compute_pairs=partial(TRITON.compute_pairs, load=any_tile), sum_pairs=TRITON.sum_pairs
)
KERNELS = [pytest.param(REFERENCE, id="reference"), pytest.param(PACKED, id="triton")]
Experts = partial(PlainExperts, matrix_of=any_matrix)
KINDS = [
    "bf16", "f32 transposed", "int8", "int4 32", "int4 24", "int4 128", "int4 zeros 32",
    "int4 None", "fp8 blocks", "fp8 rows", "fp8 exponents", "mxfp4", "pairs", "nvfp4",
    "nvfp4_divided", "gptq 32", "gptq 32 any", "gptq_v2 32", "gptq_v2 16 any", "awq 32", "awq 4",
    "ggml q8_0", "ggml q4_k", "ggml q6_k", "ggml mxfp4",
]  # fmt: skip

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def same_numbers(monkeypatch):
    torch.manual_seed(0)
    if DEVICE == "cpu":
        monkeypatch.setattr(resolve, "FILL_PROGRAMS", 2)  # they run one after the other


@pytest.mark.sample(5)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight_computes_its_definition(kernels, kind, num_tokens):
    width = {"int4 24": 120, "int4 128": 128, "ggml q4_k": 512, "ggml q6_k": 256}.get(kind, 160)
    expert_width = {"int4 128": 128, "ggml q4_k": 256, "ggml q6_k": 256}.get(kind, 96)
    experts = Experts(kind, width, expert_width, splits=kind == "int4 zeros 32")
    x, (index, weights) = inputs(kind, num_tokens, width), routing(num_tokens, 2)
    found = experts.compute(kernels, x, index, weights)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_gpt_oss_has_biases_and_rows_of_gate_and_up_in_turn(kernels):
    experts = Experts("mxfp4", 64, 96, act=OF_GPT_OSS, is_interleaved=True, has_bias=True)
    x, (index, weights) = inputs("mxfp4", 2, 64), routing(2, 4)
    found = experts.compute(kernels, x, index, weights.bfloat16())
    assert experts.largest_error(found, x, index, weights.bfloat16()) < 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("kind", "width", "expert_width"),
    [("int8", 36, 20), ("int4 None", 8, 8), ("int4 8", 72, 40), ("fp8 rows", 36, 20),
     ("gptq 8", 24, 40), ("gptq 8 any", 24, 8), ("awq 8", 24, 40), ("awq 8", 8, 8)],
)  # fmt: skip
def test_rows_of_a_weight_may_have_any_length(kernels, kind, width, expert_width):
    experts = Experts(kind, width, expert_width)
    x, (index, weights) = inputs(kind, 2, width), routing(2, 3)
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "kind", ["int8", "fp8 blocks", "int4 zeros 32", "mxfp4", "gptq 32", "gptq 32 any", "awq 32"]
)
def test_a_pair_without_an_expert_adds_nothing(kernels, kind):
    """Nothing is read at address 0: a kernel that does would end the test's process."""
    experts = Experts(kind, 64, 32, has_bias=True)
    x, (index, weights) = inputs(kind, 3, 64), routing(3, 2)
    index[0, 1] = -1
    index[2] = -1
    weights[2] = torch.nan  # what is not computed is not multiplied by either
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found[:2], x[:2], index[:2], weights[:2]) < 1
    assert (found[2] == 0).all()


@pytest.mark.sample(4)
@pytest.mark.grid
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "kind",
    ["int4 32", "fp8 blocks", "int8", "mxfp4", "gptq 32 any",
     pytest.param("awq 32", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_tolerance_rejects_what_is_wrong(kernels, kind):
    experts = Experts(kind, 64, 64, splits=True)
    x, (index, weights) = inputs(kind, 2, 64), routing(2, 3)

    def error() -> float:
        found = experts.compute(kernels, x, index, weights)
        return experts.largest_error(found, x, index, weights)

    assert error() < 1
    mlp = experts.mlp
    assert mlp.up is not None
    wrong: list[SlotMlp] = [replace(mlp, gate=mlp.up, up=mlp.gate), replace(mlp, gate=mlp.up)]
    scale = mlp.up.weight.scale
    for name in ("gate", "down"):
        matrix = getattr(mlp, name)
        other_scale = replace(matrix.weight, scale=scale)
        wrong.append(replace(mlp, **{name: replace(matrix, weight=other_scale)}))
    for experts.mlp in wrong:
        assert error() > 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_float8_value_is_read(kernels):
    """Of 256 rows with one value each, beside zeros, times what a row of ones gives."""
    up, ones, numbers = torch.zeros(8, 256), torch.zeros(256, 4), torch.zeros(256, 4).byte()
    up[[0, 4], 0] = ones[:, 0] = 1
    numbers[:, 0] = torch.arange(256)
    stored = [up, ones, torch.ones(4), numbers]
    slot = torch.cat([t.view(torch.uint8).flatten() for t in stored])
    gate_up = WeightLayout.plain(ParamSpec("", (8, 256), "float32", 0))
    plain = WeightLayout.plain(ParamSpec("", (256, 4), "float32", 8192))
    parts = {
        "scale": ParamSpec("", (1, 1), "float32", 12288),
        "values": ParamSpec("", (256, 4), "float8_e4m3fn", 12304),
    }
    packed = layout_of("fp8", parts)
    experts = Experts("f32", 1, 1, num=1)
    experts.slots = slot[None]
    found = []
    for down in (plain, packed):
        mlp = slot_mlp([gate_up], down, activation=SILU, matrix_of=any_matrix)
        assert mlp is not None
        experts.mlp = mlp
        one = torch.zeros(1, 1, dtype=torch.int64)
        found.append(experts.compute(kernels, torch.ones(1, 256), one, torch.ones(1, 1))[0])
    expected = numbers[:, 0].view(torch.float8_e4m3fn).float() * found[0]
    torch.testing.assert_close(found[1], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_a_step_gives_the_same_bits_whatever_is_cached(num_slots):
    experts = Experts("bf16", 48, 32, num=6)
    x, (index, weights) = inputs("bf16", 2, 48), routing(2, 3, 6)
    resident = experts.compute(PACKED, x, index, weights)
    host = experts.slots.pin_memory() if DEVICE == "cuda" else experts.slots
    slots = torch.zeros(num_slots, host.shape[1], dtype=torch.uint8, device=DEVICE)
    table = DeviceTable(slots, num_layers=1, num_experts=6, max_pairs=6)
    table.upload_residency({}, {ExpertKey(0, e): host[e].data_ptr() for e in range(6)})
    x, index, weights = (t.to(DEVICE) for t in (x, index, weights))
    for _ in range(2):
        pointers = resolve.resolve(table, 0, index)
        resolve.fill(table, 6)
        found = slot_moe(PACKED, experts.mlp, x, index, weights, pointers)
        assert torch.equal(found.cpu(), resident)


@pytest.mark.parametrize("group", [-1, 4])
def test_an_index_beyond_the_groups_is_the_nearest_group(group):
    """Where the host unpacks it is an error; a kernel can only stay inside the slot."""
    experts, found = Experts("gptq_v2 8 any", 32, 32, num=1), []
    x, (index, weights) = inputs("gptq", 1, 32), routing(1, 1, 1)
    matrix = experts.mlp.gate
    assert isinstance(matrix, PackedMatrix)
    assert matrix.groups is not None
    groups = experts.slots[0, matrix.groups.offset :][: 4 * 32].view(torch.int32)
    for stored in (min(max(group, 0), 3), group):
        groups[5] = stored
        found.append(experts.compute(PACKED, x, index, weights))
    assert torch.equal(*found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["int4 32", "awq 8"])
def test_many_tokens_have_larger_tiles(kind, monkeypatch):
    monkeypatch.setattr(TRITON, "MANY_ROWS", 32)
    monkeypatch.setattr(TRITON, "MANY_PAIRS", 100)
    experts = Experts(kind, 64, 96, num=5)
    x, (index, weights) = inputs(kind, 90, 64), routing(90, 2, 3)
    found = experts.compute(PACKED, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1
