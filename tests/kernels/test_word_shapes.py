"""Shapes of packed integers: several widths side by side, and what no shape tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.errors import CheckpointError
from moe_infinity.formats.methods import find_format
from moe_infinity.kernels.word_shapes import Width, measure_gptq, measure_ints
from tests.checkpoint.test_formats import stored, values_of
from tests.quantization_configs import INT4, compressed_tensors_config
from tests.quantized_checkpoints import pack_ints

EXPERTS = Width(4, 32)
ATTENTION = Width(8, -1)
ROWS_96 = {"values": (96, 8), "scale": (96, 2)}  # 64 columns of 4 bits, or 32 of 8


@pytest.mark.parametrize(
    ("shapes", "widths", "expected"),
    [
        (ROWS_96, [EXPERTS, ATTENTION], ((96, 64), (1, 32))),
        ({"values": (96, 8), "scale": (96, 1)}, [EXPERTS, ATTENTION], ((96, 32), (1, 32))),
        (ROWS_96, [Width(4, 32), Width(8, 16)], None),  # both fit
        (ROWS_96 | {"zeros": (12, 2)}, [Width(4, 32), Width(8, 16)], ((96, 64), (1, 32))),
        (ROWS_96 | {"zeros": (24, 2)}, [Width(4, 32), Width(8, 16)], ((96, 32), (1, 16))),
        (ROWS_96, [Width(4, 128)], None),
        (ROWS_96, [Width(4, -1)], None),
        (ROWS_96, [Width(4), Width(4)], ((96, 64), (1, 32))),
        ({"values": (96, 24), "scale": (96, 2)}, [Width(4, 128)], None),  # 128 and 64 of 192
        ({"values": (96, 8), "scale": (96, 1)}, [Width(4, 128)], ((96, 64), (1, 64))),
        ({"values": (96, 0), "scale": (96, 0)}, [EXPERTS], None),
        ({"values": (96, 8), "scale": ()}, [EXPERTS], None),
        (ROWS_96 | {"groups": (64,)}, [EXPERTS], None),
        (ROWS_96 | {"groups": (64,)}, [Width(4, 32, True)], ((96, 64), None)),
        (ROWS_96 | {"groups": (32,)}, [Width(4, 32, True)], None),
        ({"values": (96, 8), "scale": (96, 1), "groups": (64,)}, [Width(4, -1, True)],
         ((96, 64), (1, 64))),
    ],
)  # fmt: skip
def test_integers_have_the_one_width_that_fits(shapes, widths, expected):
    assert measure_ints(shapes, widths) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ((16, 64), (1, 32))),
        ({"zeros": (2, 4)}, ((16, 32), None)),  # of 8 bits: no size fits, the index tells
        ({"zeros": (2, 3)}, None),  # 6 bits
        ({"zeros": (2, 0)}, None),
        ({"scale": (2, 0)}, None),
        ({"scale": (2, 12)}, None),
        ({"scale": (3, 16)}, None),
        ({"groups": (32,)}, None),
    ],
)
def test_zeros_tell_the_bits_of_gptq(changes, expected):
    columns = 32 if changes.get("zeros") == (2, 4) else 64
    shapes: Any = {"values": (8, 16), "zeros": (2, 2), "scale": (2, 16), "groups": (columns,)}
    assert measure_gptq(shapes | changes, {32}, is_in_order=True) == expected


def test_an_index_that_was_never_written_is_refused():
    """compressed-tensors begins with -1 for every column."""
    config = compressed_tensors_config("pack-quantized", **INT4 | {"actorder": "group"})
    parts = pack_ints(torch.randn(16, 64), is_symmetric=True, has_act_order=True)
    tensors = {f"a{suffix}": part for suffix, part in parts.items()}
    (weight,) = find_format(config).group(stored(tensors)).values()
    assert isinstance(weight, PackedTensor)
    weight.unpack(values_of(weight, tensors), torch.bfloat16)
    tensors["a.weight_g_idx"].fill_(-1)
    with pytest.raises(CheckpointError, match="g_idx"):
        weight.unpack(values_of(weight, tensors), torch.bfloat16)
