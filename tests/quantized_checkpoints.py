"""Tiny quantized checkpoints, named and laid out as they are published.

build(name, folder) writes one of CHECKPOINTS: random weights, rounded to nearest and packed.
tests/slow_unpack.py says what the weights are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantization_configs import (
    AUTO_ROUND,
    AWQ,
    DEEPSEEK,
    DEEPSEEK_V4,
    FBGEMM,
    FP4,
    FP8,
    GPTQ,
    GROUP,
    INT4,
    MODELOPT,
    MX,
    MXFP4,
    NV,
    QUARK,
    compressed_tensors_config,
)

Parts = dict[str, Tensor]  # by the suffix of their names
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # then the same, negative
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of nibbles 0 to 7

COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
QWEN3_MOE = COMMON | {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
    "intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = COMMON | {
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
CUT_BLOCKS = {"hidden_size": 160, "moe_intermediate_size": 136}  # no multiples of 128


# Packing: a weight [R, C] -> its parts


def pack_fp8(weight: Tensor, *, block: tuple[int, int], scale: str, dtype: torch.dtype) -> Parts:
    grid = torch.zeros(-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
    packed = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = block_at(i, j, block)
            grid[i, j] = (weight[at].float().abs().max() / 448).to(dtype)
            packed[at] = (weight[at].float() / grid[i, j]).clamp(-448, 448).to(packed.dtype)
    return {".weight": packed, scale: grid.to(dtype)}


def block_at(i: int, j: int, block: tuple[int, int]) -> tuple[slice, slice]:
    return slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])


def pack_fp8_tensor(weight: Tensor) -> Parts:
    shape = weight.shape[0], weight.shape[1]
    parts = pack_fp8(weight, block=shape, scale=".weight_scale", dtype=torch.float32)
    return parts | {".weight_scale": parts[".weight_scale"].view(1), ".input_scale": torch.ones(1)}


def pack_fp8_channel(weight: Tensor) -> Parts:
    block = 1, weight.shape[1]
    return pack_fp8(weight, block=block, scale=".weight_scale", dtype=torch.bfloat16)


def pack_fp8_rows(weight: Tensor) -> Parts:
    block = 1, weight.shape[1]
    return pack_fp8(weight, block=block, scale=".weight_scale", dtype=torch.float32)


def pack_fp8_scalar(weight: Tensor) -> Parts:
    parts = pack_fp8_tensor(weight)
    scalars = {name: parts[name].view(()) for name in (".weight_scale", ".input_scale")}
    return parts | scalars


def exponents_of(grouped: Tensor, largest: float) -> Tensor:
    """Of the powers of two that make the values [..., group] at most the largest number."""
    return (grouped.abs().amax(-1) / largest).clamp(min=2.0**-30).log2().ceil()


def pack_mxfp8(weight: Tensor) -> Parts:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    exponents = exponents_of(grouped, 448)
    values = (grouped / 2 ** exponents[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return {".weight": values, ".weight_scale": (exponents + 127).to(torch.uint8)}


def to_pairs(steps: Tensor) -> Tensor:
    """Bytes of the nearest numbers of 4 bits, of [..., C]; the first column in the lower bits."""
    distances = (steps.abs()[..., None] - torch.tensor(FP4_VALUES)).abs()
    nibbles = distances.argmin(-1) + 8 * (steps < 0)
    return (nibbles[..., 0::2] + 16 * nibbles[..., 1::2]).to(torch.uint8)


def pack_mxfp4_pairs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C / 2], and the exponents as bytes [R, C / 32]."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    exponents = exponents_of(grouped, 6)
    pairs = to_pairs(grouped / 2 ** exponents[..., None]).flatten(1)
    return pairs, (exponents + 127).to(torch.uint8)


def pack_deepseek_v4(weight: Tensor) -> Parts:
    pairs, exponents = pack_mxfp4_pairs(weight)
    return {".weight": pairs.view(torch.int8), ".scale": exponents.view(torch.float8_e8m0fnu)}


def pack_mxfp4_beside(weight: Tensor) -> Parts:
    return dict(zip((".weight", ".weight_scale"), pack_mxfp4_pairs(weight), strict=True))


def pack_mxfp4_packed(weight: Tensor) -> Parts:
    return dict(zip((".weight_packed", ".weight_scale"), pack_mxfp4_pairs(weight), strict=True))


def pack_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, C / 2], a float8 scale for each 16 columns, and what those are multiplied by."""
    grouped = weight.float().unflatten(1, (-1, 16))
    largest = grouped.abs().amax(-1)
    factor = largest.max() / (6 * 448)
    scales = (largest / 6 / factor).clamp(min=2.0**-9).to(torch.float8_e4m3fn)
    pairs = to_pairs(grouped / (scales.float() * factor)[..., None]).flatten(1)
    return pairs, scales, factor


def pack_modelopt(weight: Tensor) -> Parts:
    names = ".weight", ".weight_scale", ".weight_scale_2"
    parts = dict(zip(names, pack_nvfp4(weight), strict=True))
    return parts | {".input_scale": torch.tensor(0.01)}


