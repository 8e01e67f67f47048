"""Quantized weights back into the dtype the model computes in, bit for bit as the libraries that
define the formats do it, in few passes.

    fp8    float8 x scale, in float32, rounded once          transformers' Fp8Dequantize
    mxfp4  16 values x power of two, in bfloat16             transformers' Mxfp4Dequantize
    int4   (nibble - zero) x scale, in the dtype of scale    compressed-tensors, GPTQ, AutoAWQ

Nibbles are numbered from the lowest bits of a word, words are little-endian. Every function takes
one weight; legend: R rows (outputs), C columns (inputs), G groups of columns, r x c a grid of
blocks. The plain twins that define the results are in the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_infinity.errors import CheckpointError

# Work in pieces that stay in a core's cache: 16 ms instead of 27-68 ms for 16.6 M MXFP4 values, one
# core of an AMD EPYC.
CHUNK_VALUES = 1 << 18
ZERO_OF_SYMMETRIC = 8  # the nibble that stands for 0 where no zeros are stored
AWQ_HALVES = 2  # an AWQ word is 2 half-words: columns 0 2 4 6, then 1 3 5 7


def fp8(weight_RC: Tensor, scales_rc: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn times the scale of its block; the last blocks may be cut off by the edge."""
    scales_rc = _fp8_scales(scales_rc)
    if weight_RC.device.type != "cpu" or _needs_the_plain_way(weight_RC, scales_rc):
        spread = _spread(scales_rc, block, weight_RC.shape)
        return (weight_RC.to(torch.float32) * spread).to(dtype)
    out_RC = torch.empty(weight_RC.shape, dtype=dtype)
    num_rows, num_columns = weight_RC.shape
    scales_rc = scales_rc * 2.0**8  # what reading float8 bits as float16 lacks
    step = max(1, CHUNK_VALUES // max(1, num_columns * block[0]))
    for first in range(0, len(scales_rc), step):
        rows = slice(first * block[0], min((first + step) * block[0], num_rows))
        values = _fp8_bits_as_half(weight_RC[rows]).to(torch.float32)
        values.mul_(_spread(scales_rc[first : first + step], block, values.shape))
        out_RC[rows] = values
    return out_RC


def _fp8_scales(scales: Tensor) -> Tensor:
    """In float32, [r, c]. Bytes are exponents of two (E8M0)."""
    if scales.dtype == torch.uint8:
        scales = (scales.to(torch.float32) - 127.0).exp2()
    scales = scales.to(torch.float32)
    return scales.view(1, 1) if scales.numel() == 1 else scales


def _needs_the_plain_way(weight_RC: Tensor, scales_rc: Tensor) -> bool:
    """A NaN among the weights, or scales too large to be multiplied by 2 ** 8."""
    if not weight_RC.numel():
        return True
    largest = weight_RC.view(torch.int8).bitwise_and(0x7F).max()
    return bool(largest == 0x7F) or not bool(scales_rc.abs().max() < 2.0**119)


def _fp8_bits_as_half(weight_RC: Tensor) -> Tensor:
    """The values times 2 ** -8, in float16: sign, exponent and mantissa in their new places. torch
    converts float8 one value at a time, nine times slower.
    """
    bits = weight_RC.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)


