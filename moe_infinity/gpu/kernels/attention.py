"""Attention of one new token of each sequence to those in the cache. A tensor on the device says
where these are: when buffers grow and move, a CUDA graph stays as it is.

    attend    [split, head of the cache]   of some chunks of tokens: sum of weights times values
    combine   [head, block of columns]     the sums of all splits, each with its weight

A key is multiplied in two pieces, whose widths are powers of two. Of latents (DeepSeek's multi-head
latent attention, whose cache has a latent and a rotated key for each token, the same for all heads)
these are the latent and the rotated key, and the latent is the value as well, and is read once.

Chunk c belongs to split c % S, and S depends on the number of heads alone. So a sequence's result
depends neither on the others, nor on how large the buffers are, nor on where they are. A split
without tokens has a total of 0, and nothing else of it is looked at.

Legend: B sequences, G heads of the cache, H of queries, N tokens, d columns of a key, v of a value,
r of a latent, p of a rotated key, S splits, C tokens of a chunk, M heads of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.gpu.kernels.descriptions import (
    TILE,
    AttentionShape,
    CachedLayer,
    shape_of,
    shape_of_latents,
)
from moe_infinity.kernels.triton.experts import product
from moe_infinity.kernels.triton.slot_mlp import LOAD_BYTES

# Where each field of a CachedLayer is, in their order.
_KEYS, _VALUES, _KEY_SEQ, _KEY_HEAD, _VALUE_SEQ, _VALUE_HEAD, _NUM_TOKENS, _MASK, _MASK_SEQ = map(
    tl.constexpr, range(len(CachedLayer._fields))
)
_LOAD_BYTES = tl.constexpr(LOAD_BYTES)

COLUMNS = 64  # that a program of combine sums
WARPS = 4
STAGES = 2  # chunks whose loads are under way
EVERY_TOKEN = (1 << 31) - 1


def attend(
    query_BHd: Tensor,
    key_BGd: Tensor,
    value_BGv: Tensor,
    cached: Tensor,
    sinks_H: Tensor | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return [B, H, v] in the dtype of the query. `cached` is a CachedLayer in int64. The new key
    and value are written to the cache, as its last token. That one is looked at whatever the mask
    says, and the `window` - 1 before it. `sinks_H` has a score for each head that takes part in
    the softmax and has no value. Rows are contiguous, and of one dtype, as the cache is.
    """
    num_seqs, num_heads, width = query_BHd.shape
    num_groups = value_BGv.shape[1]
    assert key_BGd.shape == (num_seqs, num_groups, width), key_BGd.shape
    assert num_heads % num_groups == 0, (num_heads, num_groups)
    shape = shape_of(query_BHd, value_BGv, softcap is not None)
    more_BHp = query_BHd[..., shape.columns :] if shape.more_width else query_BHd
    softmax = scale, window or EVERY_TOKEN, 1.0 if softcap is None else softcap
    return _launch(query_BHd, more_BHp, key_BGd, value_BGv, cached, sinks_H, softmax, shape)


