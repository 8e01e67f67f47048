"""Attention of one new token of each sequence to those in the cache. A tensor on the device says
where these are: when buffers grow and move, a CUDA graph stays as it is.

    attend    [split, head of the cache]   of some chunks of tokens: sum of weights times values
    combine   [head, block of columns]     the sums of all splits, each with its weight

Chunk c belongs to split c % S, and S depends on the number of heads alone. So a sequence's result
depends neither on the others, nor on how large the buffers are, nor on where they are. A split
without tokens has a total of 0, and nothing else of it is looked at.

Legend: B sequences, G heads of the cache, H of queries, N tokens, d columns of a key, v of a value,
S splits, C tokens of a chunk, M heads of a program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from moe_infinity.experimental.gpu.kernels.cached_layer import CachedLayer
from moe_infinity.experimental.gpu.kernels.slot_mlp import LOAD_BYTES

# Where each field of a CachedLayer is, in their order.
_KEYS, _VALUES, _KEY_SEQ, _KEY_HEAD, _VALUE_SEQ, _VALUE_HEAD, _NUM_TOKENS, _MASK, _MASK_SEQ = map(
    tl.constexpr, range(len(CachedLayer._fields))
)
_LOAD_BYTES = tl.constexpr(LOAD_BYTES)
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

SPLIT_HEADS = 512  # splits of all heads of the cache together, of one sequence
MIN_SPLITS = 8
MAX_SPLITS = 64
TILE = 16  # heads of a program, and the least size of a product of matrices
CHUNK = 64  # tokens
CHUNK_BYTES = 40 << 10  # at most: two are in the shared memory of every GPU since 8.0
COLUMNS = 64  # that a program of combine sums
WARPS = 4
STAGES = 2  # chunks whose loads are under way
EVERY_TOKEN = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a kernel is compiled for."""

    groups: int  # G
    per_group: int  # H / G
    blocks: int  # of heads of queries, in a group
    width: int  # d
    value_width: int  # v
    columns: int  # of a key: a power of two,
    more_columns: int  # and the rest, or 0; rounded up to one
    value_columns: int  # rounded up to a power of two
    chunk: int  # C
    splits: int  # S
    has_softcap: bool