def _spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Every scale repeated over its block; a dimension with one scale is left to broadcasting."""
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(block[1], 1)[:, : shape[1]]
    if scales.shape[0] > 1:
        scales = scales.repeat_interleave(block[0], 0)[: shape[0]]
    return scales


def mxfp4(blocks_RGB: Tensor, scales_RG: Tensor, dtype: torch.dtype) -> Tensor:
    """gpt-oss: B = 16 bytes are 32 values of 4 bits (sign, 2 of exponent, 1 of mantissa) with one
    exponent. Gives the transpose of what is stored: [32 G, R].
    """
    num_rows, num_groups, _ = blocks_RGB.shape
    halves = blocks_RGB.reshape(num_rows, -1).view(torch.int16).t().contiguous()
    halves = halves.view(num_groups, 8, 1, num_rows)
    to_the_top = torch.tensor([12, 8, 4, 0], dtype=torch.int16, device=blocks_RGB.device)[:, None]
    exponents = scales_RG.t().to(torch.int32) - 127
    scales = torch.pow(2.0, exponents).view(num_groups, 1, 1, num_rows)
    out = torch.empty(
        (num_groups, 8, 4, num_rows), dtype=torch.bfloat16, device=blocks_RGB.device
    )
    step = max(1, CHUNK_VALUES // max(1, 32 * num_rows)) if out.device.type == "cpu" else num_groups
    for first in range(0, num_groups, max(1, step)):
        part = slice(first, first + step)
        # The sign to bit 15, the others to bits 9-11: a float16 that lacks a factor of 2 ** 14.
        bits = (halves[part] << to_the_top).bitwise_right_shift_(3).bitwise_and_(-0x7200)
        values = bits.view(torch.float16).to(torch.float32)
        out[part] = values.mul_(2.0**14).mul_(scales[part])
    return out.view(-1, num_rows).to(dtype)


def int4_rows(
    packed_RW: Tensor, scales_RG: Tensor, zeros_WG: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """compressed-tensors pack-quantized: a word is 8 neighbouring columns; zeros are packed along
    rows.
    """
    zeros_RG = _symmetric_zero(packed_RW) if zeros_WG is None else _nibble_rows(zeros_WG)
    values_RC = _nibble_columns(packed_RW)
    return _apply_groups(values_RC, zeros_RG[: len(values_RC)], scales_RG, dtype)


def gptq(
    parts: dict[str, Tensor], dtype: torch.dtype, *, adds_one_to_zeros: bool
) -> Tensor:
    """qweight [C/8, R], qzeros [G, R/8], scales [G, R], perhaps g_idx [C]; gives [R, C]."""
    zeros = parts["qzeros"]
    if adds_one_to_zeros:  # one to each nibble, a carry into the next as GPTQModel's
        zeros = zeros + 0x11111111
    zeros_RG = _nibble_columns(zeros).t()
    scales_RG, groups = parts["scales"].t(), parts.get("g_idx")
    values_RC = _nibble_columns(parts["qweight"].t().contiguous())
    if groups is not None and not _is_in_order(groups, scales_RG.shape[1]):
        if not (groups.min() >= 0 and groups.max() < scales_RG.shape[1]):
            raise CheckpointError(f"g_idx names groups that are not among {scales_RG.shape[1]}")
        zeros_RG, scales_RG = zeros_RG[:, groups], scales_RG[:, groups]
    return _apply_groups(values_RC, zeros_RG, scales_RG, dtype)


def awq(parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """qweight [C, R/8], qzeros [G, R/8], scales [G, R]; gives [R, C]."""
    values_RC, zeros_RG = _awq_nibbles(parts["qweight"]), _awq_nibbles(parts["qzeros"])
    return _apply_groups(values_RC, zeros_RG, parts["scales"].t(), dtype)


def _apply_groups(
    values_RC: Tensor, zeros_RG: Tensor, scales_RG: Tensor, dtype: torch.dtype
) -> Tensor:
    """(value - zero) x scale, rounded to the dtype of the scale, then to `dtype`. Overwrites
    `values_RC`.
    """
    num_rows, num_columns = values_RC.shape
    grouped = values_RC.view(num_rows, scales_RG.shape[1], -1)
    grouped.sub_(zeros_RG.to(values_RC.dtype)[:, :, None])
    out_RC = grouped.to(scales_RG.dtype).mul_(scales_RG[:, :, None]).view(num_rows, num_columns)
    if (out_RC.dtype, dtype) == (torch.float16, torch.bfloat16):
        out_RC = out_RC.to(torch.float32)  # exact; torch's direct way is five times slower
    return out_RC.to(dtype)


def _symmetric_zero(like: Tensor) -> Tensor:
    return torch.full((1, 1), ZERO_OF_SYMMETRIC, dtype=torch.int8, device=like.device)


def _nibble_columns(words_RW: Tensor) -> Tensor:
    """[R, W] words -> [R, 8 W] of int8: nibble k of word w is column 8 w + k."""
    nibbles = words_RW.view(torch.uint8).to(torch.int16)
    nibbles = (nibbles << 4).bitwise_or_(nibbles).bitwise_and_(0x0F0F)
    return nibbles.view(torch.int8)


def _nibble_rows(words_WG: Tensor) -> Tensor:
    """[W, G] words -> [8 W, G]: nibble k of word w is row 8 w + k."""
    return _nibble_columns(words_WG.t().contiguous()).t()


def _awq_nibbles(words_CW: Tensor) -> Tensor:
    """[C, W] words -> [8 W, C] of int16: nibbles 0-7 of word w are rows 8 w + (0, 2, 4, 6, 1, 3, 5,
    7).
    """
    num_columns, num_words = words_CW.shape
    halves = words_CW.view(torch.int16).t().contiguous()
    halves = halves.view(num_words, 1, AWQ_HALVES, num_columns)
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int16, device=words_CW.device)
    nibbles = (halves >> shifts[:, None, None]).bitwise_and_(0x0F)
    return nibbles.view(8 * num_words, num_columns)


def _is_in_order(groups_C: Tensor, num_groups: int) -> bool:
    """Groups are stretches of neighbouring columns, all of one length."""
    length, rest = divmod(len(groups_C), num_groups)
    in_order = torch.arange(num_groups, dtype=groups_C.dtype, device=groups_C.device)
    return not rest and torch.equal(groups_C.view(num_groups, length), in_order[:, None].expand(-1, length))
