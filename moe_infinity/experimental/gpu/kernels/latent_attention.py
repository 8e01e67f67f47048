"""Attention of one new token of each sequence to latents: DeepSeek's multi-head latent attention,
whose cache has a latent and a rotated key for each token, the same for all heads. A latent is key
and value at once, and is read once for both.

    attend_latent  [split, tile of heads]     of some chunks of tokens: sum of weights times latents
    expand         [head, block of columns]   the sums of all splits, times what expands a latent

Splits are those of attention.py.

Legend: as in attention.py, and r columns of a latent, p of a rotated key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.attention import CHUNK as MOST_TOKENS
from moe_infinity.experimental.gpu.kernels.attention import (
    CHUNK_BYTES,
    MAX_SPLITS,
    STAGES,
    TILE,
    WARPS,
    AttentionShape,
    add_chunk,
    append,
    heads_of,
    load_rows,
    mask_of,
    num_tokens_of,
    places_of,
    product,
    rows_at,
    shares_of,
)
from moe_infinity.experimental.gpu.kernels.slot_mlp import LOAD_BYTES

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)

COLUMNS = 32  # of values, that a program of expand makes
RANK_BLOCK = 64  # columns of latents that it sums together


def shape_of_latents(num_heads: int, latent_Br: Tensor, key_Bp: Tensor) -> AttentionShape:
    rank = latent_Br.shape[1]
    columns = max(triton.next_power_of_2(rank), TILE)
    more_columns = max(triton.next_power_of_2(key_Bp.shape[1]), TILE)
    token_bytes = (columns + more_columns) * latent_Br.element_size()
    chunk = MOST_TOKENS
    while chunk > TILE and chunk * token_bytes > CHUNK_BYTES:
        chunk //= 2
    return AttentionShape(
        groups=1,
        per_group=num_heads,
        blocks=triton.cdiv(num_heads, TILE),
        width=rank,
        value_width=rank,
        columns=columns,
        more_columns=more_columns,
        value_columns=columns,
        chunk=chunk,
        splits=MAX_SPLITS,
        has_softcap=False,
    )


def attend_latent(
    query_BHr: Tensor,
    rotated_BHp: Tensor,
    latent_Br: Tensor,
    key_Bp: Tensor,
    expand_Hvr: Tensor,
    cached: Tensor,
    *,
    scale: float,
) -> Tensor:
    """[B, H, v] in the dtype of the query. `cached` is a CachedLayer in int64: its keys are latents
    [B, 1, N, r], its values rotated keys [B, 1, N, p], and the new ones are written to them, as the
    last token. Rows are contiguous, and of one dtype, as the cache is. The sum of latents is
    rounded before it is expanded.
    """
    num_seqs, num_heads, rank = query_BHr.shape
    given = query_BHr, rotated_BHp, latent_Br, key_Bp
    assert all(t.stride(-1) == 1 and t.dtype == query_BHr.dtype for t in given), given
    assert latent_Br.shape == (num_seqs, rank), latent_Br.shape
    shape = shape_of_latents(num_heads, latent_Br, key_Bp)
    size = num_seqs, num_heads, shape.splits
    device = query_BHr.device
    sum_BHSr = torch.empty(*size, rank, dtype=torch.float32, device=device)
    highest_BHS = torch.empty(size, dtype=torch.float32, device=device)
    total_BHS = torch.empty(size, dtype=torch.float32, device=device)
    _attend_latent[(shape.splits, num_seqs * shape.blocks)](
        *given,
        cached,
        sum_BHSr,
        highest_BHS,
        total_BHS,
        *(stride for t in given for stride in t.stride()[:-1]),
        scale,
        SHAPE=shape,
        WIDTH=key_Bp.shape[1],
        TILE=TILE,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    num_values = expand_Hvr.shape[1]
    out_BHv = torch.empty(num_seqs, num_heads, num_values, dtype=query_BHr.dtype, device=device)
    assert expand_Hvr.stride(2) == 1, expand_Hvr.stride()
    _expand[(num_seqs * num_heads, triton.cdiv(num_values, COLUMNS))](
        sum_BHSr,
        highest_BHS,
        total_BHS,
        expand_Hvr,
        out_BHv,
        *expand_Hvr.stride()[:2],
        num_values,
        HEADS=num_heads,
        SHAPE=shape,
        COLUMNS=COLUMNS,
        BLOCK=min(RANK_BLOCK, shape.columns),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return out_BHv


@triton.jit(do_not_specialize=["num_values"])
def _expand(
    sum_RSr,
    highest_RS,
    total_RS,
    expand_Hvr,
    out_Rv,
    expand_head,
    expand_row,
    num_values,
    HEADS: tl.constexpr,
    SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """R is a head of a sequence."""
    DTYPE: tl.constexpr = out_Rv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column_v = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_v = column_v < num_values
    at_S, share_S = shares_of(highest_RS, total_RS, None, row, HEADS, SHAPE)
    expand_v1 = (expand_Hvr + row % HEADS * expand_head + column_v * expand_row)[:, None]
    out_v = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, SHAPE.width, BLOCK):
        rank_r = first + tl.arange(0, BLOCK)
        is_rank_r = rank_r < SHAPE.width
        at_Sr = at_S[:, None] * SHAPE.width + rank_r[None, :]
        is_there_Sr = (share_S != 0.0)[:, None] & is_rank_r[None, :]
        sum_Sr = tl.load(sum_RSr + at_Sr, mask=is_there_Sr, other=0.0)
        latent_r = tl.sum(share_S[:, None] * sum_Sr, 0).to(DTYPE).to(tl.float32)
        is_there_vr = is_column_v[:, None] & is_rank_r[None, :]
        expand_vr = tl.load(expand_v1 + rank_r[None, :], mask=is_there_vr, other=0.0)
        out_v += tl.sum(expand_vr.to(tl.float32) * latent_r[None, :], 1)
    tl.store(out_Rv + row * num_values + column_v, out_v.to(DTYPE), mask=is_column_v)


@triton.jit(do_not_specialize=["cached", "scale"])
def _attend_latent(
    query_BHr,
    rotated_BHp,
    latent_Br,
    key_Bp,
    cached,
    sum_BHSr,
    highest_BHS,
    total_BHS,
    query_seq,
    query_head,
    rotated_seq,
    rotated_head,
    latent_seq,
    key_seq,
    scale,
    SHAPE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    seq, _, head_M, is_head_M = heads_of(SHAPE, TILE)
    out_M = (seq * SHAPE.per_group + head_M) * SHAPE.splits + split
    keys, values = places_of(cached, seq, 0, latent_Br, key_Bp)
    num_tokens = num_tokens_of(cached)
    last_chunk = (num_tokens - 1) // SHAPE.chunk
    if split > last_chunk:
        tl.store(total_BHS + out_M, tl.zeros((TILE,), tl.float32), mask=is_head_M)
        return
    if split == last_chunk % SHAPE.splits:
        append(latent_Br + seq * latent_seq, keys, num_tokens, SHAPE.width)
        append(key_Bp + seq * key_seq, values, num_tokens, WIDTH)
        tl.debug_barrier()  # other threads read it
    mask, has_mask = mask_of(cached, seq)
    query_M1 = (query_BHr + seq * query_seq + head_M * query_head)[:, None]
    rotated_M1 = (rotated_BHp + seq * rotated_seq + head_M * rotated_head)[:, None]
    query_Mr = load_rows(query_M1, is_head_M, 0, SHAPE.width, SHAPE.columns)
    rotated_Mp = load_rows(rotated_M1, is_head_M, 0, WIDTH, SHAPE.more_columns)
    tokens = num_tokens, split, last_chunk, mask, has_mask
    if (keys % _LOAD_BYTES == 0) & (values % _LOAD_BYTES == 0):
        sum_Mr, highest_M, total_M = _attend_chunks(
            query_Mr, rotated_Mp, keys, values, tokens, scale, True, SHAPE, WIDTH, TILE
        )
    else:
        sum_Mr, highest_M, total_M = _attend_chunks(
            query_Mr, rotated_Mp, keys, values, tokens, scale, False, SHAPE, WIDTH, TILE
        )
    column_r = tl.arange(0, SHAPE.columns)
    at_Mr = out_M[:, None] * SHAPE.width + column_r[None, :]
    is_out_Mr = is_head_M[:, None] & (column_r < SHAPE.width)[None, :]
    tl.store(sum_BHSr + at_Mr, sum_Mr, mask=is_out_Mr)
    tl.store(highest_BHS + out_M, highest_M, mask=is_head_M)
    tl.store(total_BHS + out_M, total_M, mask=is_head_M)


@triton.jit
def _attend_chunks(
    query_Mr,
    rotated_Mp,
    keys,
    values,
    tokens,
    scale,
    IS_ALIGNED: tl.constexpr,
    SHAPE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """See attention.py."""
    CHUNK: tl.constexpr = SHAPE.chunk
    COLUMNS: tl.constexpr = SHAPE.columns
    num_tokens, first_chunk, last_chunk, mask, has_mask = tokens
    latents = rows_at(keys, query_Mr.dtype, IS_ALIGNED)
    rotated = rows_at(values, query_Mr.dtype, IS_ALIGNED)
    highest_M = tl.full((TILE,), float("-inf"), tl.float32)
    total_M = tl.zeros((TILE,), tl.float32)
    sum_Mr = tl.zeros((TILE, COLUMNS), tl.float32)
    row_C1 = tl.arange(0, CHUNK)[:, None]
    for chunk in tl.range(first_chunk, last_chunk + 1, SHAPE.splits):
        token_C = chunk * CHUNK + tl.arange(0, CHUNK)
        is_there_C = token_C < num_tokens
        is_seen_C = tl.load(mask + token_C, mask=is_there_C & has_mask, other=1) != 0
        is_seen_C = (is_seen_C | (token_C == num_tokens - 1)) & is_there_C
        latent_C1 = latents + chunk * (CHUNK * SHAPE.width) + row_C1 * SHAPE.width
        latent_Cr = load_rows(latent_C1, is_seen_C, 0, SHAPE.width, SHAPE.columns)
        key_C1 = rotated + chunk * (CHUNK * WIDTH) + row_C1 * WIDTH
        key_Cp = load_rows(key_C1, is_seen_C, 0, WIDTH, SHAPE.more_columns)
        score_MC = product(query_Mr, tl.trans(latent_Cr), None)
        score_MC = product(rotated_Mp, tl.trans(key_Cp), score_MC) * scale
        score_MC = tl.where(is_seen_C[None, :], score_MC, float("-inf"))
        weight_MC, shrink_M, highest_M, total_M = add_chunk(score_MC, highest_M, total_M)
        sum_Mr = product(weight_MC.to(latent_Cr.dtype), latent_Cr, sum_Mr * shrink_M[:, None])
    return sum_Mr, highest_M, total_M
