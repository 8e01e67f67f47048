"""Attention of one query per head, from the cache where it lies: for decode steps. Scores, softmax
and sums in float32; rounded once.

    for each sequence and head of keys
        scores    the query times every key     rows.py: keys are rows of a weight
        softmax   of scores and mask
        sum       of values, weighted

torch's kernel is made for many queries: 16 heads of 128 and 1000 tokens in bf16 take it 3.6 ms,
this 0.4 (one thread). Prompts are computed by prompt_attention.py, and what lies between by torch.

Legend: B sequences, H heads, G heads of keys and values, T queries, N tokens of the cache, d width
of a head, dv of a value.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu.arrangement import arranged
from moe_infinity.kernels.cpu.compiler import machine_code
from moe_infinity.kernels.cpu.prompt_attention import attend_prompt, bounds_of, causal_bounds
from moe_infinity.kernels.cpu.rows import row_function
from moe_infinity.kernels.cpu.steps import LOADERS, arguments_for, loop_for
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I64,
    LANES,
    all_lanes,
    exponential,
    float_at,
    fma,
    larger,
    largest_of_lanes,
    load,
    number_at,
    put_float,
    repeated,
    sum_of_lanes,
)
from moe_infinity.kernels.cpu.work import call_rows
from moe_infinity.kernels.kv_rows import LARGEST
from moe_infinity.kernels.many_rows import MOST_TOKENS
from moe_infinity.layout import KINDS

QUERIES = 512  # of a block
KEYS = 512  # that torch's kernel takes at once: leaving out all of them changes no bit
FINITE = 1e30  # more than any score
MAX_WIDTH = 16 * LANES  # of values: as many sums as a machine has registers


def attend_grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    sinks_H: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor | None:
    """Attend: [B, H, T, d], [B, G, N, d], [B, G, N, dv] -> [B, T, H, dv]. One query is computed by
    `attend`, and more than MOST_TOKENS by `attend_prompt`. Others with a mask are computed by
    torch, a block of one sequence at a time, because torch makes numbers of the whole mask that it
    gets. Groups of heads are sequences to it, whose keys all heads share; transformers copies them
    for each head. On machines that were tried the bits are the same. Sinks are numbers in the
    softmax that have no value. Without a mask, `is_causal` says what a query sees of as many keys.
    None: it is left to the caller.
    """
    num_seqs, num_heads, num_queries, _ = query.shape
    if num_queries == 1 and sinks_H is None:
        out = attend(query, key, value, mask, scale)
        return None if out is None else out[:, None]
    if num_queries > MOST_TOKENS and query.device.type == "cpu":
        bounds = _bounds(mask, num_queries, key.shape[2], is_causal)
        if bounds is not None:
            out = attend_prompt(query, key, value, bounds, scale, sinks_H)
            if out is not None:
                return out
    if mask is None or mask.dim() != 4 or mask.shape[-1] != key.shape[2]:
        return None
    if query.device.type != "cpu" or (sinks_H is not None and mask.dtype == torch.bool):
        return None
    out = query.new_empty(num_seqs, num_queries, num_heads, value.shape[3])
    value = as_wide_as(key, value)
    by_group = (key.shape[1], num_heads // key.shape[1])
    for seq, start in product(range(num_seqs), range(0, num_queries, QUERIES)):
        of_seq = mask[seq % len(mask)]
        of_block = of_seq if of_seq.shape[1] == 1 else of_seq[:, start : start + QUERIES]
        of_block = of_block.unflatten(0, by_group) if len(of_block) > 1 else of_block[None]
        n = num_seen(of_block)
        given = (
            query[seq, :, start : start + QUERIES].unflatten(0, by_group),
            key[seq, :, None, :n].expand(-1, by_group[1], -1, -1),
            value[seq, :, None, :n].expand(-1, by_group[1], -1, -1),
        )
        if sinks_H is None:
            seen = functional.scaled_dot_product_attention(*given, of_block[..., :n], scale=scale)
        else:
            seen = _with_sinks(*given, of_block, scale, sinks_H.view(by_group))
        seen = seen.flatten(0, 1)[..., : out.shape[3]]
        out[seq, start : start + QUERIES] = seen.transpose(0, 1)
    return out


def _bounds(
    mask: Tensor | None, num_queries: int, num_keys: int, is_causal: bool | None
) -> Tensor | None:
    if mask is not None or is_causal is False:
        return bounds_of(mask, num_queries, num_keys)
    return causal_bounds(num_queries) if is_causal and num_queries == num_keys else None


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks_GH: Tensor
) -> Tensor:
    """The same as torch's function with a sink for each head. The mask is added."""
    attend_and_log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen, log_sum = attend_and_log(query, key, value, attn_mask=mask.to(query.dtype), scale=scale)
    share = torch.sigmoid(log_sum - sinks_GH.float()[..., None])[..., None]
    found: Tensor = (seen * share).to(query.dtype)
    return found


