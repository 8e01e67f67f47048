"""Attention of one new token of each sequence to latents: DeepSeek's multi-head latent attention,
whose cache has a latent and a rotated key for each token, the same for all heads. A latent is key
and value at once, and is read once for both.

Splits and what puts them together are those of attention.py.

Legend: as in attention.py, and r columns of a latent, p of a rotated key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.kernels.cuda.attention import CHUNK as MOST_TOKENS
from moe_infinity.kernels.cuda.attention import (
    CHUNK_BYTES,
    MAX_SPLITS,
    STAGES,
    TILE,
    WARPS,
    AttentionShape,
    add_chunk,
    append,
    combine,
    heads_of,
    load_rows,
    mask_of,
    num_tokens_of,
    places_of,
    product,
    rows_at,
)
from moe_infinity.kernels.cuda.slot_mlp import LOAD_BYTES

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)


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
    cached: Tensor,
    *,
    scale: float,
) -> Tensor:
    """[B, H, r] in the dtype of the query. `cached` is a CachedLayer in int64: its keys are latents
    [B, 1, N, r], its values rotated keys [B, 1, N, p], and the new ones are written to them, as the
    last token. Rows are contiguous, and of one dtype, as the cache is.
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
    out_BHr = torch.empty(num_seqs, num_heads, rank, dtype=query_BHr.dtype, device=device)
    combine(sum_BHSr, highest_BHS, total_BHS, None, out_BHr, shape)
    return out_BHr


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
