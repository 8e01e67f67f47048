"""The experts of several tokens. An expert's rows are divided into tiles; its weights are read once
for a tile.

    plan   pairs sorted by expert, and tiles of them              one program an expert
    up     [block of F rows, tile]    hidden = activation(gate x, up x)
    down   [block of D rows, tile]    out = down hidden

Nothing is read back: there are as many programs as tiles could be needed, and those without one end
at once. Products are those of the dtype of x, summed in float32; float32 is not rounded to less.

Legend: as in experts.py, and M rows of a tile, K columns of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from moe_infinity.experimental.gpu.kernels.activated import inside, mlp_hidden
from moe_infinity.experimental.gpu.kernels.slot_mlp import LOAD_BYTES, Matrix, SlotMlp
from moe_infinity.experimental.gpu.kernels.weights import load_bias, weight_tile

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

FEW_ROWS = 16  # of a tile
MANY_ROWS = 64
MANY_PAIRS = 2048  # with 128 experts 16 rows each
ROWS = 64  # of a weight in a tile
COLUMNS = 64  # of a block; of float32 half as many
PLAN_BLOCK = 1024  # pairs that a program looks at together
WARPS = 4
STAGES = 3  # blocks whose loads are under way


def compute_pairs(
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
    out_PD: Tensor,
) -> None:
    """See experts.py."""
    num_pairs = index_TK.numel()
    num_experts = len(pointers_E)
    # By the number of pairs alone, as a token's bits may depend on it: host and device may count
    # the experts of a narrow layer differently.
    tile = MANY_ROWS if num_pairs > MANY_PAIRS else FEW_ROWS
    most_tiles = num_pairs // tile + min(num_pairs, num_experts)
    device = x_TD.device
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
    expert_width = mlp.down.num_columns
    width = mlp.down.num_rows
    hidden_PF = torch.empty(num_pairs, expert_width, dtype=x_TD.dtype, device=device)
    planned = pointers_E, order_P, tiles_3N, num_tiles, most_tiles
    more = {
        "TILE": tile,
        "ROWS": ROWS,
        "num_warps": WARPS,
        "num_stages": STAGES,
        "enable_fp_fusion": True,
    }
    _up_tile[(triton.cdiv(expert_width, ROWS), most_tiles)](
        x_TD,
        weights_TK,
        *planned,
        hidden_PF,
        MLP=mlp,
        TOP_K=index_TK.shape[1],
        CHUNKS=_chunks(mlp.gate, x_TD),
        **more,
    )
    _down_tile[(triton.cdiv(width, ROWS), most_tiles)](
        hidden_PF, *planned, out_PD, MLP=mlp, CHUNKS=_chunks(mlp.down, x_TD), **more
    )


def _chunks(matrix: Matrix, x_TD: Tensor) -> int:
    """Of a block of columns."""
    return max(1, COLUMNS * 2 // x_TD.element_size() // matrix.chunk)


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
    """Each program looks through all pairs, twice: it has to know where its own begin."""
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
        is_own_B = (expert_B == expert).to(tl.int32)
        place_B = begin + tl.cumsum(is_own_B, 0) - 1
        tl.store(order_P + place_B, first + tl.arange(0, BLOCK), mask=is_own_B > 0)
        begin += tl.sum(is_own_B)


@triton.jit
def _experts(index_P, pointers_E, first, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """[B]: the experts of pairs; NUM_EXPERTS for those that are not computed now."""
    pair_B = first + tl.arange(0, BLOCK)
    expert_B = tl.load(index_P + pair_B, mask=pair_B < num_pairs, other=-1).to(tl.int32)
    pointer_B = tl.load(pointers_E + expert_B, mask=expert_B >= 0, other=0)
    return tl.where(pointer_B != 0, expert_B, NUM_EXPERTS)


@triton.jit(do_not_specialize=["most_tiles"])
def _up_tile(
    x_TD,
    weights_P,
    pointers_E,
    order_P,
    tiles_3N,
    num_tiles,
    most_tiles,
    hidden_PF,
    MLP: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    if tl.program_id(1) >= tl.load(num_tiles):
        return
    GATE: tl.constexpr = MLP.gate
    UP: tl.constexpr = MLP.up
    slot, pair_M, is_row_M = _tile(pointers_E, order_P, tiles_3N, most_tiles, TILE)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_R = inside(row_R, GATE.num_rows, ROWS)
    gate_MR = tl.zeros((TILE, ROWS), tl.float32)
    up_MR = tl.zeros((TILE, ROWS), tl.float32)
    for column in range(0, GATE.num_columns, CHUNKS * GATE.chunk):
        x_MK = _load_rows(x_TD, pair_M // TOP_K, is_row_M, column, GATE, CHUNKS)
        gate_MR = _product(x_MK, weight_tile(slot, valid_R, column, GATE, CHUNKS), gate_MR)
        if UP is not None:
            up_MR = _product(x_MK, weight_tile(slot, valid_R, column, UP, CHUNKS), up_MR)
    if MLP.weighs_input:
        weight_M1 = tl.load(weights_P + pair_M, mask=is_row_M, other=0.0).to(tl.float32)[:, None]
        gate_MR *= weight_M1
        up_MR *= weight_M1
    gate_MR += load_bias(slot, True, valid_R, GATE)[None, :]
    if UP is not None:
        up_MR += load_bias(slot, True, valid_R, UP)[None, :]
    hidden_MR = mlp_hidden(gate_MR, up_MR, MLP.activation).to(hidden_PF.dtype.element_ty)
    _store(hidden_PF, hidden_MR, pair_M, is_row_M, row_R, GATE)


@triton.jit(do_not_specialize=["most_tiles"])
def _down_tile(
    hidden_PF,
    pointers_E,
    order_P,
    tiles_3N,
    num_tiles,
    most_tiles,
    out_PD,
    MLP: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    if tl.program_id(1) >= tl.load(num_tiles):
        return
    DOWN: tl.constexpr = MLP.down
    slot, pair_M, is_row_M = _tile(pointers_E, order_P, tiles_3N, most_tiles, TILE)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_R = inside(row_R, DOWN.num_rows, ROWS)
    out_MR = tl.zeros((TILE, ROWS), tl.float32)
    for column in range(0, DOWN.num_columns, CHUNKS * DOWN.chunk):
        hidden_MK = _load_rows(hidden_PF, pair_M, is_row_M, column, DOWN, CHUNKS)
        out_MR = _product(hidden_MK, weight_tile(slot, valid_R, column, DOWN, CHUNKS), out_MR)
    out_MR += load_bias(slot, True, valid_R, DOWN)[None, :]
    _store(out_PD, out_MR, pair_M, is_row_M, row_R, DOWN)


@triton.jit
def _tile(pointers_E, order_P, tiles_3N, most_tiles, TILE: tl.constexpr):
    """The slot of its expert, its pairs, and which of these there are."""
    tile = tl.program_id(1)
    pointer = tl.load(pointers_E + tl.load(tiles_3N + tile))
    slot = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint8)), _LOAD_BYTES)
    at_M = tl.load(tiles_3N + most_tiles + tile) + tl.arange(0, TILE)
    is_row_M = at_M < tl.load(tiles_3N + 2 * most_tiles + tile)
    pair_M = tl.load(order_P + at_M, mask=is_row_M, other=0).to(tl.int64)
    return slot, pair_M, is_row_M


@triton.jit
def _load_rows(x, row_M, is_row_M, first_column, MATRIX: tl.constexpr, CHUNKS: tl.constexpr):
    """[M, K]; 0 beyond the last column."""
    column_K = first_column + tl.arange(0, CHUNKS * MATRIX.chunk)
    is_there_MK = is_row_M[:, None] & (column_K < MATRIX.num_columns)[None, :]
    at_MK = row_M[:, None] * MATRIX.num_columns + column_K[None, :]
    return tl.load(x + at_MK, mask=is_there_MK, other=0.0)


@triton.jit
def _product(x_MK, weight_RK, sum_MR):
    weight_KR = tl.trans(weight_RK.to(x_MK.dtype))
    if _IS_INTERPRETED:  # which multiplies the bits of a bfloat16 as whole numbers
        x_MK = x_MK.to(tl.float32)
        weight_KR = weight_KR.to(tl.float32)
    return tl.dot(x_MK, weight_KR, sum_MR, input_precision="ieee")


@triton.jit
def _store(out, value_MR, pair_M, is_row_M, row_R, MATRIX: tl.constexpr):
    at_MR = pair_M[:, None] * MATRIX.num_rows + row_R[None, :]
    mask_MR = is_row_M[:, None] & (row_R < MATRIX.num_rows)[None, :]
    tl.store(out + at_MR, value_MR, mask=mask_MR)
