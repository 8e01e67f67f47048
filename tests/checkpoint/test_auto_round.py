"""AutoRound: which of its packing formats have which layout, and weights packed by its package."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.formats.methods import find_format
from tests.checkpoint.test_formats import stored, values_of
from tests.slow_unpack import same_bits

W4 = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
MXFP4 = W4 | {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "act_bits": 4}


def names(config: dict[str, Any]) -> list[str]:
    return [each.name for each in find_format(config).weights]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["gptq"]),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, ["gptq"]),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, ["gptq_v2"]),
        ({"packing_format": "auto_round:auto_gptq", "backend": "auto"}, ["gptq"]),
        ({"packing_format": "auto_round"}, ["gptq_v2"]),
        ({"packing_format": "auto_round:gptqmodel"}, ["gptq_v2"]),
        ({"packing_format": "auto_round:auto_awq"}, ["awq"]),
        ({"extra_config": {"lm_head": {"bits": 8}, "a": {"bits": 2, "group_size": 64}}}, ["gptq"]),
        ({"extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}, "act_bits": 16}, ["gptq"]),
    ],
)
def test_a_packing_format_is_that_of_another_method(changes, expected):
    assert names(W4 | changes) == expected


def test_floats_are_stored_as_by_other_methods():
    assert names(MXFP4) == names({"quant_method": "compressed-tensors"})
    fp8 = {"bits": 8, "data_type": "fp", "group_size": [128, 128], "fmt": "e4m3"}
    assert names(W4 | fp8) == names({"quant_method": "fp8"})
    shapes: Any = {"values": (192, 128), "scale": (2, 1)}  # a block of 128 rows, and one of 64
    measured = [
        each.measure(shapes) for each in find_format(W4 | fp8).weights if "fp8" in each.kind
    ]
    assert measured[0] == ((192, 128), (128, 128))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"packing_format": "mlx"}, "packing_format 'mlx'"),
        ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "nvfp4_e5m3"),
        ({"bits": 3}, "bits 3"),
        ({"extra_config": {"lm_head": {"bits": 5}}}, "of lm_head with bits 5"),
        ({"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}},
         "of a with bits 8"),
        ({"packing_format": "auto_round", "data_type": "mx_int"}, "data_type 'mx_int'"),
        ({"extra_config": {"a": {"data_type": "mx_fp"}}}, "of a with data_type 'mx_fp'"),
        ({"act_bits": 8}, "act_bits 8"),
        ({"rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config"),
        ({"bits": 8, "data_type": "fp", "fmt": "e5m2"}, "e5m2"),
        ({"bits": None}, "malformed"),
        ({"extra_config": {"lm_head": None}}, "malformed"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        find_format(W4 | changes)


def packed_by_auto_round(name: str, bits: int, group: int, *, is_symmetric: bool) -> Any:
    """A linear layer of 96 columns, as the package writes it."""
    reason = "auto-round is not installed: compared with the slow definition only"
    pytest.importorskip("auto_round_extension.torch.qlinear_torch", reason=reason)
    package = importlib.import_module("auto_round.export.export_to_autoround.export")
    torch.manual_seed(0)
    linear = nn.Linear(96, 64, bias=False)
    num_groups = -(-96 // group)
    scales = torch.rand(64, num_groups) / 100 + 0.01
    zeros: Any = 2 ** (bits - 1)
    if not is_symmetric:
        zeros = torch.randint(1, 2**bits, (64, num_groups))
    kind: Any = package.dynamic_import_quant_linear_for_packing(name, bits, group, is_symmetric)
    if "awq" in name:
        transposed = zeros if is_symmetric else zeros.t().contiguous()
        return kind.from_linear(linear, bits, group, scales=scales.t(), zeros=transposed)
    packed = kind(bits, group, 96, 64, bias=False, weight_dtype=torch.float32)
    packed.device = "cpu"
    packed.pack(linear, scales, zeros, None, device="cpu")
    return packed


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("name", "bits", "group"),
    [("auto_round:auto_gptq", bits, group) for bits in (2, 4, 8) for group in (32, 64, 96)]
    + [("auto_round", 4, 64), ("auto_round:gptqmodel", 8, 32), ("auto_round:auto_awq", 4, 32)],
)
def test_weights_are_those_of_the_package(name, bits, group, is_symmetric):
    """Groups of 64 of 96 columns: the last is shorter."""
    packed = packed_by_auto_round(name, bits, group, is_symmetric=is_symmetric)
    parts = {f"a.{suffix}": tensor for suffix, tensor in packed.state_dict().items()}
    config = W4 | {"packing_format": name, "bits": bits, "group_size": group}
    (weight,) = find_format(config).group(stored(parts)).values()
    assert isinstance(weight, PackedTensor)
    found = weight.unpack(values_of(weight, parts), torch.float16)
    if "awq" not in name:
        packed.g_idx = torch.arange(96) // group  # without it, their own code wants whole groups
    expected = packed(torch.eye(96, dtype=torch.float16))
    assert same_bits(found, expected.view(96, 64).t().contiguous())


def test_a_group_size_that_no_scales_have_is_refused():
    """No index tells the groups: 96 columns with two scales may be 64 and 32, or 48 and 48."""
    packed = stored(
        {
            "a.qweight": torch.zeros(12, 16, dtype=torch.int32),
            "a.qzeros": torch.zeros(2, 2, dtype=torch.int32),
            "a.scales": torch.zeros(2, 16).half(),
        }
    )
    for size in (64, 48):
        (weight,) = find_format(W4 | {"group_size": size}).group(packed).values()
        assert isinstance(weight, PackedTensor)
        assert weight.block == (1, size)
    with pytest.raises(CheckpointError, match="do not fit"):
        find_format(W4).group(packed)
    both = W4 | {"group_size": 64, "extra_config": {"a": {"group_size": 48}}}
    with pytest.raises(CheckpointError, match="do not fit"):
        find_format(both).group(packed)
