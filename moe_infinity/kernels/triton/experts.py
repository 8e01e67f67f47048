"""The experts of any number of tokens, each read from where a pointer says it is: a slot of the
device or, through the link, page-locked host memory.

    plan   sorts pairs of token and expert by expert, in tiles    one program for each expert
    up     [block of F rows, tile]    hidden = activation(gate x, up x)
    down   [block of D rows, tile]    out = down hidden
    sum    [token, block of D]        the sum over k of weight * out of the pair, rounded once

A tile is some rows of one expert, whose weights are read once for it. The host reads nothing back:
there are as many programs as tiles could be needed, and those without one end at once. Products are
those of the dtype of x, summed in float32; float32 is not rounded to less.

One program computes all of an output, always in the same order. So a token's result depends on x,
its experts, its weights and how many tokens the pass has, not on where experts are, on what the
other tokens are or on what was cached.

Legend: T tokens, K experts per token, P = T * K pairs, E experts of the layer, D model width, F
expert width, M rows of a tile, R rows of a weight, C columns of a block, B pairs of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from moe_infinity.kernels.triton.activation import mlp_hidden
from moe_infinity.kernels.triton.slot_mlp import LOAD_BYTES, SlotMlp

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

FEW_ROWS = 16  # of a tile
MANY_ROWS = 64
MANY_PAIRS = 2048  # with 128 experts 16 rows each
ROWS = 64  # of a weight in a tile
COLUMN_BYTES = 128  # of x in a block of columns
PLAN_BLOCK = 1024  # pairs that a program looks at together
SUM_BLOCK = 1024  # columns of a program
WARPS = 4
STAGES = 3  # blocks whose loads are under way


@triton.jit
def floats_at(slot, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Return where a part of a slot begins; 16 bytes at once can be loaded from there."""
    part = slot + OFFSET
    if DTYPE == "bfloat16":
        floats = part.to(tl.pointer_type(tl.bfloat16))
    elif DTYPE == "float16":
        floats = part.to(tl.pointer_type(tl.float16))
    else:
        tl.static_assert(DTYPE == "float32")
        floats = part.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(floats, _LOAD_BYTES)


@triton.jit
def plain_tile(slot, row_R, first_column, MATRIX: tl.constexpr, COLUMNS: tl.constexpr):
    """Return [R, C]: some rows and columns of a weight, in its dtype; 0 beyond the last column."""
    VALUES: tl.constexpr = MATRIX.weight.values
    values = floats_at(slot, VALUES.offset, tl.constexpr(VALUES.dtype))
    row_R = MATRIX.first_row + MATRIX.row_step * row_R
    column_C = first_column + tl.arange(0, COLUMNS)
    at_RC = row_R[:, None] * MATRIX.row_stride + (column_C * MATRIX.column_stride)[None, :]
    return tl.load(values + at_RC, mask=(column_C < MATRIX.num_columns)[None, :], other=0)


def compute_pairs(
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
    out_PD: Tensor,
    *,
    load: Any = plain_tile,
) -> None:
    """Fill the rows of `out_PD`, float32 [P, D], whose experts have a pointer that is not 0.

    `index_TK` has int64 ids of experts, -1 for none, `pointers_E` int64 addresses of slots. All
    tensors are contiguous, and on one device. `load` is the Triton function that reads a tile of a
    weight.
    """
    width = mlp.down.num_rows
    assert x_TD.shape[1] == width == mlp.gate.num_columns, (x_TD.shape, mlp)
    given = x_TD, index_TK, weights_TK, pointers_E, out_PD
    assert all(t.is_contiguous() for t in given), x_TD.stride()
    num_pairs = index_TK.numel()
    # By the number of pairs alone: a token's bits may depend on it.
    tile = MANY_ROWS if num_pairs > MANY_PAIRS else FEW_ROWS
    planned = _planned(index_TK, pointers_E, tile)
    most_tiles = planned[-1]
    expert_width = mlp.down.num_columns
    hidden_PF = torch.empty(num_pairs, expert_width, dtype=x_TD.dtype, device=x_TD.device)
    options = {
        "MLP": mlp,
        "LOAD": load,
        "TILE": tile,
        "ROWS": ROWS,
        "COLUMNS": COLUMN_BYTES // x_TD.element_size(),
        "num_warps": WARPS,
        "num_stages": STAGES,
        "enable_fp_fusion": True,  # Triton 3.10 has another default, and with it other last bits
    }
    _up[(triton.cdiv(expert_width, ROWS), most_tiles)](
        x_TD, weights_TK, pointers_E, *planned, hidden_PF, TOP_K=index_TK.shape[1], **options
    )
    _down[(triton.cdiv(width, ROWS), most_tiles)](
        hidden_PF, pointers_E, *planned, out_PD, **options
    )


