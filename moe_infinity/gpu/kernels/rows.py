"""Computations row by row, each in one kernel where modules launch several: RMSNorm with the
sum before it, what an MLP computes between its products, and queries and keys made of products,
with norms of heads and rotary positions. reference.py has the definitions.

Legend: T or B tokens, D model width, F width of an MLP, H heads of queries, G of keys, d columns of
a head, C columns of a row, R rows, or pairs of columns that are rotated together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.gpu.kernels.descriptions import Heads
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton.activation import mlp_hidden

GATED_COLUMNS = 512  # of a program of gated()


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, form: str) -> Tensor:
    """Return the norm of x, [..., D]. `weight_D` is contiguous, and on the device of x."""
    return _launch(x, (), weight_D, eps, form)[1]


def add_rms_norm(
    x: Tensor, added: tuple[Tensor, ...], weight_D: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """Return the sum of x and one or two others, [..., D] each and of one dtype, and its norm."""
    assert all(t.shape == x.shape and t.dtype == x.dtype for t in added), (x.shape, added)
    return _launch(x, added, weight_D, eps, form)


def _launch(
    x: Tensor, added: tuple[Tensor, ...], weight_D: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    width = len(weight_D)
    rows = x.flatten(0, -2) if x.stride(-1) == 1 else x.contiguous().flatten(0, -2)
    one, other = (*(t.contiguous() for t in added), None, None)[:2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if added else x
    _rms_norm[(len(rows),)](
        rows,
        one,
        other,
        weight_D,
        total,
        out,
        rows.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        FORM=form,
        enable_fp_fusion=True,
    )
    return total, out


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(
    x_RD,
    one_RD,
    other_RD,
    weight_D,
    sum_RD,
    out_RD,
    x_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
):
    DTYPE: tl.constexpr = out_RD.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK)
    is_column_D = column_D < WIDTH
    at_D = row * WIDTH + column_D
    x_D = _load(x_RD + row * x_row + column_D, is_column_D)
    if one_RD is not None:
        added_D = _load(one_RD + at_D, is_column_D)
        if other_RD is not None:
            added_D += _load(other_RD + at_D, is_column_D)
            added_D = added_D.to(DTYPE).to(tl.float32)
        x_D = (x_D + added_D).to(DTYPE)
        tl.store(sum_RD + at_D, x_D, mask=is_column_D)
        x_D = x_D.to(tl.float32)
    weight = _load(weight_D + column_D, is_column_D)
    normed_D = x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / WIDTH + eps)
    if FORM == "rounded twice":
        normed_D = normed_D.to(DTYPE).to(tl.float32)
    if FORM == "plus one":
        weight += 1.0
    normed_D *= weight
    tl.store(out_RD + at_D, normed_D.to(DTYPE), mask=is_column_D)


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


def gated(gate_up_TC: Tensor, activation: Activation) -> Tensor:
    """Return [T, F] for [T, 2 F], in which all columns of gate are before those of up. Rounded
    once.
    """
    num_tokens, num_columns = gate_up_TC.shape
    assert activation.is_gated, activation
    assert gate_up_TC.is_contiguous(), gate_up_TC.stride()
    width = num_columns // 2
    dtype = gate_up_TC.dtype
    hidden_TF = torch.empty(num_tokens, width, dtype=dtype, device=gate_up_TC.device)
    _gated[(num_tokens, triton.cdiv(width, GATED_COLUMNS))](
        gate_up_TC,
        hidden_TF,
        WIDTH=width,
        ACTIVATION=activation,
        COLUMNS=GATED_COLUMNS,
        enable_fp_fusion=True,
    )
    return hidden_TF


@triton.jit
def _gated(
    gate_up_TC,
    hidden_TF,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_F = column_F < WIDTH
    gate = gate_up_TC + token * (2 * WIDTH) + column_F
    gate_F = tl.load(gate, mask=is_column_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate + WIDTH, mask=is_column_F, other=0.0).to(tl.float32)
    hidden_F = mlp_hidden(gate_F, up_F, ACTIVATION).to(hidden_TF.dtype.element_ty)
    tl.store(hidden_TF + token * WIDTH + column_F, hidden_F, mask=is_column_F)


def make_heads(
    query_BC: Tensor,
    key_BC: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos_BR: Tensor,
    sin_BR: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor]:
    """Return [B, H, d] and [B, G, d] in the dtype of the rows, whose first columns are the heads'
    side by side; rows may be parts of longer ones. Norms have a weight for each column of a head,
    or of all heads; without one there is none. Cosines and sines are float32; with one row they are
    those of every token.
    """
    num_tokens = len(query_BC)
    assert query_BC.stride(1) == key_BC.stride(1) == 1, (query_BC.stride(), key_BC.stride())
    assert cos_BR.dtype == sin_BR.dtype == torch.float32, cos_BR.dtype
    assert cos_BR.shape[1] == sin_BR.shape[1] == heads.rotated // 2, cos_BR.shape
    query_BHd = query_BC.new_empty(num_tokens, heads.num_heads, heads.query_width)
    key_BGd = query_BC.new_empty(num_tokens, heads.num_groups, heads.key_width)
    _make_heads[(num_tokens, heads.num_heads + heads.num_groups)](
        query_BC,
        key_BC,
        query_norm,
        key_norm,
        cos_BR,
        sin_BR,
        query_BHd,
        key_BGd,
        query_BC.stride(0),
        key_BC.stride(0),
        heads.rotated // 2 if len(cos_BR) > 1 else 0,
        heads.query_eps,
        heads.key_eps,
        HEADS=heads._replace(query_eps=0.0, key_eps=0.0),
        enable_fp_fusion=True,
    )
    return query_BHd, key_BGd


@triton.jit(do_not_specialize=["query_row", "key_row", "angle_row", "query_eps", "key_eps"])
def _make_heads(
    query_BC,
    key_BC,
    query_norm,
    key_norm,
    cos_BR,
    sin_BR,
    query_BHd,
    key_BGd,
    query_row,
    key_row,
    angle_row,
    query_eps,
    key_eps,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cos_R = cos_BR + token * angle_row
    sin_R = sin_BR + token * angle_row
    if head < HEADS.num_heads:
        out = query_BHd + (token * HEADS.num_heads + head) * HEADS.query_width
        _make_head(
            query_BC + token * query_row, head, query_norm, cos_R, sin_R, out, query_eps,
            HEADS.num_heads, HEADS.query_width, HEADS.first_rotated, HEADS.query_width, HEADS,
        )  # fmt: skip
    else:
        head -= HEADS.num_heads
        NORMED: tl.constexpr = HEADS.normed_key if HEADS.normed_key > 0 else HEADS.key_width
        out = key_BGd + (token * HEADS.num_groups + head) * HEADS.key_width
        _make_head(
            key_BC + token * key_row, head, key_norm, cos_R, sin_R, out, key_eps,
            HEADS.num_groups, HEADS.key_width, HEADS.first_rotated_key, NORMED, HEADS,
        )  # fmt: skip


@triton.jit
def _make_head(
    row,
    head,
    norm,
    cos_R,
    sin_R,
    out,
    eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Each column is loaded with the one it is rotated with."""
    HALF: tl.constexpr = HEADS.rotated // 2
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    column_D = tl.arange(0, BLOCK)
    is_column_D = column_D < WIDTH
    place_D = column_D - FIRST
    is_rotated_D = (place_D >= 0) & (place_D < HEADS.rotated)
    if HEADS.pairs == "neighbours":
        pair_D = place_D // 2
        is_first_D = place_D % 2 == 0
    else:
        pair_D = place_D % HALF
        is_first_D = place_D < HALF
    if HEADS.pairs == "halves":
        one_D = pair_D
        other_D = pair_D + HALF
    else:
        one_D = 2 * pair_D
        other_D = 2 * pair_D + 1
    own_D = tl.where(is_rotated_D, FIRST + tl.where(is_first_D, one_D, other_D), column_D)
    twin_D = tl.where(is_rotated_D, FIRST + tl.where(is_first_D, other_D, one_D), column_D)

    scale = 1.0
    if norm is not None:
        scale = _scale(row, head, eps, COUNT, WIDTH, NORMED, HEADS)
    x_D = _column(row, head, norm, own_D, is_column_D, scale, WIDTH, NORMED, HEADS)
    twin_x_D = _column(row, head, norm, twin_D, is_column_D, scale, WIDTH, NORMED, HEADS)
    cos_D = tl.load(cos_R + pair_D, mask=is_rotated_D, other=1.0)
    sin_D = tl.load(sin_R + pair_D, mask=is_rotated_D, other=0.0)
    turned_D = x_D * cos_D + tl.where(is_first_D, -twin_x_D, twin_x_D) * sin_D
    turned_D = tl.where(is_rotated_D, turned_D, x_D)
    tl.store(out + column_D, turned_D.to(out.dtype.element_ty), mask=is_column_D)