def pack_nvfp4_packed(weight: Tensor) -> Parts:
    pairs, scales, factor = pack_nvfp4(weight)
    return {
        ".weight_packed": pairs,
        ".weight_scale": scales,
        ".weight_global_scale": 1 / factor.view(1),
        ".input_global_scale": torch.ones(1),
    }


def to_numbers(
    weight: Tensor, groups: Tensor, dtype: torch.dtype, bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [R, C], zeros [R, G] and scales [R, G] of `dtype`; `groups` [C] is each column's."""
    grid = weight.shape[0], int(groups.max()) + 1
    top = 2**bits - 1
    numbers, zeros, scales = torch.zeros(weight.shape), torch.zeros(grid), torch.zeros(grid)
    for group in range(grid[1]):
        columns = groups == group
        part = weight[:, columns].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, group] = ((high - low) / top).to(dtype)
        zeros[:, group] = (-low / scales[:, group]).round().clamp(1, top)
        steps = part / scales[:, group, None] + zeros[:, group, None]
        numbers[:, columns] = steps.round().clamp(0, top)
    return numbers.int(), zeros.int(), scales.to(dtype)


def in_order(num_columns: int) -> Tensor:
    return torch.arange(num_columns, dtype=torch.int32) // GROUP


def to_words(
    numbers: Tensor, dim: int, bits: int = 4, order: tuple[int, ...] | None = None
) -> Tensor:
    """int32 words of numbers that are neighbours along `dim`; the last word is filled with 0."""
    per_word = 32 // bits
    numbers = numbers.movedim(dim, -1).long()
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per_word))
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // per_word, dtype=torch.int64)
    for place, column in enumerate(order or range(per_word)):
        words |= numbers[..., column::per_word] << bits * place
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def pack_ints(
    weight: Tensor, *, is_symmetric: bool, bits: int = 4, has_act_order: bool = False
) -> Parts:
    groups = in_order(weight.shape[1])
    if has_act_order:
        groups = groups[torch.randperm(len(groups))]
    if is_symmetric:
        half = 2 ** (bits - 1)
        largest = weight.float().abs().view(len(weight), -1, GROUP).amax(2)
        scales = (largest / (half - 0.5)).bfloat16()
        steps = weight.float() / scales.float()[:, groups]
        numbers, zeros = steps.round().clamp(-half, half - 1).int() + half, None
    else:
        numbers, zeros, scales = to_numbers(weight, groups, torch.bfloat16, bits)
    parts = {
        ".weight_packed": to_words(numbers, 1, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if zeros is not None:
        parts[".weight_zero_point"] = to_words(zeros, 0, bits)
    return parts | {".weight_g_idx": groups} if has_act_order else parts


def pack_gptq(
    weight: Tensor, *, stored_less: int, has_act_order: bool = False, bits: int = 4
) -> Parts:
    groups = in_order(weight.shape[1])
    if has_act_order:
        groups = groups[torch.randperm(len(groups))]
    numbers, zeros, scales = to_numbers(weight, groups, torch.float16, bits)
    return {
        ".qweight": to_words(numbers.t(), 0, bits),
        ".qzeros": to_words(zeros.t() - stored_less, 1, bits),
        ".scales": scales.t().contiguous(),
        ".g_idx": groups,
    }


def pack_auto_round(weight: Tensor) -> Parts:
    """Without an index; attention has 8 bits, experts, of which a side is 96 or 128, have 4."""
    is_of_expert = not {96, 128}.isdisjoint(weight.shape)
    parts = pack_gptq(weight, stored_less=1, bits=4 if is_of_expert else 8)
    return {suffix: part for suffix, part in parts.items() if suffix != ".g_idx"}


def pack_awq(weight: Tensor) -> Parts:
    nibbles, zeros, scales = to_numbers(weight, in_order(weight.shape[1]), torch.float16)
    return {
        ".qweight": to_words(nibbles.t(), 1, order=AWQ_COLUMNS),
        ".qzeros": to_words(zeros.t(), 1, order=AWQ_COLUMNS),
        ".scales": scales.t().contiguous(),
    }


def pack_mxfp4(weight: Tensor) -> Parts:
    """[E, C, R] -> blocks [E, R, C / 32, 16] and scales [E, R, C / 32]."""
    grouped = weight.float().transpose(1, 2).unflatten(2, (-1, GROUP))
    exponents = exponents_of(grouped, 6)
    blocks = to_pairs(grouped / 2 ** exponents[..., None])
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}


# Checkpoints


# name -> (sizes of the model, quantization_config, how a weight is packed)
Recipe = tuple[dict[str, Any], dict[str, Any], Callable[[Tensor], Parts]]
CHECKPOINTS: dict[str, Recipe] = {
    "fp8": (
        QWEN3_MOE | CUT_BLOCKS,
        DEEPSEEK,
        lambda w: pack_fp8(w, block=(128, 128), scale=".weight_scale_inv", dtype=torch.float32),
    ),
    "mxfp4": (GPT_OSS, MXFP4, pack_mxfp4),
    "int4 symmetric": (
        QWEN3_MOE,
        compressed_tensors_config("pack-quantized", **INT4),
        lambda w: pack_ints(w, is_symmetric=True),
    ),
    "int4 asymmetric": (
        QWEN3_MOE,
        compressed_tensors_config("pack-quantized", **INT4 | {"symmetric": False}),
        lambda w: pack_ints(w, is_symmetric=False),
    ),
    "int8 symmetric": (
        QWEN3_MOE,
        compressed_tensors_config("pack-quantized", **INT4 | {"num_bits": 8}),
        lambda w: pack_ints(w, is_symmetric=True, bits=8),
    ),
    "int8 asymmetric": (
        QWEN3_MOE,
        compressed_tensors_config("pack-quantized", **INT4 | {"num_bits": 8, "symmetric": False}),
        lambda w: pack_ints(w, is_symmetric=False, bits=8),
    ),
    "int4 with act-order": (
        QWEN3_MOE,
        compressed_tensors_config(
            "pack-quantized", **INT4 | {"symmetric": False, "actorder": "group"}
        ),
        lambda w: pack_ints(w, is_symmetric=False, has_act_order=True),
    ),
    "fp8 per channel": (
        QWEN3_MOE,
        compressed_tensors_config("float-quantized", strategy="channel", **FP8),
        pack_fp8_channel,
    ),
    "fp8 per tensor": (
        QWEN3_MOE,
        compressed_tensors_config("float-quantized", strategy="tensor", **FP8),
        pack_fp8_tensor,
    ),
    "fp8 per block": (
        QWEN3_MOE | CUT_BLOCKS,
        compressed_tensors_config(
            "float-quantized", strategy="block", **FP8 | {"block_structure": [128, 128]}
        ),
        lambda w: pack_fp8(w, block=(128, 128), scale=".weight_scale", dtype=torch.bfloat16),
    ),
    "fp8 of fbgemm": (QWEN3_MOE, FBGEMM, pack_fp8_rows),
    "mxfp4 of quark": (QWEN3_MOE, QUARK, pack_mxfp4_beside),
    "fp8 of modelopt": (QWEN3_MOE, MODELOPT | {"quant_algo": "FP8"}, pack_fp8_scalar),
    "mxfp8": (QWEN3_MOE, compressed_tensors_config("mxfp8-quantized", **FP8 | MX), pack_mxfp8),
    "mxfp4 packed": (
        QWEN3_MOE,
        compressed_tensors_config("mxfp4-pack-quantized", **FP4 | MX),
        pack_mxfp4_packed,
    ),
    "mxfp4 of deepseek-v4": (QWEN3_MOE, DEEPSEEK_V4, pack_deepseek_v4),
    "nvfp4": (QWEN3_MOE, MODELOPT, pack_modelopt),
    "nvfp4 packed": (
        QWEN3_MOE,
        compressed_tensors_config("nvfp4-pack-quantized", **FP4 | NV),
        pack_nvfp4_packed,
    ),
    "gptq": (QWEN3_MOE, GPTQ, lambda w: pack_gptq(w, stored_less=1)),
    "gptq of 8 bits": (
        QWEN3_MOE,
        GPTQ | {"bits": 8},
        lambda w: pack_gptq(w, stored_less=1, bits=8),
    ),
    "auto-round": (QWEN3_MOE, AUTO_ROUND, pack_auto_round),
    "gptq_v2 with act-order": (
        QWEN3_MOE,
        GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True},
        lambda w: pack_gptq(w, stored_less=0, has_act_order=True),
    ),
    "awq": (QWEN3_MOE, AWQ, pack_awq),
}


def has_kernels(name: str, *, reads_index: bool = False) -> bool:
    """Return False if experts of the checkpoint are unpacked for each use. `reads_index`: kernels
    know columns in any order, which only those of a GPU do, for GPTQ."""
    if name == "int8 symmetric":
        return not reads_index  # on a CPU
    if name.startswith("int8") or "8 bits" in name:
        return False
    return "act-order" not in name or (reads_index and name.startswith("gptq"))


def build(name: str, folder: Path, **sizes: Any) -> Path:
    """Write the checkpoint `name` of CHECKPOINTS into `folder`."""
    settings, quantization_config, pack = CHECKPOINTS[name]
    family = "GptOss" if "num_local_experts" in settings else "Qwen3Moe"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings | sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():  # wide: logits differ clearly between tokens
            if param.ndim > 1:
                param.normal_(std=0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    edit_config(folder, lambda config: config | {"quantization_config": quantization_config})
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if _is_quantized(key, family)]:
        parts = pack(tensors.pop(key))
        stem = key.removesuffix(".weight")
        tensors |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _is_quantized(key: str, family: str) -> bool:
    if family == "GptOss":
        return key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return key.endswith("_proj.weight")


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text())), indent=2))
