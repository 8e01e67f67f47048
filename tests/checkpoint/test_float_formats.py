"""Scales of floats in every shape and place in which they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.formats.methods import find_format
from tests.checkpoint.test_formats import stored, values_of
from tests.closeness import distance
from tests.quantization_configs import DEEPSEEK_V4, MODELOPT
from tests.quantized_checkpoints import (
    Parts,
    block_at,
    edit_config,
    pack_deepseek_v4,
    pack_fp8,
    pack_modelopt,
)
from tests.slow_unpack import unpack_pairs
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = pytest.mark.arithmetic

IDS = torch.arange(3, 23).view(1, 20) * 4 % 128
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def unpacked(config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    (packed,) = find_format(config).group(stored(tensors)).values()
    assert isinstance(packed, PackedTensor)
    return packed.unpack(values_of(packed, tensors), torch.float32)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((), (64, 96)), ((1,), (64, 96)), ((1, 1), (64, 96)), ((64,), (1, 96)), ((64, 1), (1, 96)),
     ((2,), (32, 96)), ((4, 1, 3, 1), (16, 32)), ((4, 3), (16, 32))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scale", "qscale_weight"])
def test_scales_of_float8_may_have_any_of_these_shapes(shape, block, dtype, name):
    torch.manual_seed(0)
    parts = pack_fp8(torch.randn(64, 96), block=block, scale="scale", dtype=dtype)
    tensors = {"a.weight": parts[".weight"], f"a.{name}": parts["scale"].view(shape)}
    expected = parts[".weight"].float()
    for i, row in enumerate(parts["scale"].float()):
        for j, scale in enumerate(row):
            expected[block_at(i, j, block)] *= scale
    assert torch.equal(unpacked(FP8, tensors | {"a.input_scale": torch.ones(())}), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("config", [MODELOPT, DEEPSEEK_V4])
def test_experts_in_one_tensor_have_scales_of_their_own(config, shape):
    torch.manual_seed(0)
    pack = pack_modelopt if config is MODELOPT else pack_deepseek_v4
    experts = [pack(torch.randn(8, 64) * (1 + expert)) for expert in range(3)]
    names = {".weight": "", ".weight_scale": "_scale", ".weight_scale_2": "_scale_2",
             ".scale": "_scale_inv"}  # fmt: skip
    tensors = {
        f"experts.down_proj{names[role]}": torch.stack([parts[role] for parts in experts])
        for role in experts[0]
        if role in names
    }
    factor = "experts.down_proj_scale_2"
    if factor in tensors:
        tensors[factor] = tensors[factor].view(3, *shape)
    expected = torch.stack([unpack_pairs(parts, {}) for parts in experts])
    assert torch.equal(unpacked(config, tensors).bfloat16(), expected)


# Whole models


def packed_model(family: str, folder: Path, pack: Any) -> tuple[Path, Path]:
    """A tiny model with packed experts, and the same in bfloat16 as they are rounded."""
    torch.manual_seed(0)
    model = tiny_model(architectures_in(family)[-1]).to(torch.bfloat16)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(std=0.15)
    plain, packed = folder / "plain", folder / "packed"
    for into in (plain, packed):
        model.save_pretrained(into)
    rounded = load_file(plain / "model.safetensors")
    tensors = {}
    for name, weight in rounded.items():
        if ".experts." not in name:
            tensors[name] = weight
            continue
        parts, rounded[name] = pack(weight)
        tensors |= {name.removesuffix(".weight") + role: part for role, part in parts.items()}
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    return packed, plain


@torch.no_grad()
def check_logits(packed: Path, plain: Path) -> None:
    """Unpacked, those of stock transformers to the bit; by kernels nearly so."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="float32")
    expected = stock(IDS).logits
    for exact, tolerance in ((True, 0.0), (False, 1e-4)):
        with MoE(packed, host_memory="50%", dtype="float32", exact=exact) as moe:
            assert distance(moe.model(IDS).logits, expected) <= tolerance
            assert moe.report().experts.endswith("unpacked" if exact else "read by kernels")


def round_deepseek_v4(weight: Tensor) -> tuple[Parts, Tensor]:
    parts = pack_deepseek_v4(weight)
    return parts, unpack_pairs(parts, {})


def test_deepseek_v4_has_experts_of_4_bits(tmp_path):
    packed, plain = packed_model("deepseek_v4", tmp_path, round_deepseek_v4)
    edit_config(packed, lambda c: c | {"quantization_config": DEEPSEEK_V4, "expert_dtype": "fp4"})
    check_logits(packed, plain)


def round_to_scalar(weight: Tensor) -> tuple[Parts, Tensor]:
    """With a power of two, so that a product has the bits of bfloat16."""
    scale = (weight.float().abs().max() / 448).log2().ceil().exp2()
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    parts = {".weight": values, ".weight_scale": scale, ".input_scale": torch.ones(())}
    return parts, (values.float() * scale).bfloat16()


def test_autofp8_has_a_scalar_for_each_tensor(tmp_path):
    packed, plain = packed_model("mixtral", tmp_path, round_to_scalar)
    edit_config(packed, lambda c: c | {"quantization_config": FP8})
    check_logits(packed, plain)
