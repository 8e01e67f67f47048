"""Unpacking against the libraries that define the formats and against the slow definitions: every
value, every exponent, every dtype of scales, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_infinity.kernels import unpack
from tests.compressed_tensors_package import compressor, scheme_of
from tests.quantization_configs import compressed_tensors_config
from tests.slow_unpack import numbers_of, same_bits, unpack_groups

pytestmark = pytest.mark.arithmetic

BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "scale_dtype", [torch.float32, BFLOAT16, torch.uint8, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("block", [(16, 32), (1, 32), (1, 512), (64, 512)])
def test_every_float8_value_is_that_of_transformers(dtype, scale_dtype, block):
    torch.manual_seed(0)
    weight = torch.arange(64 * 512).view(64, 512).to(torch.uint8)
    weight = weight[:, torch.randperm(512)].contiguous().view(torch.float8_e4m3fn)
    grid = 64 // block[0], 512 // block[1]
    exponents = torch.randint(100, 140, grid).to(torch.uint8)
    scales = {
        torch.uint8: exponents,
        torch.float8_e8m0fnu: exponents.view(torch.float8_e8m0fnu),
    }.get(scale_dtype, torch.rand(grid).to(scale_dtype))
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype)
    assert expected.isnan().any()
    assert same_bits(unpack.fp8(weight, scales, block, dtype), expected)
    numbers = weight.view(torch.uint8).clamp(max=0x7E).view(torch.float8_e4m3fn)  # the fast way
    expected = Fp8Dequantize(None)._dequantize_one(numbers, scales, output_dtype=dtype)
    assert same_bits(unpack.fp8(numbers, scales, block, dtype), expected)


@pytest.mark.parametrize("scale", [2.0**126, 3.0e38, 1e-44, 0.0, float("inf"), float("nan"), -0.3])
def test_extreme_float8_scales_are_those_of_transformers(scale):
    numbers = [*range(0x7F), *range(0x80, 0xFF)]  # all but the two NaN
    weight = torch.tensor(numbers, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, -1)
    scales = torch.full((1, 1), scale)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=torch.float32)
    shape = weight.shape[0], weight.shape[1]
    assert same_bits(unpack.fp8(weight, scales, shape, torch.float32), expected)


def test_every_mxfp4_value_is_that_of_transformers():
    torch.manual_seed(0)
    blocks = torch.arange(256 * 8).to(torch.uint8)[torch.randperm(2048)]
    blocks = blocks.view(128, 16).repeat(2, 1, 1).view(16, 16, 16)
    half = torch.full((1,), 0.5, dtype=BFLOAT16)
    overflows = torch.ldexp(half, torch.tensor(128)).isinf()  # torch 2.8: 2 ** 128 comes first
    scales = torch.arange(256).clamp(max=254 if overflows else 255).to(torch.uint8).view(16, 16)
    for dtype in (BFLOAT16, torch.float32):
        expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=BFLOAT16)[0]
        assert same_bits(unpack.mxfp4(blocks, scales, dtype), expected.to(dtype))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [9, 12, 16])
@pytest.mark.parametrize("scale_dtype", [BFLOAT16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_int4_of_any_scale_is_that_of_compressed_tensors(rows, scale_dtype, is_symmetric):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    config = compressed_tensors_config("pack-quantized", **weights | {"symmetric": is_symmetric})
    theirs = compressor("pack-quantized")
    words, scales, zeros = random_groups(rows, 48, 16, scale_dtype)
    state = {
        "weight_packed": words,
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, 48]),
    }
    parts = {"values": words, "scale": scales}
    if not is_symmetric:
        state["weight_zero_point"] = parts["zeros"] = zeros
    found = unpack.int_rows(parts, (1, 16), scale_dtype)
    assert same_bits(found, theirs.decompress(state, scheme_of(config))["weight"])


def random_groups(
    rows: int, columns: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Words, scales and zeros of pack-quantized int4, every bit random."""
    torch.manual_seed(0)
    low, high = -(2**31), 2**31
    words = torch.randint(low, high, (rows, columns // 8), dtype=torch.int32)
    zeros = torch.randint(low, high, (-(-rows // 8), columns // group), dtype=torch.int32)
    return words, torch.randn(rows, columns // group).to(dtype), zeros


@pytest.mark.parametrize("rows", [1, 9, 16])
@pytest.mark.parametrize("scale_dtype", [BFLOAT16, torch.float16, torch.float32])
def test_int4_of_any_scale_is_the_slow_definition(rows, scale_dtype):
    words, scales, zeros = random_groups(rows, 48, 16, scale_dtype)
    groups = torch.arange(48) // 16
    expected = unpack_groups(numbers_of(words, 1), numbers_of(zeros, 0)[:rows], scales, groups)
    parts = {"values": words, "scale": scales, "zeros": zeros}
    assert same_bits(unpack.int_rows(parts, (1, 16), BFLOAT16), expected)
