"""How the parameters of one expert lie in a slot."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import DTYPE_BYTES, PARAM_ALIGNMENT, ExpertKey, ExpertLayout

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)
parameters = st.lists(
    st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))), min_size=1, max_size=5
)


def layout_of(params: list[tuple[tuple[int, ...], str]]) -> ExpertLayout:
    return ExpertLayout.of({f"param_{i}": param for i, param in enumerate(params)})


@settings(max_examples=50)
@given(params=parameters)
def test_parameters_are_aligned_disjoint_and_inside_the_slot(params):
    layout = layout_of(params)
    end = 0
    for spec in layout.params:
        assert spec.offset % PARAM_ALIGNMENT == 0
        assert end <= spec.offset < end + PARAM_ALIGNMENT, "no gap but alignment"
        end = spec.offset + spec.num_bytes
    assert end <= layout.slot_bytes < end + PARAM_ALIGNMENT
    assert layout.slot_bytes % PARAM_ALIGNMENT == 0, "the next slot is aligned too"


@settings(max_examples=50)
@given(params=parameters)
def test_a_layout_keeps_names_shapes_dtypes_and_their_order(params):
    layout = layout_of(params)
    assert [spec.name for spec in layout.params] == [f"param_{i}" for i in range(len(params))]
    assert [(spec.shape, spec.dtype) for spec in layout.params] == params


def test_sizes_are_those_of_the_weights_and_of_the_weights_aligned():
    layout = ExpertLayout.of(
        {
            "gate_up_proj": ((6, 5), "bfloat16"),  # 60 bytes, 64 aligned
            "gate_up_proj_bias": ((16,), "float32"),  # 64 bytes
            "down_proj": ((5, 3), "float64"),  # 120 bytes, 128 aligned
        }
    )
    assert [spec.num_bytes for spec in layout.params] == [60, 64, 120]
    assert [spec.offset for spec in layout.params] == [0, 64, 128]
    assert layout.num_bytes == 60 + 64 + 120
    assert layout.slot_bytes == 64 + 64 + 128


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_size_of_a_dtype_is_torchs(dtype):
    torch = pytest.importorskip("torch")
    (spec,) = ExpertLayout.of({"weight": ((3, 7), dtype)}).params
    assert spec.num_bytes == prod(spec.shape) * getattr(torch, dtype).itemsize


def test_a_key_is_a_position_in_a_table_of_layers_and_experts():
    assert ExpertKey(moe_layer_idx=2, expert_idx=5) == (2, 5)