def as_wide_as(key: Tensor, value: Tensor) -> Tensor:
    """Values with zeros added, where keys are wider. Otherwise torch keeps a score for each query,
    key and head, which takes 11 bytes in bfloat16, and needs 3 times as long.
    """
    missing = key.shape[-1] - value.shape[-1]
    is_for_cpu = value.device.type == "cpu"
    return functional.pad(value, (0, missing)) if is_for_cpu and missing > 0 else value


def num_seen(mask: Tensor) -> int:
    """The number of keys, from the first one on, that some query sees by a mask, and of those that
    torch takes together with the last.
    """
    count = mask.shape[-1]
    while mask.dtype == torch.bool and count > KEYS:
        last = (count - 1) // KEYS * KEYS
        if mask[..., last:count].any():
            break
        count = last
    return count


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor | None:
    """Attend: [B, H, 1, d], [B, G, N, d], [B, G, N, dv] -> [B, H, dv]. The mask is added, or says
    where to look if it is bool; [B or 1, H or 1, 1, N]. None: not for these shapes, dtypes or
    devices.
    """
    num_seqs, num_groups, num_tokens, width = key.shape
    value_width = value.shape[3]
    num_heads = query.shape[1]
    kind = KINDS.get(query.dtype)
    loop = None if kind is None else loop_for(kind, width, group=width, scale=None)
    fits = value_width % LANES == 0 and value_width <= MAX_WIDTH and num_tokens > 0
    fits &= num_heads % num_groups == 0
    alike = query.dtype == key.dtype == value.dtype and key.stride(3) == value.stride(3) == 1
    if loop is None or not (fits and alike) or query.device.type != "cpu":
        return None
    if width % loop.num_columns and key.stride(2) != width:  # the last step would begin elsewhere
        return None
    x = arranged((query.reshape(-1, width).to(torch.float32) * scale).numpy(), loop)
    in_row = -(-num_tokens // LANES) * LANES
    scores = host_float32(num_seqs, num_heads, in_row).fill_(-torch.inf)
    out = host_float32(num_seqs, num_heads, value_width).zero_()
    bias = None if mask is None else _bias(mask).expand(num_seqs, num_heads, 1, num_tokens)
    arguments = arguments_for(loop, (num_tokens, width), (1, width), 1)
    arguments = arguments._replace(row_bytes=key.stride(2) * key.itemsize, out_bytes=4 * in_row)
    packed: NDArray[np.int64] = np.array(arguments, np.int64)
    attention(str(kind), value_width // LANES)(
        row_function(loop).address, packed.ctypes.data, x.ctypes.data, arguments.x_bytes,
        key.data_ptr(), *_bytes(key)[:2], value.data_ptr(), *_bytes(value),
        *((0, 0, 0) if bias is None else (bias.data_ptr(), *_bytes(bias)[:2])),
        scores.data_ptr(), 4 * in_row, out.data_ptr(),
        num_seqs, num_heads, num_heads // num_groups, num_tokens,
    )  # fmt: skip
    return out.to(query.dtype)


def _bytes(tensor: Tensor) -> tuple[int, int, int]:
    """The bytes from one sequence, head and token to the next."""
    seq, head, token, _ = tensor.stride()
    return seq * tensor.itemsize, head * tensor.itemsize, token * tensor.itemsize


def _bias(mask: Tensor) -> Tensor:
    """The mask as float32 to add to scores."""
    if mask.dtype == torch.bool:
        return host_float32(*mask.shape).zero_().masked_fill_(~mask, -torch.inf)
    return mask.to(torch.float32).contiguous()


@cache
def attention(kind: str, num_vectors: int) -> Any:
    """Machine code for a cache of this kind whose values are `num_vectors` vectors wide. Its
    arguments are addresses, and strides in bytes from one sequence, head or token to the next.
    """

    # fmt: off
    def attend_all(  # type: ignore[no-untyped-def]
        score, arguments, x, x_bytes,
        key, key_seq, key_head, value, value_seq, value_head, value_row,
        bias, bias_seq, bias_head, scores, score_row, out,
        num_seqs, num_heads, per_group, num_tokens,
    ):  # fmt: on
        for row in range(num_seqs * num_heads):
            seq = row // num_heads
            head = row % num_heads
            group = head // per_group
            at = scores + score_row * row
            if head % per_group == 0:  # all queries of a group at once
                keys = key + seq * key_seq + group * key_head
                queries = x + row * x_bytes
                call_rows(score, 0, num_tokens, queries, per_group, at, arguments, keys)
            if bias:
                added = bias + seq * bias_seq + head * bias_head
                for i in range(num_tokens):
                    extra = float_at(added, i)
                    is_hidden = extra == -math.inf  # whatever its score
                    put_float(at, i, extra if is_hidden else float_at(at, i) + extra)
            values = value + seq * value_seq + group * value_head
            to = out + 4 * LANES * num_vectors * row
            num_steps = score_row // (4 * LANES)
            weigh(kind, num_vectors, at, num_steps, values, value_row, num_tokens, to)

    attend_all.__name__ = attend_all.__qualname__ = f"attend_{kind}_{num_vectors}"
    return machine_code(types.void(*[types.int64] * 21))(attend_all)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh(
    _: Any, kind: Any, num_vectors: Any, scores: Any, steps: Any, rows: Any, row: Any, count: Any,
    out: Any,
) -> Any:  # fmt: skip
    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        return _emit_weigh(kind.literal_value, num_vectors.literal_value, context, b, args[2:])

    return types.void(kind, num_vectors, *[types.int64] * 6), emit


def _emit_weigh(kind: str, num_vectors: int, context: Any, b: Any, args: Any) -> Any:
    """Emit out = the sum of rows, weighted by the softmax of scores. Overwrites scores."""
    scores, num_steps, rows, row_bytes, num_rows, out = args
    largest = cgutils.alloca_once_value(b, all_lanes(F32, -math.inf))
    total = cgutils.alloca_once_value(b, FLOATS(None))
    with cgutils.for_range(b, num_steps, intp=I64) as loop:
        found = load(b, b.add(scores, b.mul(loop.index, I64(4 * LANES))), 0, F32)
        b.store(larger(b, found, b.load(largest)), largest)
    # where all is masked, the largest is -inf, which must not be subtracted
    peak = larger(b, repeated(b, largest_of_lanes(b, b.load(largest))), all_lanes(F32, -FINITE))
    with cgutils.for_range(b, num_steps, intp=I64) as loop:
        at = b.add(scores, b.mul(loop.index, I64(4 * LANES)))
        below = b.fsub(load(b, at, 0, F32), peak)
        value = exponential(b, below)
        value = b.select(b.fcmp_unordered("uno", below, below), below, value)  # NaN stays
        b.store(value, b.inttoptr(at, FLOATS.as_pointer()), align=4)
        b.store(b.fadd(value, b.load(total)), total)
    sums = [cgutils.alloca_once_value(b, FLOATS(None)) for _ in range(num_vectors)]
    loader = LOADERS[kind]
    with cgutils.for_range(b, num_rows, intp=I64) as loop:
        weight = number_at(b, b.add(scores, b.mul(loop.index, I64(4))), 0, F32)
        row = b.add(rows, b.mul(loop.index, row_bytes))
        if kind in LARGEST:  # packed: the scale is behind the codes
            scale = b.fmul(number_at(b, row, LANES * num_vectors, F32), F32(loader.left_out))
            weight = b.fmul(weight, scale)
        weight = repeated(b, weight)
        for so_far, value in zip(sums, loader.load(b, num_vectors, row), strict=True):
            b.store(fma(b, value, weight, b.load(so_far)), so_far)
    whole = larger(b, repeated(b, sum_of_lanes(b, b.load(total))), all_lanes(F32, 1 / FINITE))
    for k, so_far in enumerate(sums):
        pointer = b.inttoptr(b.add(out, I64(4 * LANES * k)), FLOATS.as_pointer())
        b.store(b.fdiv(b.load(so_far), whole), pointer, align=4)
    return context.get_dummy_value()