def attend_latent(
    query_BHr: Tensor,
    rotated_BHp: Tensor,
    latent_Br: Tensor,
    key_Bp: Tensor,
    cached: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Return the weighted sums of latents [B, H, r], in the dtype of the query. `cached` is a
    CachedLayer in int64: its keys are latents [B, 1, N, r], its values rotated keys [B, 1, N, p],
    and the new ones are written to them, as the last token.
    """
    shape = shape_of_latents(query_BHr.shape[1], latent_Br, key_Bp)
    softmax = scale, EVERY_TOKEN, 1.0
    new = latent_Br[:, None], key_Bp[:, None]
    return _launch(query_BHr, rotated_BHp, *new, cached, None, softmax, shape)


def _launch(
    query: Tensor,
    more: Tensor,
    key: Tensor,
    value: Tensor,
    cached: Tensor,
    sinks_H: Tensor | None,
    softmax: tuple[float, int, float],  # scale, window, softcap
    shape: AttentionShape,
) -> Tensor:
    given = query, more, key, value
    assert all(t.stride(2) == 1 and t.dtype == query.dtype for t in given), given
    num_seqs, num_heads, _ = query.shape
    size = num_seqs, num_heads, shape.splits
    width = shape.value_width
    sum_BHSv = torch.empty(*size, width, dtype=torch.float32, device=query.device)
    highest_BHS = torch.empty(size, dtype=torch.float32, device=query.device)
    total_BHS = torch.empty(size, dtype=torch.float32, device=query.device)
    sums = sum_BHSv, highest_BHS, total_BHS
    _attend[(shape.splits, num_seqs * shape.groups * shape.blocks)](
        *given,
        cached,
        *sums,
        *(stride for t in given for stride in t.stride()[:2]),
        *softmax,
        SHAPE=shape,
        TILE=TILE,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    out_BHv = query.new_empty(num_seqs, num_heads, width)
    columns = min(COLUMNS, shape.value_columns)
    _combine[(num_seqs * num_heads, triton.cdiv(width, columns))](
        *sums,
        sinks_H,
        out_BHv,
        HEADS=num_heads,
        SHAPE=shape,
        COLUMNS=columns,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return out_BHv


@triton.jit(do_not_specialize=["cached", "scale", "window", "softcap"])
def _attend(
    query,
    more,
    key,
    value,
    cached,
    sum_BHSv,
    highest_BHS,
    total_BHS,
    query_seq,
    query_head,
    more_seq,
    more_head,
    key_seq,
    key_head,
    value_seq,
    value_head,
    scale,
    window,
    softcap,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    seq, group, head_M, is_head_M = _heads_of(SHAPE, TILE)
    out_M = (seq * (SHAPE.groups * SHAPE.per_group) + head_M) * SHAPE.splits + split

    num_tokens = tl.load(cached + _NUM_TOKENS)
    first_token = tl.maximum(num_tokens - window, 0)
    first_chunk = _first_chunk(first_token // SHAPE.chunk, split, SHAPE)
    last_chunk = (num_tokens - 1) // SHAPE.chunk
    if first_chunk > last_chunk:
        tl.store(total_BHS + out_M, tl.zeros((TILE,), tl.float32), mask=is_head_M)
        return

    DTYPE: tl.constexpr = key.dtype.element_ty
    at_key = seq * tl.load(cached + _KEY_SEQ) + group * tl.load(cached + _KEY_HEAD)
    at_value = seq * tl.load(cached + _VALUE_SEQ) + group * tl.load(cached + _VALUE_HEAD)
    keys = _rows_at(tl.load(cached + _KEYS), at_key, DTYPE)
    values = _rows_at(tl.load(cached + _VALUES), at_value, DTYPE)
    if split == last_chunk % SHAPE.splits:
        _append(key + seq * key_seq + group * key_head, keys, num_tokens, SHAPE.key_row)
        _append(value + seq * value_seq + group * value_head, values, num_tokens, SHAPE.value_row)
        tl.debug_barrier()  # other threads read it
    query_M1 = (query + seq * query_seq + head_M * query_head)[:, None]
    query_Md = _load_rows(query_M1, is_head_M, SHAPE.key_row, SHAPE.columns)
    more_Mp = query_Md
    if SHAPE.more_width > 0:
        more_M1 = (more + seq * more_seq + head_M * more_head)[:, None]
        more_Mp = _load_rows(more_M1, is_head_M, SHAPE.more_width, SHAPE.more_columns)
    tokens = first_token, num_tokens, first_chunk, last_chunk
    sum_Mv, highest_M, total_M = _attend_chunks(
        query_Md, more_Mp, keys, values, tokens, _mask_of(cached, seq), scale, softcap, SHAPE
    )
    column_v = tl.arange(0, SHAPE.value_columns)
    at_Mv = out_M[:, None] * SHAPE.value_width + column_v[None, :]
    is_out_Mv = is_head_M[:, None] & (column_v < SHAPE.value_width)[None, :]
    tl.store(sum_BHSv + at_Mv, sum_Mv, mask=is_out_Mv)
    tl.store(highest_BHS + out_M, highest_M, mask=is_head_M)
    tl.store(total_BHS + out_M, total_M, mask=is_head_M)


@triton.jit
def _heads_of(SHAPE: tl.constexpr, TILE: tl.constexpr):
    """The sequence and the group of this program, and which heads there are."""
    at = tl.program_id(1)
    seq = (at // (SHAPE.groups * SHAPE.blocks)).to(tl.int64)
    group = at // SHAPE.blocks % SHAPE.groups
    head_M = at % SHAPE.blocks * TILE + tl.arange(0, TILE)
    return seq, group, group * SHAPE.per_group + head_M, head_M < SHAPE.per_group


@triton.jit
def _first_chunk(least, split, SHAPE: tl.constexpr):
    """The first chunk of a split that is not before `least`."""
    return least + (split + SHAPE.splits - least % SHAPE.splits) % SHAPE.splits


@triton.jit
def _rows_at(address, offset, DTYPE: tl.constexpr):
    """The rows of a head; 16 bytes at once can be loaded from there."""
    rows = address.to(tl.pointer_type(DTYPE)) + offset
    return tl.multiple_of(rows, _LOAD_BYTES)


@triton.jit
def _mask_of(cached, seq):
    """Return the mask of the sequence, and whether there is one."""
    mask = tl.load(cached + _MASK)
    place = mask + seq * tl.load(cached + _MASK_SEQ)
    return place.to(tl.pointer_type(tl.uint8)), mask != 0


@triton.jit
def _append(row, rows, num_tokens, WIDTH: tl.constexpr):
    """Write a row as the last of some."""
    last = rows + (num_tokens - 1) * WIDTH
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    is_column = column < WIDTH
    tl.store(last + column, tl.load(row + column, mask=is_column), mask=is_column)


@triton.jit
def _attend_chunks(
    query_Md, more_Mp, keys, values, tokens, masked, scale, softcap, SHAPE: tl.constexpr
):
    """Return of all chunks of this split the sum of weights times values, the highest score, and
    the sum of weights, which are exp(score - highest score).
    """
    CHUNK: tl.constexpr = SHAPE.chunk
    VALUE_COLUMNS: tl.constexpr = SHAPE.value_columns
    first_token, num_tokens, first_chunk, last_chunk = tokens
    mask, has_mask = masked
    highest_M = tl.full((query_Md.shape[0],), float("-inf"), tl.float32)
    total_M = tl.zeros((query_Md.shape[0],), tl.float32)
    sum_Mv = tl.zeros((query_Md.shape[0], VALUE_COLUMNS), tl.float32)
    for chunk in tl.range(first_chunk, last_chunk + 1, SHAPE.splits):
        token_C = chunk * CHUNK + tl.arange(0, CHUNK)
        is_there_C = token_C < num_tokens
        is_seen_C = tl.load(mask + token_C, mask=is_there_C & has_mask, other=1) != 0
        is_seen_C |= token_C == num_tokens - 1
        is_seen_C &= is_there_C & (token_C >= first_token)
        key_C1 = keys + token_C[:, None] * SHAPE.key_row
        value_C1 = values + token_C[:, None] * SHAPE.value_row
        key_Cd = _load_rows(key_C1, is_seen_C, SHAPE.key_row, SHAPE.columns)
        score_MC = product(query_Md, tl.trans(key_Cd), None)
        if SHAPE.more_width > 0:
            more_C1 = value_C1 if SHAPE.is_latent else key_C1 + SHAPE.columns
            more_Cp = _load_rows(more_C1, is_seen_C, SHAPE.more_width, SHAPE.more_columns)
            score_MC = product(more_Mp, tl.trans(more_Cp), score_MC)
        score_MC *= scale
        if SHAPE.has_softcap:  # tanh(x) = 2 sigmoid(2 x) - 1
            score_MC = softcap * (2.0 * tl.sigmoid(2.0 / softcap * score_MC) - 1.0)
        score_MC = tl.where(is_seen_C[None, :], score_MC, float("-inf"))

        before_M = highest_M
        highest_M = tl.maximum(before_M, tl.max(score_MC, 1))
        # -inf - -inf is not a number.
        base_M = tl.where(highest_M == float("-inf"), 0.0, highest_M)
        weight_MC = tl.exp(score_MC - base_M[:, None])
        shrink_M = tl.exp(before_M - base_M)
        total_M = total_M * shrink_M + tl.sum(weight_MC, 1)
        value_Cv = key_Cd
        if not SHAPE.is_latent:
            value_Cv = _load_rows(value_C1, is_seen_C, SHAPE.value_row, VALUE_COLUMNS)
        sum_Mv = product(weight_MC.to(value_Cv.dtype), value_Cv, sum_Mv * shrink_M[:, None])
    return sum_Mv, highest_M, total_M


@triton.jit
def _load_rows(row_R1, is_row_R, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The first columns of rows; 0 beyond the last, and where there is no row."""
    column_K = tl.arange(0, COLUMNS)
    is_there_RK = is_row_R[:, None]
    if COLUMNS > WIDTH:
        is_there_RK = is_there_RK & (column_K < WIDTH)[None, :]
    return tl.load(row_R1 + column_K[None, :], mask=is_there_RK, other=0.0)


@triton.jit
def _combine(
    sum_RSv,
    highest_RS,
    total_RS,
    sinks_H,
    out_Rv,
    HEADS: tl.constexpr,
    SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """R is a head of a sequence."""
    row = tl.program_id(0).to(tl.int64)
    column_v = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_v = column_v < SHAPE.value_width
    at_S = row * SHAPE.splits + tl.arange(0, SHAPE.splits)
    total_S = tl.load(total_RS + at_S)
    highest_S = tl.load(highest_RS + at_S, mask=total_S != 0.0, other=float("-inf"))
    highest = tl.max(highest_S, 0)
    if sinks_H is not None:
        sink = tl.load(sinks_H + row % HEADS).to(tl.float32)
        highest = tl.maximum(highest, sink)
    share_S = tl.exp(highest_S - highest)
    total = tl.sum(share_S * total_S, 0)
    if sinks_H is not None:
        total += tl.exp(sink - highest)
    share_S /= total
    at_Sv = at_S[:, None] * SHAPE.value_width + column_v[None, :]
    is_there_Sv = (share_S != 0.0)[:, None] & is_column_v[None, :]
    sum_Sv = tl.load(sum_RSv + at_Sv, mask=is_there_Sv, other=0.0)
    out_v = tl.sum(share_S[:, None] * sum_Sv, 0).to(out_Rv.dtype.element_ty)
    tl.store(out_Rv + row * SHAPE.value_width + column_v, out_v, mask=is_column_v)
