"""Experts that kernels of a device are told of, and those that they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_infinity.checkpoint.layout import StoredPart, StoredWeight
from moe_infinity.kernels.activation import Activation
from moe_infinity.kernels.cuda.slot_mlp import slot_mlp
from tests.kernels.stored_weights import StoredExperts, make_weight

pytestmark = pytest.mark.arithmetic

SILU = Activation("silu")


def test_what_kernels_do_not_read_is_refused():
    gate_up, down = StoredExperts("bf16", 160, 192).described
    assert slot_mlp([gate_up], down, activation=Activation(is_gated=False)) is None
    assert slot_mlp([gate_up], gate_up, activation=SILU) is None
    assert slot_mlp([down], down, activation=SILU) is None
    assert slot_mlp([gate_up] * 3, down, activation=SILU) is None
    assert slot_mlp([gate_up, gate_up], down, activation=SILU) is None
    assert slot_mlp([gate_up], down, activation=SILU, biases=[gate_up.parts[""]] * 3) is None
    for part in (
        StoredPart(0, torch.float32, (384, 160)),
        StoredPart(8, torch.bfloat16, (384, 160)),
    ):
        other = StoredWeight("bf16", (384, 160), {"": part})
        assert slot_mlp([other], down, activation=SILU) is None


@pytest.mark.parametrize(
    ("kind", "role", "shape"),
    [("gptq 8 any", "g_idx", (15,)), ("gptq 8", "scales", (2, 16)), ("awq 8", "qzeros", (1, 3)),
     ("gptq_v2 8", "qweight", (16, 3)), ("awq 8", "qweight", (2, 24)), ("awq 8", "scales", (48,))],
)  # fmt: skip
def test_words_of_other_shapes_are_refused(kind, role, shape):
    up, gate, down = StoredExperts(kind, 16, 24, splits=True).described
    assert slot_mlp([up, gate], down, activation=SILU) is not None
    parts = {**up.parts, role: replace(up.parts[role], shape=shape)}
    assert slot_mlp([replace(up, parts=parts), gate], down, activation=SILU) is None


def test_blocks_that_end_within_a_word_are_refused():
    values = StoredPart(0, torch.float8_e4m3fn, (16, 16))
    up, down = (
        StoredWeight(
            "fp8",
            (16, 16),
            {"weight": values, "scale": StoredPart(256, torch.float32, (1, 16 // columns))},
            block=(16, columns),
        )
        for columns in (4, 2)
    )
    assert slot_mlp([up, up], up, activation=SILU) is not None
    assert slot_mlp([up, up], down, activation=SILU) is None


def test_mxfp4_of_half_a_group_is_refused():
    up, gate, down = StoredExperts("mxfp4", 32, 64, splits=True).described
    assert slot_mlp([up, gate], down, activation=SILU) is not None
    for width, expert_width in ((40, 64), (32, 72)):  # with the parts of 32 and 64 columns
        up, gate, down = StoredExperts("mxfp4", width, expert_width, splits=True).described
        assert slot_mlp([up, gate], down, activation=SILU) is None


@pytest.mark.parametrize("kind", ["int8", "fp8 rows"])
def test_rows_that_end_within_a_word_are_refused(kind):
    up, gate, down = StoredExperts(kind, 16, 24, splits=True).described
    assert slot_mlp([up, gate], down, activation=SILU) is not None
    up, gate, down = StoredExperts(kind, 18, 24, splits=True).described
    assert slot_mlp([up, gate], down, activation=SILU) is None


def test_groups_of_unequal_length_are_refused():
    up, gate, down = StoredExperts("gptq 8 any", 16, 24, splits=True).described
    unequal = {"qzeros": (3, 3), "scales": (3, 24)}
    parts = {
        role: replace(part, shape=unequal.get(role, part.shape)) for role, part in up.parts.items()
    }
    assert slot_mlp([replace(up, parts=parts), gate], down, activation=SILU) is None


def test_one_group_needs_no_index():
    (up, down) = StoredExperts("gptq 16 any", 16, 16).described
    mlp = slot_mlp([up], down, activation=SILU)
    assert mlp is not None
    assert (mlp.gate.groups, mlp.gate.chunk) == (None, 8)


@pytest.mark.parametrize(("expert_width", "is_interleaved"), [(12, False), (8, True)])
def test_a_word_of_awq_is_not_split_between_gate_and_up(expert_width, is_interleaved):
    whole = make_weight("awq 8", 2 * expert_width, 16)[0]
    parts = {role: StoredPart(0, t.dtype, tuple(t.shape)) for role, t in whole.items()}
    up = StoredWeight("awq", (2 * expert_width, 16), parts)
    down = StoredWeight(
        "bf16", (16, expert_width), {"": StoredPart(0, torch.bfloat16, (16, expert_width))}
    )
    how = {"activation": SILU, "is_interleaved": is_interleaved}
    assert slot_mlp([up], down, **how) is None
