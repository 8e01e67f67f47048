"""Packed weights: which tensors belong together, and that unpacking gives the bits of the slow
definitions in tests/slow_unpack.py and of the libraries that define the formats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_infinity.checkpoint.headers import Extent, StoredTensor, read_headers
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.formats.methods import find_format
from moe_infinity.kernels import unpack
from tests.compressed_tensors_package import compressor, scheme_of
from tests.quantization_configs import compressed_tensors_config
from tests.quantized_checkpoints import CHECKPOINTS, build
from tests.slow_unpack import dequantized, numbers_of, same_bits, unpack_fp8, unpack_groups

BFLOAT16 = torch.bfloat16
STORED = {
    torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int8: "I8",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


@pytest.fixture(scope="module", params=CHECKPOINTS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory) -> Path:
    return build(name, tmp_path_factory.mktemp("packed") / "model")


@pytest.fixture(scope="module")
def plain(folder) -> dict[str, Tensor]:
    """The weights of `folder`, unpacked slowly."""
    return load_file(dequantized(folder, folder.parent / "plain") / "model.safetensors")


def quantization_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def packed_weights(folder: Path) -> dict[str, PackedTensor]:
    headers = read_headers([folder / "model.safetensors"])
    grouped = find_format(quantization_config(folder)).group(headers.tensors)
    return {name: t for name, t in grouped.items() if isinstance(t, PackedTensor)}


def stored(tensors: dict[str, Tensor]) -> dict[str, StoredTensor]:
    """As if read from a header."""
    return {
        name: StoredTensor(
            name, STORED[t.dtype], tuple(t.shape), Extent(Path("file"), 0, t.numel() * t.itemsize)
        )
        for name, t in tensors.items()
    }


def values_of(packed: PackedTensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {role: tensors[part.name] for role, part in packed.parts}


# Whole checkpoints


def test_parts_are_replaced_by_the_weights_they_stand_for(folder, plain):
    headers = read_headers([folder / "model.safetensors"])
    grouped = find_format(quantization_config(folder)).group(headers.tensors)
    assert {name: t.shape for name, t in grouped.items()} == {
        name: tuple(t.shape) for name, t in plain.items()
    }
    left_alone = [t for t in grouped.values() if isinstance(t, StoredTensor)]
    assert all(headers.tensors[t.name] is t for t in left_alone)
    assert {t.name.split(".")[-2] for t in left_alone} >= {"lm_head", "embed_tokens"}


def test_unpacking_gives_the_bits_of_the_slow_definition(folder, plain):
    tensors = load_file(folder / "model.safetensors")
    for name, packed in packed_weights(folder).items():
        weight = packed.unpack(values_of(packed, tensors), BFLOAT16)
        assert same_bits(weight, plain[name]), name


def test_a_packed_weight_is_smaller_than_in_bfloat16(name, folder, plain):
    has_8_bits = name.startswith(("fp8", "mxfp8", "int8", "gptq of 8", "auto-round"))
    largest = 0.65 if has_8_bits else 0.4  # of bfloat16, scales included
    for packed in packed_weights(folder).values():
        num_bytes = sum(part.extent.num_bytes for _, part in packed.parts)
        assert num_bytes <= largest * plain[packed.name].numel() * 2


def test_a_changed_value_changes_the_weight(folder, plain):
    """Otherwise comparing would prove less than it seems to."""
    tensors = load_file(folder / "model.safetensors")
    for packed in list(packed_weights(folder).values())[:3]:
        parts = values_of(packed, tensors)
        for role in parts.keys() - {"groups"}:
            wrong = parts[role].clone()
            last = (wrong.numel() // 2 + 1) * wrong.itemsize - 1  # its highest bits
            wrong.view(-1).view(torch.uint8)[last] ^= 0x11
            weight = packed.unpack(parts | {role: wrong}, BFLOAT16)
            assert not same_bits(weight, plain[packed.name]), role
        zeroed = {role: torch.zeros_like(part) for role, part in parts.items()}
        assert not same_bits(packed.unpack(zeroed, BFLOAT16), plain[packed.name])
        if not packed.is_stacked:
            continue
        swapped = {role: part.flip(0) for role, part in parts.items()}
        assert not same_bits(packed.unpack(swapped, BFLOAT16), plain[packed.name])


def test_experts_stacked_in_dim_0_unpack_one_by_one(folder, plain):
    tensors = load_file(folder / "model.safetensors")
    packed, tensors, expected = stacked_experts(folder, tensors, plain)
    whole = values_of(packed, tensors)
    assert packed.is_stacked
    assert packed.shape == expected.shape
    assert same_bits(packed.unpack(whole, BFLOAT16), expected)
    for expert_idx in (0, 5):
        one = {role: part[expert_idx : expert_idx + 1] for role, part in whole.items()}
        assert same_bits(packed.unpack(one, BFLOAT16), expected[expert_idx : expert_idx + 1])


def stacked_experts(
    folder: Path, tensors: dict[str, Tensor], plain: dict[str, Tensor]
) -> tuple[PackedTensor, dict[str, Tensor], Tensor]:
    """The down projections of layer 0, the tensors they are in, and their values. Where the
    checkpoint has a tensor per expert, they are stacked."""
    by_name = packed_weights(folder)
    first = next(t for name, t in by_name.items() if ".0.mlp.experts" in name and "down" in name)
    if first.is_stacked:
        return first, tensors, plain[first.name]
    names = [first.name.replace("experts.0", f"experts.{expert_idx}") for expert_idx in range(8)]
    parts = [values_of(by_name[name], tensors) for name in names]
    stacked = {
        part.name.replace("experts.0.", ""): torch.stack([values[role] for values in parts])
        for role, part in first.parts
    }
    (packed,) = find_format(quantization_config(folder)).group(stored(stacked)).values()
    assert isinstance(packed, PackedTensor)
    return packed, stacked, torch.stack([plain[name] for name in names])


@pytest.mark.parametrize("chunk_values", [1, 100, 5000])
def test_chunks_of_any_size_give_the_same_bits(folder, plain, chunk_values, monkeypatch):
    monkeypatch.setattr(unpack, "CHUNK_VALUES", chunk_values)
    tensors = load_file(folder / "model.safetensors")
    for packed in list(packed_weights(folder).values())[:3]:
        weight = packed.unpack(values_of(packed, tensors), BFLOAT16)
        assert same_bits(weight, plain[packed.name])


def test_blocks_cut_off_by_the_edge_are_where_the_config_says():
    """transformers 5.17 divides 192 rows with 2 scales into 2 times 96, whatever the config says;
    in DeepSeek's own kernels a block of 128 rows is followed by one of 64."""
    weight = torch.ones(192, 64).to(torch.float8_e4m3fn)
    parts = {"layer.weight": weight, "layer.weight_scale_inv": torch.tensor([[1.0], [2.0]])}
    grouped = find_format({"quant_method": "fp8", "weight_block_size": [128, 128]}).group(
        stored(parts)
    )
    packed = grouped["layer.weight"]
    assert isinstance(packed, PackedTensor)
    found = packed.unpack(values_of(packed, parts), BFLOAT16)
    assert found[:, 0].tolist() == [1.0] * 128 + [2.0] * 64
    slow = {".weight": weight, ".weight_scale_inv": parts["layer.weight_scale_inv"]}
    assert same_bits(found, unpack_fp8(slow, {"weight_block_size": [128, 128]}))