def shape_of(query_BHd: Tensor, value_BGv: Tensor, has_softcap: bool) -> AttentionShape:
    _, num_heads, width = query_BHd.shape
    num_groups, value_width = value_BGv.shape[1:]
    columns = max(triton.next_power_of_2(width + 1) // 2, TILE)
    rest = width - columns
    more_columns = max(triton.next_power_of_2(rest), TILE) if rest > 0 else 0
    value_columns = max(triton.next_power_of_2(value_width), TILE)
    token_bytes = (columns + more_columns + value_columns) * query_BHd.element_size()
    chunk = CHUNK
    while chunk > TILE and chunk * token_bytes > CHUNK_BYTES:
        chunk //= 2
    splits = min(max(MIN_SPLITS, SPLIT_HEADS // num_groups), MAX_SPLITS)
    return AttentionShape(
        groups=num_groups,
        per_group=num_heads // num_groups,
        blocks=triton.cdiv(num_heads // num_groups, TILE),
        width=width,
        value_width=value_width,
        columns=columns,
        more_columns=more_columns,
        value_columns=value_columns,
        chunk=chunk,
        splits=1 << splits.bit_length() - 1,
        has_softcap=has_softcap,
    )


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
    """[B, H, v] in the dtype of the query. `cached` is a CachedLayer in int64. The new key and
    value are written to the cache, as its last token. That one is looked at whatever the mask
    says, and the `window` - 1 before it. `sinks_H` has a score for each head that takes part in
    the softmax and has no value. Rows are contiguous, and of one dtype, as the cache is.
    """
    num_seqs, num_heads, width = query_BHd.shape
    num_groups, value_width = value_BGv.shape[1:]
    given = query_BHd, key_BGd, value_BGv
    assert all(t.stride(2) == 1 and t.dtype == query_BHd.dtype for t in given), given
    assert key_BGd.shape == (num_seqs, num_groups, width), key_BGd.shape
    assert num_heads % num_groups == 0, (num_heads, num_groups)
    shape = shape_of(query_BHd, value_BGv, softcap is not None)
    size = num_seqs, num_heads, shape.splits
    device = query_BHd.device
    sum_BHSv = torch.empty(*size, value_width, dtype=torch.float32, device=device)
    highest_BHS = torch.empty(size, dtype=torch.float32, device=device)
    total_BHS = torch.empty(size, dtype=torch.float32, device=device)
    _attend[(shape.splits, num_seqs * num_groups * shape.blocks)](
        *given,
        cached,
        sum_BHSv,
        highest_BHS,
        total_BHS,
        *(stride for t in given for stride in t.stride()[:2]),
        scale,
        EVERY_TOKEN if window is None else window,
        1.0 if softcap is None else softcap,
        SHAPE=shape,
        TILE=TILE,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    out_BHv = query_BHd.new_empty(num_seqs, num_heads, value_width)
    columns = min(COLUMNS, shape.value_columns)
    _combine[(num_seqs * num_heads, triton.cdiv(value_width, columns))](
        sum_BHSv,
        highest_BHS,
        total_BHS,
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
    query_BHd,
    key_BGd,
    value_BGv,
    cached,
    sum_BHSv,
    highest_BHS,
    total_BHS,
    query_seq,
    query_head,
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
    CHUNK: tl.constexpr = SHAPE.chunk
    SPLITS: tl.constexpr = SHAPE.splits
    split = tl.program_id(0)
    seq, group, head_M, is_head_M = heads_of(SHAPE, TILE)
    out_M = (seq * (SHAPE.groups * SHAPE.per_group) + head_M) * SPLITS + split

    num_tokens = num_tokens_of(cached)
    first_token = tl.maximum(num_tokens - window, 0)
    first_chunk = first_token // CHUNK
    first_chunk += (split + SPLITS - first_chunk % SPLITS) % SPLITS
    last_chunk = (num_tokens - 1) // CHUNK
    if first_chunk > last_chunk:
        tl.store(total_BHS + out_M, tl.zeros((TILE,), tl.float32), mask=is_head_M)
        return

    key = key_BGd + seq * key_seq + group * key_head
    value = value_BGv + seq * value_seq + group * value_head
    keys, values = places_of(cached, seq, group, key, value)
    if split == last_chunk % SPLITS:
        append(key, keys, num_tokens, SHAPE.width)
        append(value, values, num_tokens, SHAPE.value_width)
        tl.debug_barrier()  # other threads read it
    mask, has_mask = mask_of(cached, seq)
    query_M = query_BHd + seq * query_seq + head_M * query_head
    tokens = first_token, num_tokens, first_chunk, last_chunk, mask, has_mask
    # An address that is read from memory is known to be a multiple of 16 only if somebody looks.
    if (keys % _LOAD_BYTES == 0) & (values % _LOAD_BYTES == 0):
        sum_Mv, highest_M, total_M = _attend_chunks(
            query_M, is_head_M, keys, values, tokens, scale, softcap, True, SHAPE
        )
    else:
        sum_Mv, highest_M, total_M = _attend_chunks(
            query_M, is_head_M, keys, values, tokens, scale, softcap, False, SHAPE
        )
    column_v = tl.arange(0, SHAPE.value_columns)
    at_Mv = out_M[:, None] * SHAPE.value_width + column_v[None, :]
    is_out_Mv = is_head_M[:, None] & (column_v < SHAPE.value_width)[None, :]
    tl.store(sum_BHSv + at_Mv, sum_Mv, mask=is_out_Mv)
    tl.store(highest_BHS + out_M, highest_M, mask=is_head_M)
    tl.store(total_BHS + out_M, total_M, mask=is_head_M)


@triton.jit
def heads_of(SHAPE: tl.constexpr, TILE: tl.constexpr):
    """The sequence and the group of this program, and which heads there are."""
    at = tl.program_id(1)
    seq = (at // (SHAPE.groups * SHAPE.blocks)).to(tl.int64)
    group = at // SHAPE.blocks % SHAPE.groups
    head_M = at % SHAPE.blocks * TILE + tl.arange(0, TILE)
    return seq, group, group * SHAPE.per_group + head_M, head_M < SHAPE.per_group


@triton.jit
def places_of(cached, seq, group, key, value):
    """The addresses of the first key and the first value."""
    NUM_BYTES: tl.constexpr = key.dtype.element_ty.primitive_bitwidth // 8
    keys = seq * tl.load(cached + _KEY_SEQ) + group * tl.load(cached + _KEY_HEAD)
    values = seq * tl.load(cached + _VALUE_SEQ)
    values += group * tl.load(cached + _VALUE_HEAD)
    keys = tl.load(cached + _KEYS) + keys * NUM_BYTES
    return keys, tl.load(cached + _VALUES) + values * NUM_BYTES


@triton.jit
def num_tokens_of(cached):
    return tl.load(cached + _NUM_TOKENS)


@triton.jit
def mask_of(cached, seq):
    """Of the sequence, and whether there is one."""
    mask = tl.load(cached + _MASK)
    place = mask + seq * tl.load(cached + _MASK_SEQ)
    return place.to(tl.pointer_type(tl.uint8)), mask != 0


@triton.jit
def append(row, rows, num_tokens, WIDTH: tl.constexpr):
    """Write a row to the last place of those at an address."""
    last = rows.to(tl.pointer_type(row.dtype.element_ty)) + (num_tokens - 1) * WIDTH
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    is_column = column < WIDTH
    tl.store(last + column, tl.load(row + column, mask=is_column), mask=is_column)


@triton.jit
def _attend_chunks(
    query_M,
    is_head_M,
    keys,
    values,
    tokens,
    scale,
    softcap,
    IS_ALIGNED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Of all chunks of this split: the sum of weights times values, the highest score, and the sum
    of weights, which are exp(score - highest score).
    """
    CHUNK: tl.constexpr = SHAPE.chunk
    VALUE_COLUMNS: tl.constexpr = SHAPE.value_columns
    first_token, num_tokens, first_chunk, last_chunk, mask, has_mask = tokens
    DTYPE: tl.constexpr = query_M.dtype.element_ty
    keys = rows_at(keys, DTYPE, IS_ALIGNED)
    values = rows_at(values, DTYPE, IS_ALIGNED)
    query_Md = load_rows(query_M[:, None], is_head_M, 0, SHAPE.width, SHAPE.columns)
    more_Md = query_Md
    if SHAPE.more_columns > 0:
        more_Md = load_rows(
            query_M[:, None], is_head_M, SHAPE.columns, SHAPE.width, SHAPE.more_columns
        )
    highest_M = tl.full(is_head_M.shape, float("-inf"), tl.float32)
    total_M = tl.zeros(is_head_M.shape, tl.float32)
    sum_Mv = tl.zeros((is_head_M.shape[0], VALUE_COLUMNS), tl.float32)
    row_C1 = tl.arange(0, CHUNK)[:, None]
    for chunk in tl.range(first_chunk, last_chunk + 1, SHAPE.splits):
        token_C = chunk * CHUNK + tl.arange(0, CHUNK)
        is_there_C = token_C < num_tokens
        is_seen_C = tl.load(mask + token_C, mask=is_there_C & has_mask, other=1) != 0
        is_seen_C |= token_C == num_tokens - 1
        is_seen_C &= is_there_C & (token_C >= first_token)
        key_C1 = keys + chunk * (CHUNK * SHAPE.width) + row_C1 * SHAPE.width
        key_Cd = load_rows(key_C1, is_there_C, 0, SHAPE.width, SHAPE.columns)
        score_MC = product(query_Md, tl.trans(key_Cd), None)
        if SHAPE.more_columns > 0:
            key_Cd = load_rows(key_C1, is_there_C, SHAPE.columns, SHAPE.width, SHAPE.more_columns)
            score_MC = product(more_Md, tl.trans(key_Cd), score_MC)
        score_MC *= scale
        if SHAPE.has_softcap:  # tanh(x) = 2 sigmoid(2 x) - 1
            score_MC = softcap * (2.0 * tl.sigmoid(2.0 / softcap * score_MC) - 1.0)
        score_MC = tl.where(is_seen_C[None, :], score_MC, float("-inf"))

        weight_MC, shrink_M, highest_M, total_M = add_chunk(score_MC, highest_M, total_M)
        value_C1 = values + chunk * (CHUNK * SHAPE.value_width) + row_C1 * SHAPE.value_width
        value_Cv = load_rows(value_C1, is_seen_C, 0, SHAPE.value_width, VALUE_COLUMNS)
        sum_Mv = product(weight_MC.to(DTYPE), value_Cv, sum_Mv * shrink_M[:, None])
    return sum_Mv, highest_M, total_M


@triton.jit
def add_chunk(score_MC, before_M, total_M):
    """Weights of a chunk, what sums so far shrink by, the highest score so far, and the sum of
    weights.
    """
    highest_M = tl.maximum(before_M, tl.max(score_MC, 1))
    # -inf - -inf is not a number.
    base_M = tl.where(highest_M == float("-inf"), 0.0, highest_M)
    weight_MC = tl.exp(score_MC - base_M[:, None])
    shrink_M = tl.exp(before_M - base_M)
    return weight_MC, shrink_M, highest_M, total_M * shrink_M + tl.sum(weight_MC, 1)


@triton.jit
def rows_at(address, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    rows = address.to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        rows = tl.multiple_of(rows, _LOAD_BYTES)
    return rows


@triton.jit
def load_rows(row_R1, is_row_R, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns from FIRST on of [R, WIDTH]; 0 beyond the last, and where there is no row."""
    column_K = FIRST + tl.arange(0, COLUMNS)
    is_there_RK = is_row_R[:, None]
    if FIRST + COLUMNS > WIDTH:
        is_there_RK = is_there_RK & (column_K < WIDTH)[None, :]
    return tl.load(row_R1 + column_K[None, :], mask=is_there_RK, other=0.0)


@triton.jit
def product(left_MK, right_KN, sum_MN):
    if _IS_INTERPRETED:  # which multiplies the bits of a bfloat16 as whole numbers
        left_MK = left_MK.to(tl.float32)
        right_KN = right_KN.to(tl.float32)
    return tl.dot(left_MK, right_KN, sum_MN, input_precision="ieee")


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
    at_S, share_S = shares_of(highest_RS, total_RS, sinks_H, row, HEADS, SHAPE)
    at_Sv = at_S[:, None] * SHAPE.value_width + column_v[None, :]
    is_there_Sv = (share_S != 0.0)[:, None] & is_column_v[None, :]
    sum_Sv = tl.load(sum_RSv + at_Sv, mask=is_there_Sv, other=0.0)
    out_v = tl.sum(share_S[:, None] * sum_Sv, 0).to(out_Rv.dtype.element_ty)
    tl.store(out_Rv + row * SHAPE.value_width + column_v, out_v, mask=is_column_v)


@triton.jit
def shares_of(highest_RS, total_RS, sinks_H, row, HEADS: tl.constexpr, SHAPE: tl.constexpr):
    """Of a head of a sequence: where its splits are, and what their sums are multiplied with."""
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
    return at_S, share_S / total
