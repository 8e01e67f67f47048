"""Unpacks quantized weights to the dtype the model computes in, bit for bit as the libraries that
define the formats do, in few passes.

    fp8    float8 x scale, in float32, rounded once          transformers' Fp8Dequantize
    mxfp4  16 values x power of two, in bfloat16             transformers' Mxfp4Dequantize
    fp4    16 values x scale, in float32, rounded once       ModelOpt, compressed-tensors
    words  (number - zero) x scale, in the dtype of scale    compressed-tensors, GPTQ, AutoAWQ
    int8   integer x scale, in the dtype of scale            compressed-tensors
    GGML   blocks that have their scales inside              gguf

Numbers of 2, 4 or 8 bits are counted from the lowest bits of a word, words are little-endian. Every
function takes one weight; legend: R rows (outputs), C columns (inputs), G groups of columns, W
words of N numbers, r x c a grid of blocks. tests/slow_unpack.py has the reference of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ParamSpec
from moe_infinity.layout import Block, Parts, WeightLayout

# Work in pieces that stay in a core's cache: 16 ms instead of 27-68 ms for 16.6 M MXFP4 values, one
# core of an AMD EPYC.
CHUNK_VALUES = 1 << 18
WORD_BITS = 32
ZERO_OF_SYMMETRIC = 8  # the nibble that stands for 0 where no zeros are stored
# GGML's block formats, by the name of gguf.GGMLQuantizationType in lower case: how many weights a
# block has, and how many bytes.
BLOCKS = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17),
    "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74),
    "iq2_s": (256, 82), "iq3_xxs": (256, 98), "iq3_s": (256, 110), "tq1_0": (256, 54),
    "tq2_0": (256, 66), "nvfp4": (64, 36),
}  # fmt: skip


def fp8(weight_RC: Tensor, scales_rc: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn times the scale of its block; the last blocks may be cut off by the edge."""
    scales_rc = _fp8_scales(scales_rc)
    if weight_RC.device.type != "cpu" or _needs_float32(weight_RC, scales_rc):
        spread = _spread(scales_rc, block, weight_RC.shape)
        return (weight_RC.to(torch.float32) * spread).to(dtype)
    num_rows, num_columns = weight_RC.shape
    step = _rows_of_a_chunk(weight_RC.device, num_rows, num_columns)
    if len(scales_rc) == 1:  # any number of rows makes a block
        block = step, block[1]
        scales_rc = scales_rc.expand(-(-num_rows // step), -1)
    scales_rc = scales_rc * 2.0**8  # float8 bits read as float16 lack this factor
    out_RC = torch.empty(weight_RC.shape, dtype=dtype, device=weight_RC.device)
    step = max(1, step // block[0])
    for first in range(0, len(scales_rc), step):
        rows = slice(first * block[0], (first + step) * block[0])
        values = fp8_bits_as_half(weight_RC[rows]).to(torch.float32)
        values.mul_(_spread(scales_rc[first : first + step], block, values.shape))
        out_RC[rows] = values
    return out_RC


def _fp8_scales(scales: Tensor) -> Tensor:
    """[r, c] in float32. Stored bytes are exponents of two (E8M0)."""
    if scales.dtype == torch.uint8:
        scales = (scales.to(torch.float32) - 127.0).exp2()
    scales = scales.to(torch.float32)
    return scales.view(1, 1) if scales.numel() == 1 else scales


def _needs_float32(weight_RC: Tensor, scales_rc: Tensor) -> bool:
    """True if a weight is NaN, or a scale is too large to be multiplied by 2 ** 8: then torch has
    to convert the values.
    """
    if not weight_RC.numel():
        return True
    largest = weight_RC.view(torch.int8).bitwise_and(0x7F).max()
    return bool(largest == 0x7F) or not bool(scales_rc.abs().max() < 2.0**119)


def fp8_bits_as_half(weight_RC: Tensor) -> Tensor:
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
    device = blocks_RGB.device
    halves = _transposed(blocks_RGB.reshape(num_rows, -1).view(torch.int16))
    halves = halves.view(num_groups, 8, 1, num_rows)
    to_the_top = torch.arange(12, -1, -4, dtype=torch.int16, device=device)[:, None]
    exponents = scales_RG.t().to(torch.int32) - 128  # 127 and one more, so that none overflows
    scales = torch.pow(2.0, exponents).view(num_groups, 1, 1, num_rows)
    out = torch.empty((num_groups, 8, 4, num_rows), dtype=torch.bfloat16, device=device)
    step = _rows_of_a_chunk(device, num_groups, 32 * num_rows)
    for first in range(0, num_groups, step):
        part = slice(first, first + step)
        # The sign to bit 15, the others to bits 9-11: a float16 that lacks a factor of 2 ** 14.
        bits = (halves[part] << to_the_top).bitwise_right_shift_(3).bitwise_and_(-0x7200)
        values = bits.view(torch.float16).to(torch.float32)
        out[part] = values.mul_(2.0**15).mul_(scales[part])
    return out.view(-1, num_rows).to(dtype)


def fp4(
    pairs_RB: Tensor,
    scales_RG: Tensor,
    global_scale: Tensor | None,
    dtype: torch.dtype,
    *,
    is_divided: bool = False,
) -> Tensor:
    """Bytes of two values of 4 bits, the first in the lower bits, times the scale of their group,
    which is a number or, as a byte, an exponent of two. That is multiplied, or divided, by the
    global scale before. Gives [R, 2 B].
    """
    scales_RG = _fp8_scales(scales_RG)
    if global_scale is not None:
        scale = global_scale.to(torch.float32).view(1, 1)
        scales_RG = scales_RG / scale if is_divided else scales_RG * scale
    num_rows, num_groups = scales_RG.shape
    num_columns = 2 * pairs_RB.shape[1]
    out_RC = torch.empty((num_rows, num_columns), dtype=dtype, device=pairs_RB.device)
    step = _rows_of_a_chunk(pairs_RB.device, num_rows, num_columns)
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        values = _fp4_values(pairs_RB[rows]).view(-1, num_groups, num_columns // num_groups)
        out_RC[rows] = values.mul_(scales_RG[rows].unsqueeze(2)).view(-1, num_columns)
    return out_RC


def _fp4_values(pairs_RB: Tensor) -> Tensor:
    """[R, 2 B] in float32: the sign moves to bit 15, the others to bits 9-11, which makes a float16
    that lacks a factor of 2 ** 14.
    """
    bits = _nibbles(pairs_RB).to(torch.int16)
    bits = bits.bitwise_left_shift_(12).bitwise_right_shift_(3).bitwise_and_(-0x7200)
    return bits.view(torch.float16).to(torch.float32).mul_(2.0**14)


def int_rows(parts: Parts, block: Block | None, dtype: torch.dtype) -> Tensor:
    """compressed-tensors pack-quantized: values [R, W], a word being neighbouring columns, scale
    [R, G], perhaps zeros [R / N, G] in words along rows, and groups [C]. Gives [R, C].
    """
    words_RW = parts["values"]
    scales_RG = parts["scale"]
    num_rows, num_groups = scales_RG.shape
    num_columns = num_groups * block[1] if block else parts["groups"].numel()
    bits = WORD_BITS * words_RW.shape[1] // num_columns
    if (zeros_WG := parts.get("zeros")) is None:
        zeros_RG = torch.full_like(scales_RG, 1 << (bits - 1))
    else:
        zeros_RG = _numbers(_transposed(zeros_WG), bits).t()[:num_rows]
    zeros_RG, scales_RG = _of_columns(parts.get("groups"), zeros_RG, scales_RG)
    return _apply_groups(words_RW, partial(_numbers, bits=bits), zeros_RG, scales_RG, dtype)


def int8_rows(weight_RC: Tensor, scales_R1: Tensor, dtype: torch.dtype) -> Tensor:
    """compressed-tensors int-quantized: an integer times the scale of its row; computed in float32,
    from which the product is rounded as in `_apply_groups`.
    """
    wide_R1 = scales_R1.to(torch.float32)
    out_RC = torch.empty(weight_RC.shape, dtype=dtype, device=weight_RC.device)
    step = _rows_of_a_chunk(weight_RC.device, *weight_RC.shape)
    for first in range(0, len(weight_RC), step):
        rows = slice(first, first + step)
        values = weight_RC[rows].to(torch.float32).mul_(wide_R1[rows])
        out_RC[rows] = values.to(scales_R1.dtype)
    return out_RC


def gptq(
    parts: Parts, block: Block | None, dtype: torch.dtype, *, adds_one_to_zeros: bool
) -> Tensor:
    """values [C / N, R], zeros [G, R / N], scale [G, R], perhaps groups [C]; the last group may be
    shorter than `block`. Gives [R, C].
    """
    zeros_GW = parts["zeros"]
    scales_RG = parts["scale"].t()
    num_rows, num_groups = scales_RG.shape
    bits = WORD_BITS * zeros_GW.shape[1] // num_rows
    groups_C = parts.get("groups")
    num_columns = WORD_BITS // bits * parts["values"].shape[0]
    if groups_C is None and block is not None and num_groups * block[1] != num_columns:
        groups_C = torch.arange(num_columns, device=zeros_GW.device) // block[1]
    if adds_one_to_zeros:  # one to each number; a carry goes into the next, as in GPTQModel
        zeros_GW = zeros_GW + sum(1 << place for place in range(0, WORD_BITS, bits))
    zeros_RG, scales_RG = _of_columns(groups_C, _numbers(zeros_GW, bits).t(), scales_RG)
    words_RW = _transposed(parts["values"])
    return _apply_groups(words_RW, partial(_numbers, bits=bits), zeros_RG, scales_RG, dtype)


def _of_columns(
    groups_C: Tensor | None, zeros_RG: Tensor, scales_RG: Tensor
) -> tuple[Tensor, Tensor]:
    """Zeros and scales of each column, unless groups are runs of columns, all of one length."""
    num_groups = scales_RG.shape[1]
    if groups_C is None or _is_in_order(groups_C, num_groups):
        return zeros_RG, scales_RG
    if groups_C.min() < 0 or groups_C.max() >= num_groups:
        raise CheckpointError(f"g_idx names groups beyond the {num_groups} there are")
    return zeros_RG.t()[groups_C].t(), scales_RG.t()[groups_C].t()


def awq(parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """values [C, R/8], zeros [G, R/8], scale [G, R]; gives [R, C]."""
    words = _awq_words(parts["values"])
    zeros = _awq_words(parts["zeros"])
    return _apply_groups(words, _awq_nibbles, _awq_nibbles(zeros), parts["scale"].t(), dtype)


def _apply_groups(
    words: Tensor,
    numbers_of: Callable[[Tensor], Tensor],
    zeros_RG: Tensor,
    scales_RG: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """(number - zero) x scale, rounded to the dtype of the scale, then to `dtype`.

    Computed in float32, where torch's CPU loops are fastest: the difference is exact in it, and the
    product rounded from it is that of the narrower dtypes.
    """
    num_rows, num_groups = scales_RG.shape
    scales_RG1, zeros_RG1 = (
        t.to(torch.float32).contiguous().unsqueeze(2) for t in (scales_RG, zeros_RG)
    )
    is_rounded_twice = scales_RG.dtype not in (torch.float32, dtype)
    rows_of_a_word = num_rows // len(words)
    num_columns = numbers_of(words[:1]).numel() // rows_of_a_word
    out_RC = torch.empty((num_rows, num_columns), dtype=dtype, device=words.device)
    step = _rows_of_a_chunk(words.device, len(words), rows_of_a_word * num_columns)
    for first in range(0, len(words), step):
        rows = slice(first * rows_of_a_word, (first + step) * rows_of_a_word)
        values = numbers_of(words[first : first + step]).to(torch.float32)
        grouped = values.view(len(values), num_groups, -1)
        grouped.sub_(zeros_RG1[rows]).mul_(scales_RG1[rows])
        if is_rounded_twice:
            values = values.to(scales_RG.dtype).to(torch.float32)
        out_RC[rows] = values
    return out_RC


def _nibbles(words_RW: Tensor) -> Tensor:
    """[R, W] words -> [R, 8 W] of int8: nibble k of word w is column 8 w + k."""
    nibbles = words_RW.view(torch.uint8).to(torch.int16)
    nibbles = (nibbles << 4).bitwise_or_(nibbles).bitwise_and_(0x0F0F)
    return nibbles.view(torch.int8)


def _numbers(words_RW: Tensor, bits: int) -> Tensor:
    """[R, W] words -> [R, N W]: number k of word w is column N w + k."""
    if bits == 4:
        return _nibbles(words_RW)
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=words_RW.device)
    numbers = words_RW.view(torch.uint8).unsqueeze(2) >> places
    return numbers.bitwise_and_((1 << bits) - 1).flatten(1)


def _awq_words(words_CW: Tensor) -> Tensor:
    """[C, W] words -> [W, 2, C] half-words."""
    num_columns, num_words = words_CW.shape
    return _transposed(words_CW.view(torch.int16)).view(num_words, 2, num_columns)


def _awq_nibbles(halves_W2C: Tensor) -> Tensor:
    """[W, 2, C] half-words -> [8 W, C] of int16: nibbles 0 to 7 of word w are rows 8 w + (0, 2, 4,
    6, 1, 3, 5, 7).
    """
    shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=halves_W2C.device)
    nibbles = (halves_W2C.unsqueeze(1) >> shifts[:, None, None]).bitwise_and_(0x0F)
    return nibbles.view(-1, halves_W2C.shape[2])


def _transposed(words: Tensor) -> Tensor:
    """The transpose, always as a copy: where a side is 1 `contiguous()` makes none, and bytes could
    not be viewed.
    """
    return words.t().clone(memory_format=torch.contiguous_format)


def _is_in_order(groups_C: Tensor, num_groups: int) -> bool:
    """True if every group is a run of neighbouring columns, all of one length."""
    length, rest = divmod(len(groups_C), num_groups)
    if rest:
        return False
    in_order = torch.arange(num_groups, dtype=groups_C.dtype, device=groups_C.device)
    return torch.equal(groups_C, in_order.repeat_interleave(length))


def _rows_of_a_chunk(device: torch.device, num_rows: int, num_columns: int) -> int:
    """The number of rows to unpack at once; on a GPU all of them."""
    if device.type != "cpu":
        return max(1, num_rows)
    return max(1, CHUNK_VALUES // max(1, num_columns))


# GGML's block formats, as GGUF files have them. A weight [R, C] is one run of bytes: its rows one
# after the other, each a sequence of blocks that have their scales inside.


def blocks_layout(name: str, shape_RC: tuple[int, int], values: ParamSpec) -> WeightLayout:
    """The layout of a weight [R, C] whose bytes are `values`, uint8 [R, bytes of a row]."""
    kind = f"ggml_{name}" if name in ("mxfp4", "nvfp4") else name  # those have scales apart
    return WeightLayout(kind, shape_RC, values, unpack=partial(_blocks, name))


def row_bytes(name: str, num_columns: int) -> int:
    """The bytes of a row of `num_columns` weights, a multiple of those of a block."""
    weights, num_bytes = BLOCKS[name]
    return num_columns // weights * num_bytes


def _blocks(name: str, parts: Parts, block: Block | None, dtype: torch.dtype) -> Tensor:
    """gguf's definition. For some types transformers computes the same bits with torch, two to ten
    times as fast (private name used: `dequantize`).
    """
    from gguf import GGMLQuantizationType, quants
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    values = parts["values"]
    kind = GGMLQuantizationType[name.upper()]
    if kind in GGML_BLOCK:
        weight: Tensor = dequantize(values, kind).view(*values.shape[:-1], -1)
    else:
        weight = torch.from_numpy(quants.dequantize(values.cpu().numpy(), kind))
    return weight.to(values.device, dtype)
