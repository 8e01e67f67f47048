"""What quantization_config says in other words than usual."""

from __future__ import annotations

from typing import Any

import pytest

from moe_infinity import UnsupportedModelError
from moe_infinity.formats.methods import find_format

QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def in_blocks(block: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
    group = {"weights": weights, "format": "float-quantized"}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "usual"),
    [
        ({"quant_method": "FP8", "fmt": "E4M3"}, {"quant_method": "fp8"}),
        ({"quant_method": "fp8", "fmt": "float8_e4m3"}, {"quant_method": "fp8"}),
        (
            {"quant_method": "modelopt_fp4", "quant_algo": "W4A8_NVFP4_FP8"},
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        ),
        (
            {"quant_method": "compressed_tensors", "kv_cache_scheme": {"num_bits": 8}},
            {"quant_method": "compressed-tensors", "config_groups": {}},
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": None},
            {"quant_method": "compressed-tensors", "config_groups": {}},
        ),
        *(
            (
                {"quant_method": method, "bits": 4, "zero_point": False},
                {"quant_method": "awq", "bits": 4},
            )
            for method in ("awq", "awq_marlin")
        ),
        ({"quant_method": "gptq_marlin", "bits": 4}, {"quant_method": "gptq", "bits": 4}),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [QUARK_FP8]}},
            {"quant_method": "quark", "global_quant_config": {"weight": QUARK_FP8}},
        ),
        (in_blocks("128x128"), in_blocks([128, 128])),
        (in_blocks([128, 128]) | {"transform_config": {}}, in_blocks([128, 128])),
    ],
)
def test_other_ways_to_say_the_same_are_taken(config, usual):
    shapes: Any = {"values": (256, 384), "scale": (2, 3)}
    found, expected = find_format(config).weights, find_format(usual).weights
    assert [each.name for each in found] == [each.name for each in expected]
    for each, other in zip(found, expected, strict=True):
        if each.kind == "fp8":
            assert each.measure(shapes) == other.measure(shapes)


def test_weights_that_were_rotated_for_rotated_inputs_are_refused():
    rotation = {"type": "hadamard", "apply": [{"targets": ["down_proj"], "location": "input"}]}
    config = in_blocks([128, 128]) | {"transform_config": {"config_groups": {"R4": rotation}}}
    with pytest.raises(UnsupportedModelError, match="transform_config"):
        find_format(config)
