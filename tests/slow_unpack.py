"""What the weights of tests/quantized_checkpoints.py are: unpacked slowly, one block, one nibble
after the other, straight from the definitions of the formats.

The plain twins of moe_infinity/kernels/unpack.py, with which they share no code. test_formats.py
compares both with the libraries that define the formats, where those are installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantized_checkpoints import (
    AWQ_COLUMNS,
    FP4_VALUES,
    Parts,
    block_at,
    edit_config,
    in_order,
)

LAST_SUFFIXES = (  # of the part that comes last in every weight
    ".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight", "_blocks", ".scale",
)  # fmt: skip


def unpack_fp8(parts: Parts, config: dict[str, Any]) -> Tensor:
    weight, scales = (
        parts[".weight"],
        parts[next(name for name in parts if name.startswith(".weight_scale"))],
    )
    block = config.get("weight_block_size")
    for group in config.get("config_groups", {}).values():
        block = group["weights"]["block_structure"]
    rows, columns = weight.shape
    if scales.numel() == 1:
        block, scales = (rows, columns), scales.view(1, 1)
    elif block is None:
        block = 1, columns
    out = torch.zeros(weight.shape, dtype=torch.bfloat16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = block_at(i, j, block)
            out[at] = (weight[at].float() * scales[i, j].float()).bfloat16()
    return out


def unpack_mxfp8(parts: Parts, config: dict[str, Any]) -> Tensor:
    weight, exponents = parts[".weight"], parts[".weight_scale"].double() - 127
    out = torch.zeros(weight.shape, dtype=torch.bfloat16)
    for column in range(weight.shape[1]):
        out[:, column] = weight[:, column].double() * 2.0 ** exponents[:, column // 32]
    return out


def unpack_pairs(parts: Parts, config: dict[str, Any]) -> Tensor:
    """Two numbers of 4 bits to a byte, of all formats that have them so."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    name = ".weight_packed" if ".weight_packed" in parts else ".weight"
    pairs = parts[name].view(torch.uint8).int()
    scales = parts[".weight_scale" if ".weight_scale" in parts else ".scale"]
    if scales.dtype != torch.float8_e4m3fn:
        scales = 2.0 ** (scales.view(torch.uint8).float() - 127)
    factor = parts.get(".weight_scale_2", torch.ones(()))
    divisor = parts.get(".weight_global_scale", torch.ones(()))
    group = 2 * pairs.shape[1] // scales.shape[1]
    out = torch.zeros(len(pairs), 2 * pairs.shape[1], dtype=torch.bfloat16)
    for column in range(out.shape[1]):
        nibbles = pairs[:, column // 2] // 16 ** (column % 2) % 16
        out[:, column] = table[nibbles] * (scales[:, column // group].float() * factor / divisor)
    return out


def numbers_of(
    words: Tensor, dim: int, bits: int = 4, order: tuple[int, ...] | None = None
) -> Tensor:
    per_word = 32 // bits
    words = words.movedim(dim, -1)
    numbers = torch.zeros(*words.shape[:-1], per_word * words.shape[-1], dtype=torch.int32)
    for place, column in enumerate(order or range(per_word)):
        numbers[..., column::per_word] = words // 2 ** (bits * place) % 2**bits
    return numbers.movedim(-1, dim)


def unpack_groups(nibbles: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Column by column, in the dtype of the scales."""
    out = torch.zeros(nibbles.shape, dtype=scales.dtype)
    for column, group in enumerate(groups.tolist()):
        difference = nibbles[:, column].to(scales.dtype) - zeros[:, group].to(scales.dtype)
        out[:, column] = difference * scales[:, group]
    return out.bfloat16()


def unpack_ints(parts: Parts, config: dict[str, Any]) -> Tensor:
    rows, columns = parts[".weight_shape"].tolist()
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    scales = parts[".weight_scale"]
    zeros = torch.full(scales.shape, 2 ** (bits - 1))
    if ".weight_zero_point" in parts:
        zeros = numbers_of(parts[".weight_zero_point"], 0, bits)[:rows]
    numbers = numbers_of(parts[".weight_packed"], 1, bits)[:, :columns]
    return unpack_groups(numbers, zeros, scales, parts.get(".weight_g_idx", in_order(columns)))


def unpack_gptq(parts: Parts, config: dict[str, Any]) -> Tensor:
    bits = 32 * parts[".qzeros"].shape[1] // parts[".scales"].shape[1]
    zeros = numbers_of(parts[".qzeros"], 1, bits).t() + (config["checkpoint_format"] == "gptq")
    numbers = numbers_of(parts[".qweight"], 0, bits).t()
    groups = parts.get(".g_idx", in_order(numbers.shape[1]))
    return unpack_groups(numbers, zeros, parts[".scales"].t(), groups)


def unpack_auto_round(parts: Parts, config: dict[str, Any]) -> Tensor:
    return unpack_gptq(parts, {"checkpoint_format": "gptq"})


def unpack_awq(parts: Parts, config: dict[str, Any]) -> Tensor:
    nibbles = numbers_of(parts[".qweight"], 1, order=AWQ_COLUMNS).t()
    zeros = numbers_of(parts[".qzeros"], 1, order=AWQ_COLUMNS).t()
    return unpack_groups(nibbles, zeros, parts[".scales"].t(), in_order(nibbles.shape[1]))


def unpack_mxfp4(parts: Parts, config: dict[str, Any]) -> Tensor:
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    blocks, exponents = parts["_blocks"].int(), parts["_scales"].double() - 127
    out = torch.zeros(*blocks.shape[:3], 32, dtype=torch.float64)
    for byte in range(16):
        out[..., 2 * byte] = values[blocks[..., byte] % 16]
        out[..., 2 * byte + 1] = values[blocks[..., byte] // 16]
    out *= 2.0 ** exponents[..., None]
    return out.flatten(2).transpose(1, 2).bfloat16().contiguous()


UNPACK = {
    "mxfp4": unpack_mxfp4, "fp8": unpack_fp8, "gptq": unpack_gptq, "awq": unpack_awq,
    "auto-round": unpack_auto_round,
}  # fmt: skip


def dequantized(folder: Path, into: Path) -> Path:
    """The model of `folder` in plain bfloat16, written to the new folder `into`."""
    shutil.copytree(folder, into)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    for stem, parts in packed_weights(tensors).items():
        unpack = _unpacker_of(parts, config["quant_method"])
        for suffix in parts:
            del tensors[stem + suffix]
        tensors[stem if "_blocks" in parts else stem + ".weight"] = unpack(parts, config)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    edit_config(into, lambda c: {k: v for k, v in c.items() if k != "quantization_config"})
    return into


def _unpacker_of(parts: Parts, method: str) -> Callable[[Parts, dict[str, Any]], Tensor]:
    values = parts.get(".weight_packed", parts.get(".weight"))
    if values is not None and values.dtype in (torch.uint8, torch.int8):
        return unpack_pairs
    if ".weight_packed" in parts:
        return unpack_ints
    if ".weight_scale" in parts and parts[".weight_scale"].dtype == torch.uint8:
        return unpack_mxfp8
    return UNPACK.get(method, unpack_fp8)


def packed_weights(tensors: dict[str, Tensor]) -> dict[str, Parts]:
    """{what the names of its parts begin with: {suffix: part}} of every packed weight."""
    stems = {
        key.removesuffix(suffix)
        for key in tensors
        for suffix in LAST_SUFFIXES
        if key.endswith(suffix)
    }
    parts: dict[str, Parts] = {stem: {} for stem in stems}
    for key, tensor in tensors.items():
        for stem in (key.rpartition(mark)[0] for mark in "._"):
            suffix = key[len(stem) :]
            if stem in parts and suffix != ".bias" and suffix != "_bias":
                parts[stem][suffix] = tensor
    return parts


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Also the sign of zero; any NaN equals any other."""
    nan = expected.isnan()
    kind = {2: torch.int16, 4: torch.int32}[expected.itemsize]
    bits = [t.masked_fill(nan, 0).contiguous().view(kind) for t in (found, expected)]
    return (
        found.dtype == expected.dtype
        and torch.equal(found.isnan(), nan)
        and torch.equal(bits[0], bits[1])
    )