@triton.jit
def _scale(
    row,
    head,
    eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Return the weights of the norm in float32."""
    ALL: tl.constexpr = COUNT * WIDTH if HEADS.norms_all else NORMED
    BLOCK: tl.constexpr = triton.next_power_of_2(ALL)
    column_D = tl.arange(0, BLOCK)
    first = row
    if not HEADS.norms_all:
        first += head * WIDTH
    x_D = tl.load(first + column_D, mask=column_D < ALL, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x_D * x_D, 0) / ALL + eps)


@triton.jit
def _column(
    row,
    head,
    norm,
    column_D,
    is_column_D,
    scale,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Columns of a head, in float32, rounded as its norm rounds."""
    x_D = tl.load(row + head * WIDTH + column_D, mask=is_column_D, other=0.0)
    wide_D = x_D.to(tl.float32)
    if norm is not None:
        is_normed_D = column_D < NORMED
        at_D = column_D
        if HEADS.norms_all:
            at_D += head * WIDTH
        weight_D = tl.load(norm + at_D, mask=is_column_D & is_normed_D, other=0.0).to(tl.float32)
        normed_D = wide_D * scale
        if HEADS.norm_form == "rounded twice":
            normed_D = normed_D.to(x_D.dtype).to(tl.float32)
        if HEADS.norm_form == "plus one":
            weight_D += 1.0
        normed_D = (normed_D * weight_D).to(x_D.dtype).to(tl.float32)
        wide_D = tl.where(is_normed_D, normed_D, wide_D)
    return wide_D