# Against compressed-tensors


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize(
    "name", [n for n, c in CHECKPOINTS.items() if "config_groups" in c[1] and "act-order" not in n]
)  # groups in any order are read by the package up to 0.12
def test_weights_are_those_of_compressed_tensors(name, tmp_path):
    config = CHECKPOINTS[name][1]
    theirs = compressor(config["format"])
    folder = build(name, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for packed in packed_weights(folder).values():
        stem = packed.name.removesuffix(".weight")
        state = {
            key.removeprefix(stem + "."): t
            for key, t in tensors.items()
            if key.startswith(stem + ".")
        }
        expected = theirs.decompress(state, scheme_of(config))["weight"].to(BFLOAT16)
        assert same_bits(packed.unpack(values_of(packed, tensors), BFLOAT16), expected)


# GPTQ


def gptq_parts(columns: int = 64, rows: int = 16, groups: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(0)
    low, high = -(2**31), 2**31
    return {
        "layer.qweight": torch.randint(low, high, (columns // 8, rows), dtype=torch.int32),
        "layer.qzeros": torch.randint(low, high, (groups, rows // 8), dtype=torch.int32),
        "layer.scales": torch.rand(groups, rows).half(),
        "layer.g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }


def unpack_gptq(tensors: dict[str, Tensor], **config: Any) -> Tensor:
    quantization = {"quant_method": "gptq", "bits": 4, **config}
    packed = find_format(quantization).group(stored(tensors))["layer.weight"]
    assert isinstance(packed, PackedTensor)
    return packed.unpack(values_of(packed, tensors), BFLOAT16)


def test_gptq_without_an_index_has_groups_in_order():
    tensors = gptq_parts()
    expected = unpack_gptq(tensors)
    del tensors["layer.g_idx"]
    assert same_bits(unpack_gptq(tensors), expected)


def test_gptq_groups_may_be_of_unequal_length_or_in_any_order():
    tensors = gptq_parts()
    for groups in (torch.randint(0, 2, (64,)), (torch.arange(64) >= 40).int()):
        tensors["layer.g_idx"] = groups.to(torch.int32)
        zeros = numbers_of(tensors["layer.qzeros"], 1).t()
        nibbles = numbers_of(tensors["layer.qweight"], 0).t()
        expected = unpack_groups(nibbles, zeros, tensors["layer.scales"].t(), groups)
        assert same_bits(unpack_gptq(tensors, checkpoint_format="gptq_v2"), expected)


@pytest.mark.parametrize(
    ("config", "is_read"),
    [({"desc_act": False}, False), ({}, True), ({"desc_act": True}, True),
     ({"desc_act": None}, True),
     ({"desc_act": False, "dynamic": {"-:.*": {}}}, False),
     ({"desc_act": False, "dynamic": {"+:.*": {"desc_act": True}}}, True)],
)  # fmt: skip
def test_gptq_reads_no_index_that_is_said_to_be_in_order(config, is_read):
    tensors = gptq_parts()
    in_order = unpack_gptq(tensors, group_size=32, **config)
    tensors["layer.g_idx"] = tensors["layer.g_idx"].flip(0)
    assert same_bits(unpack_gptq(tensors, group_size=32, **config), in_order) != is_read


@pytest.mark.parametrize(("columns", "groups", "size"), [(64, 3, 24), (96, 2, 64), (64, 2, 32)])
def test_a_gptq_group_that_is_shorter_is_known_by_the_index_alone(columns, groups, size):
    """Even if their number divides the columns."""
    tensors = gptq_parts(columns=columns, groups=groups)
    tensors["layer.g_idx"] = torch.arange(columns, dtype=torch.int32) // size
    by_index = unpack_gptq(tensors)
    for told in ({"group_size": size}, {}):
        assert same_bits(unpack_gptq(tensors, desc_act=False, **told), by_index)


@pytest.mark.parametrize("group", [-1, 2])
def test_a_gptq_index_that_names_no_group_is_refused(group):
    tensors = gptq_parts()
    tensors["layer.g_idx"][7] = group
    with pytest.raises(CheckpointError, match="g_idx"):
        unpack_gptq(tensors)


# What is refused


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "unnamed"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "malformed"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "malformed"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq"}, "bits None"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 3}}}, "bits 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 3}, "bits 3"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "malformed"),
        (compressed_tensors_config("pack-quantized", type="int", num_bits=3), "3 bits"),
        (compressed_tensors_config("int-quantized", type="int", num_bits=8), "int-quantized"),
        (compressed_tensors_config("mxfp6-pack-quantized", type="float", num_bits=6), "mxfp6"),
        (compressed_tensors_config("nvfp4-pack-quantized", type="float", num_bits=4,
                                   strategy="channel"), "strategy 'channel'"),
        ({"quant_method": "modelopt"}, "quant_algo None"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "NVFP4_SVD"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, "W4A16_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
          "quantized_layers": {"a": {"quant_algo": "W8A16"}}}, "W8A16"),
        (compressed_tensors_config("pack-quantized", type="int", num_bits=4, actorder="x"),
         "actorder 'x'"),
        (compressed_tensors_config("int-quantized", type="int", num_bits=8, strategy="channel",
                                   actorder="group"), "actorder 'group'"),
    ],
)  # fmt: skip
def test_an_unsupported_format_is_refused_with_the_list_of_those_that_are(config, named):
    with pytest.raises(UnsupportedModelError) as refused:
        find_format(config)
    assert named in str(refused.value)
    for supported in ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq"):
        assert f"\n{supported} " in str(refused.value)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = compressed_tensors_config("pack-quantized", type="int", num_bits=4, strategy="group")
AWQ = {"quant_method": "awq", "bits": 4}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MXFP4 = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(
    ("config", "tensors", "named"),
    [
        (FP8, {"a.weight": ("F8_E4M3", 64, 64)}, "no tensor a.weight_scale_inv"),
        (FP8, {"a.weight": ("F8_E4M3", 64, 64), "a.weight_scale_inv": ("F32", 3, 1)}, "not fit"),
        (FP8, {"a.weight": ("F8_E4M3", 64, 64), "a.weight_scale_inv": ("F32", 3)}, "not fit"),
        (FP8, {"a.weight": ("F8_E4M3", 64), "a.weight_scale_inv": ("F32",)}, "not fit"),
        (FP8, {"a.weight": ("F8_E4M3", 4, 8, 8), "a.weight_scale_inv": ("F32", 3, 1, 1)},
         "not fit"),
        (FP8, {"a.weight": ("F8_E4M3", 64, 64), "a.weight_scale_inv": ("I32", 1, 1)}, "I32"),
        (FP8, {"a.weight": ("I8", 64, 64), "a.weight_scale_inv": ("F32", 1, 1)}, "F32"),
        (FP8, {"a.weight": ("I8", 64, 16), "a.scale": ("F8_E8M0", 64, 2)}, "not fit"),
        (NVFP4, {"a.weight": ("U8", 64, 32), "a.weight_scale": ("F8_E4M3", 64, 4)},
         "no tensor a.weight_scale_2"),
        (NVFP4, {"a.weight": ("U8", 64, 32), "a.weight_scale": ("F8_E4M3", 64, 2),
                 "a.weight_scale_2": ("F32",)}, "not fit"),
        (NVFP4, {"a.weight": ("U8", 64, 32), "a.weight_scale": ("F8_E4M3", 64, 4),
                 "a.weight_scale_2": ("F32", 2)}, "not fit"),
        (NVFP4, {"a.weight": ("U8", 64, 32), "a.weight_scale": ("F8_E4M3", 64, 4),
                 "a.weight_scale_2": ("F32",), "a.pre_quant_scale": ("BF16", 64)},
         "a.pre_quant_scale"),
        (INT4, {"a.weight_packed": ("I32", 8, 8)}, "no tensor a.weight_scale"),
        (INT4, {"a.weight_packed": ("I32", 8, 8), "a.weight_scale": ("BF16", 8, 3)}, "not fit"),
        (INT4, {"a.weight_packed": ("I32", 8, 8), "a.weight_scale": ("BF16", 7, 2)}, "not fit"),
        (INT4, {"a.weight_packed": ("I32", 8, 8), "a.weight_scale": ("BF16", 8, 2),
                "a.weight_zero_point": ("I32", 8, 2)}, "not fit"),
        (INT4, {"a.weight_packed": ("I32", 8, 8), "a.weight_scale": ("BF16", 8, 2),
                "a.weight_g_idx": ("I32", 64)}, "a.weight_g_idx"),
        (INT4, {"a.weight_packed": ("I32", 8, 8), "a.weight_scale": ("BF16", 8, 2),
                "a.weight": ("BF16", 8, 64)}, "again"),
        (INT4, {"a.weight_packed": ("F32", 8, 8), "a.weight_scale": ("BF16", 8, 2)}, "F32"),
        (AWQ, {"a.qweight": ("I32", 64, 2), "a.qzeros": ("I32", 2, 2)}, "no tensor a.scales"),
        (AWQ, {"a.qweight": ("I32", 64, 2), "a.qzeros": ("I32", 2, 2), "a.scales": ("F16", 2, 8)},
         "not fit"),
        (AWQ, {"a.qweight": ("I32", 64, 2), "a.qzeros": ("I32", 3, 2), "a.scales": ("F16", 3, 16)},
         "not fit"),
        (MXFP4, {"a_blocks": ("U8", 4, 64, 2, 16)}, "no tensor a_scales"),
        (MXFP4, {"a_blocks": ("U8", 4, 64, 2, 8), "a_scales": ("U8", 4, 64, 2)}, "not fit"),
        (MXFP4, {"a_blocks": ("U8", 4, 64, 2, 16), "a_scales": ("U8", 4, 64, 1)}, "not fit"),
    ],
)  # fmt: skip
def test_parts_that_are_missing_or_do_not_fit_are_refused(config, tensors, named):
    headers = {
        name: StoredTensor(name, dtype, tuple(shape), Extent(Path("file"), 0, 0))
        for name, (dtype, *shape) in tensors.items()
    }
    with pytest.raises(CheckpointError, match=named):
        find_format(config).group(headers)


def test_what_only_activations_need_is_dropped():
    tensors = {
        "q_proj.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn),
        "q_proj.weight_scale": torch.ones(8, 1),
        "q_proj.input_scale": torch.ones(1),
        "q_proj.bias": torch.ones(8),
        "norm.weight": torch.ones(8),
    }
    config = CHECKPOINTS["fp8 per channel"][1]
    grouped = find_format(config).group(stored(tensors))
    assert set(grouped) == {"q_proj.weight", "q_proj.bias", "norm.weight"}