def _planned(index_TK: Tensor, pointers_E: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """The pairs by expert; of each tile its expert, its first pair and the end of its expert's
    pairs; how many tiles there are, and how many there could be.
    """
    num_pairs = index_TK.numel()
    num_experts = len(pointers_E)
    most_tiles = num_pairs // tile + min(num_pairs, num_experts)
    device = index_TK.device
    order_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles_3N = torch.empty(3, most_tiles, dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    _plan[(num_experts,)](
        index_TK,
        pointers_E,
        order_P,
        tiles_3N,
        num_tiles,
        num_pairs,
        most_tiles,
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=PLAN_BLOCK,
        TILE=tile,
        enable_fp_fusion=True,
    )
    return order_P, tiles_3N, num_tiles, most_tiles


def sum_pairs(
    mlp: SlotMlp, out_PD: Tensor, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [T, D]: the weighted sums over each token's experts, added in float32, once all are
    computed.
    """
    num_tokens, top_k = index_TK.shape
    width = out_PD.shape[1]
    sum_TD = torch.empty(num_tokens, width, dtype=dtype, device=out_PD.device)
    _sum[(num_tokens, triton.cdiv(width, SUM_BLOCK))](
        out_PD,
        index_TK,
        weights_TK,
        sum_TD,
        WIDTH=width,
        TOP_K=top_k,
        WEIGHS_INPUT=mlp.weighs_input,
        BLOCK=SUM_BLOCK,
        enable_fp_fusion=True,
    )
    return sum_TD


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def _plan(
    index_P,
    pointers_E,
    order_P,
    tiles_3N,
    num_tiles,
    num_pairs,
    most_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each program looks through all pairs twice: it has to know where its own begin."""
    expert = tl.program_id(0)
    bin_E = tl.arange(0, BINS)
    counts_E = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        expert_B = _experts(index_P, pointers_E, first, num_pairs, NUM_EXPERTS, BLOCK)
        counts_E += tl.histogram(expert_B, BINS)
    tiles_E = (counts_E + TILE - 1) // TILE
    begin = tl.sum(tl.where(bin_E < expert, counts_E, 0))
    end = begin + tl.sum(tl.where(bin_E == expert, counts_E, 0))
    tile = tl.sum(tl.where(bin_E < expert, tiles_E, 0))
    for at in range(begin, end, TILE):
        tl.store(tiles_3N + tile, expert)
        tl.store(tiles_3N + most_tiles + tile, at)
        tl.store(tiles_3N + 2 * most_tiles + tile, end)
        tile += 1
    tl.store(num_tiles, tile, mask=expert == NUM_EXPERTS - 1)
    for first in range(0, num_pairs, BLOCK):
        expert_B = _experts(index_P, pointers_E, first, num_pairs, NUM_EXPERTS, BLOCK)
        is_its_B = (expert_B == expert).to(tl.int32)
        at_B = begin + tl.cumsum(is_its_B, 0) - 1
        tl.store(order_P + at_B, first + tl.arange(0, BLOCK), mask=is_its_B > 0)
        begin += tl.sum(is_its_B)


@triton.jit
def _experts(index_P, pointers_E, first, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """[B]: the experts of pairs; NUM_EXPERTS for those that are not computed now."""
    pair_B = first + tl.arange(0, BLOCK)
    expert_B = tl.load(index_P + pair_B, mask=pair_B < num_pairs, other=-1).to(tl.int32)
    pointer_B = tl.load(pointers_E + expert_B, mask=expert_B >= 0, other=0)
    return tl.where(pointer_B != 0, expert_B, NUM_EXPERTS)


@triton.jit(do_not_specialize=["most_tiles"])
def _up(
    x_TD,
    weights_P,
    pointers_E,
    order_P,
    tiles_3N,
    num_tiles,
    most_tiles,
    hidden_PF,
    MLP: tl.constexpr,
    LOAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.program_id(1) >= tl.load(num_tiles):
        return
    GATE: tl.constexpr = MLP.gate
    UP: tl.constexpr = MLP.up
    ACTIVATION: tl.constexpr = MLP.activation
    slot, pair_M, is_pair_M = _tile(pointers_E, order_P, tiles_3N, most_tiles, TILE)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_R = _inside(row_R, GATE.num_rows, ROWS)
    gate_MR = tl.zeros((TILE, ROWS), tl.float32)
    up_MR = tl.zeros((TILE, ROWS), tl.float32)
    for column in range(0, GATE.num_columns, COLUMNS):
        x_MC = _load_rows(x_TD, pair_M // TOP_K, is_pair_M, column, GATE, COLUMNS)
        gate_RC = LOAD(slot, valid_R, column, GATE, COLUMNS).to(x_MC.dtype)
        gate_MR = product(x_MC, tl.trans(gate_RC), gate_MR)
        if UP is not None:
            up_RC = LOAD(slot, valid_R, column, UP, COLUMNS).to(x_MC.dtype)
            up_MR = product(x_MC, tl.trans(up_RC), up_MR)
    if MLP.weighs_input:
        weight_M1 = tl.load(weights_P + pair_M, mask=is_pair_M, other=0.0).to(tl.float32)[:, None]
        gate_MR *= weight_M1
        up_MR *= weight_M1
    gate_MR += _load_bias(slot, valid_R, GATE)[None, :]
    if UP is not None:
        up_MR += _load_bias(slot, valid_R, UP)[None, :]
    hidden_MR = mlp_hidden(gate_MR, up_MR, ACTIVATION).to(hidden_PF.dtype.element_ty)
    _store(hidden_PF, hidden_MR, pair_M, is_pair_M, row_R, GATE)


@triton.jit(do_not_specialize=["most_tiles"])
def _down(
    hidden_PF,
    pointers_E,
    order_P,
    tiles_3N,
    num_tiles,
    most_tiles,
    out_PD,
    MLP: tl.constexpr,
    LOAD: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.program_id(1) >= tl.load(num_tiles):
        return
    DOWN: tl.constexpr = MLP.down
    slot, pair_M, is_pair_M = _tile(pointers_E, order_P, tiles_3N, most_tiles, TILE)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_R = _inside(row_R, DOWN.num_rows, ROWS)
    out_MR = tl.zeros((TILE, ROWS), tl.float32)
    for column in range(0, DOWN.num_columns, COLUMNS):
        hidden_MC = _load_rows(hidden_PF, pair_M, is_pair_M, column, DOWN, COLUMNS)
        down_RC = LOAD(slot, valid_R, column, DOWN, COLUMNS).to(hidden_MC.dtype)
        out_MR = product(hidden_MC, tl.trans(down_RC), out_MR)
    out_MR += _load_bias(slot, valid_R, DOWN)[None, :]
    _store(out_PD, out_MR, pair_M, is_pair_M, row_R, DOWN)


@triton.jit
def _tile(pointers_E, order_P, tiles_3N, most_tiles, TILE: tl.constexpr):
    """The slot of its expert, its pairs, and which of these there are."""
    tile = tl.program_id(1)
    pointer = tl.load(pointers_E + tl.load(tiles_3N + tile))
    slot = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint8)), _LOAD_BYTES)
    at_M = tl.load(tiles_3N + most_tiles + tile) + tl.arange(0, TILE)
    is_pair_M = at_M < tl.load(tiles_3N + 2 * most_tiles + tile)
    pair_M = tl.load(order_P + at_M, mask=is_pair_M, other=0).to(tl.int64)
    return slot, pair_M, is_pair_M


@triton.jit
def _inside(row_R, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """Rows beyond the last one become the last. Only where needed: Triton does not know clamped
    rows to be contiguous.
    """
    if NUM_ROWS % ROWS != 0:
        row_R = tl.minimum(row_R, NUM_ROWS - 1)
    return row_R


@triton.jit
def _load_rows(x, row_M, is_row_M, first_column, MATRIX: tl.constexpr, COLUMNS: tl.constexpr):
    """[M, C]; 0 beyond the last column."""
    column_C = first_column + tl.arange(0, COLUMNS)
    is_there_MC = is_row_M[:, None] & (column_C < MATRIX.num_columns)[None, :]
    at_MC = row_M[:, None] * MATRIX.num_columns + column_C[None, :]
    return tl.load(x + at_MC, mask=is_there_MC, other=0.0)


@triton.jit
def _load_bias(slot, row_R, MATRIX: tl.constexpr):
    """[R] in float32; 0 where there is none."""
    bias_R = tl.zeros(row_R.shape, tl.float32)
    if MATRIX.bias is not None:
        bias = floats_at(slot, MATRIX.bias.offset, tl.constexpr(MATRIX.bias.dtype))
        bias_R += tl.load(bias + MATRIX.first_row + MATRIX.row_step * row_R).to(tl.float32)
    return bias_R


@triton.jit
def product(left_MK, right_KN, sum_MN):
    """Return [M, N]: a sum and the product of two matrices of one dtype, added in float32."""
    if _IS_INTERPRETED:  # the interpreter multiplies the bits of a bfloat16 as whole numbers
        left_MK = left_MK.to(tl.float32)
        right_KN = right_KN.to(tl.float32)
    return tl.dot(left_MK, right_KN, sum_MN, input_precision="ieee")


@triton.jit
def _store(out, value_MR, pair_M, is_pair_M, row_R, MATRIX: tl.constexpr):
    at_MR = pair_M[:, None] * MATRIX.num_rows + row_R[None, :]
    mask_MR = is_pair_M[:, None] & (row_R < MATRIX.num_rows)[None, :]
    tl.store(out + at_MR, value_MR, mask=mask_MR)


@triton.jit
def _sum(
    out_PD,
    index_P,
    weights_P,
    sum_TD,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        is_there = tl.load(index_P + pair) >= 0
        weight = tl.load(weights_P + pair).to(tl.float32)
        weight = 1.0 if WEIGHS_INPUT else weight
        num_columns = tl.where(is_there, WIDTH, 0)
        out_D = tl.load(out_PD + pair * WIDTH + column_D, mask=column_D < num_columns, other=0.0)
        sum_D += tl.where(is_there, weight, 0.0) * out_D
    sum_D = sum_D.to(sum_TD.dtype.element_ty)
    tl.store(sum_TD + token * WIDTH + column_D, sum_D, mask=column_D < WIDTH)
