"""Packed experts that kernels of a device read, and those that they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_infinity.experts import ParamSpec
from moe_infinity.gpu.kernels.packed_matrix import (
    PackedMatrix,
    any_matrix,
    splits_words,
)
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton.slot_mlp import SlotMlp, slot_mlp
from moe_infinity.layout import WeightLayout
from tests.kernels.stored_weights import StoredExperts, layout_of, make_weight

pytestmark = pytest.mark.arithmetic

SILU = Activation("silu")


def described(up: Any, down: Any, *, is_interleaved: bool = False) -> SlotMlp | None:
    mlp = slot_mlp(up, down, activation=SILU, is_interleaved=is_interleaved, matrix_of=any_matrix)
    return None if mlp is None or splits_words(mlp) else mlp


@pytest.mark.parametrize(
    ("kind", "role", "shape"),
    [("gptq 8 any", "groups", (15,)), ("gptq 8", "scale", (2, 16)), ("awq 8", "zeros", (1, 3)),
     ("gptq_v2 8", "values", (16, 3)), ("awq 8", "values", (2, 24)), ("awq 8", "scale", (48,))],
)  # fmt: skip
def test_words_of_other_shapes_are_refused(kind, role, shape):
    up, gate, down = StoredExperts(kind, 16, 24, splits=True).described
    assert described([up, gate], down) is not None
    changed: dict[str, Any] = {role: replace(up.parts[role], shape=shape)}
    other = replace(up, **changed)
    assert described([other, gate], down) is None


def test_blocks_that_end_within_a_word_are_refused():
    values = ParamSpec("", (16, 16), "float8_e4m3fn", 0)
    up, down = (
        WeightLayout(
            "fp8",
            (16, 16),
            values,
            ParamSpec("", (1, 16 // columns), "float32", 256),
            block=(16, columns),
        )
        for columns in (4, 2)
    )
    assert described([up, up], up) is not None
    assert described([up, up], down) is None


@pytest.mark.parametrize("name", ["q5_k", "iq4_xs"])
def test_blocks_that_no_kernel_of_a_device_reads_are_refused(name):
    up, gate, down = StoredExperts(f"ggml {name}", 256, 256, splits=True).described
    assert described([up, gate], down) is None


def test_gate_and_up_in_different_blocks_are_refused():
    up, _, down = StoredExperts("ggml q4_k", 256, 256, splits=True).described
    gate = StoredExperts("ggml q6_k", 256, 256, splits=True).described[0]
    assert described([up, up], down) is not None
    assert described([gate, up], down) is None


def test_mxfp4_of_half_a_group_is_refused():
    up, gate, down = StoredExperts("mxfp4", 32, 64, splits=True).described
    assert described([up, gate], down) is not None
    for width, expert_width in ((40, 64), (32, 72)):  # with the parts of 32 and 64 columns
        up, gate, down = StoredExperts("mxfp4", width, expert_width, splits=True).described
        assert described([up, gate], down) is None


@pytest.mark.parametrize("kind", ["int8", "fp8 rows"])
def test_rows_that_end_within_a_word_are_refused(kind):
    up, gate, down = StoredExperts(kind, 16, 24, splits=True).described
    assert described([up, gate], down) is not None
    up, gate, down = StoredExperts(kind, 18, 24, splits=True).described
    assert described([up, gate], down) is None


def test_groups_of_unequal_length_are_refused():
    up, gate, down = StoredExperts("gptq 8 any", 16, 24, splits=True).described
    assert up.zeros is not None
    assert up.scale is not None
    zeros, scale = replace(up.zeros, shape=(3, 3)), replace(up.scale, shape=(3, 24))
    other = replace(up, zeros=zeros, scale=scale)
    assert described([other, gate], down) is None


def test_one_group_needs_no_index():
    (up, down) = StoredExperts("gptq 16 any", 16, 16).described
    mlp = described([up], down)
    assert mlp is not None
    assert isinstance(mlp.gate, PackedMatrix)
    assert (mlp.gate.groups, mlp.gate.chunk) == (None, 8)


@pytest.mark.parametrize(("expert_width", "is_interleaved"), [(12, False), (8, True)])
def test_a_word_of_awq_is_not_split_between_gate_and_up(expert_width, is_interleaved):
    whole = make_weight("awq 8", 2 * expert_width, 16)[0]
    parts = {
        role: ParamSpec(role, tuple(t.shape), str(t.dtype)[6:], 0) for role, t in whole.items()
    }
    up = layout_of("awq 8", parts)
    down = WeightLayout.plain(ParamSpec("", (16, expert_width), "bfloat16", 0))
    assert described([up], down, is_interleaved=is_interleaved) is None
