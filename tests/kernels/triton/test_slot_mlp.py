"""Experts that kernels are given, and those that they are not."""

from __future__ import annotations

import pytest

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton.slot_mlp import slot_mlp
from moe_infinity.layout import WeightLayout
from tests.kernels.stored_weights import StoredExperts

SILU = Activation("silu")


def test_what_kernels_do_not_read_is_refused():
    gate_up, down = StoredExperts("bf16", 160, 192).described
    assert slot_mlp([gate_up], down, activation=SILU) is not None
    assert slot_mlp([gate_up], down, activation=Activation(is_gated=False)) is None
    assert slot_mlp([gate_up], gate_up, activation=SILU) is None
    assert slot_mlp([down], down, activation=SILU) is None
    assert slot_mlp([gate_up] * 3, down, activation=SILU) is None
    assert slot_mlp([gate_up, gate_up], down, activation=SILU) is None
    assert slot_mlp([gate_up], down, activation=SILU, biases=[gate_up.values] * 3) is None
    for part in (
        ParamSpec("", (384, 160), "float32", 0),
        ParamSpec("", (384, 160), "bfloat16", 8),
    ):
        other = WeightLayout("bf16", (384, 160), part)
        assert slot_mlp([other], down, activation=SILU) is None


@pytest.mark.parametrize("kind", ["int8", "fp8 rows", "mxfp4", "gptq 32"])
def test_packed_weights_are_refused(kind):
    *up, down = StoredExperts(kind, 64, 64, splits=True).described
    assert slot_mlp(up, down, activation=SILU) is None


def test_strides_of_a_weight_that_lies_transposed_are_exchanged():
    gate_up, down = StoredExperts("bf16 transposed", 160, 96).described
    mlp = slot_mlp([gate_up], down, activation=SILU, is_interleaved=True)
    assert mlp is not None
    assert mlp.up is not None
    for half, first in ((mlp.gate, 0), (mlp.up, 1)):
        assert (half.first_row, half.row_step) == (first, 2)
        assert (half.row_stride, half.column_stride) == (1, 192)
    assert (mlp.down.row_stride, mlp.down.column_stride) == (1, 160)
