"""The experts of any number of tokens, each read from where a pointer says it is: a slot of the
device or, through the link, page-locked host memory.

    one token        up    [block of F rows, pair]    hidden = activation(gate x, up x)
                     down  [block of D rows, pair]    out = down hidden
    more             plan  sorts pairs by expert (tiles.py), then the same for tiles of rows
    either           sum   out of a token = sum over k of weight * out of the pair, rounded once

One program computes all of an output, always in the same order. So a token's result depends on x,
its experts, its weights and how many tokens the pass has, not on where experts are, on what the
other tokens are or on what was cached.

Legend: T tokens, K experts per token, P = T * K pairs, E experts of the layer, D model width, F
expert width, R rows, N chunks of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.experimental.gpu.kernels import tiles
from moe_infinity.experimental.gpu.kernels.activated import inside, mlp_hidden
from moe_infinity.experimental.gpu.kernels.slot_mlp import LOAD_BYTES, LOADED, Matrix, SlotMlp
from moe_infinity.experimental.gpu.kernels.weights import chunk_sums, load_bias, load_x

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)

# Loads of 16 bytes in a tile, and the warps that share them. Each thread has 4 loads under way,
# from the two matrices of up or the one of down (awq: 8).
UP_LOADS = 256
UP_WARPS = 4
DOWN_LOADS = 512
DOWN_WARPS = 4
AWQ_ROWS = 32
AWQ_WARPS = 4  # a load is 16 bytes of a column; each thread has chunks of its own
MAX_CHUNKS = 128  # of a row at once; tiles of shorter rows have more rows
MAX_ROWS = 16  # more would leave too few programs
SUM_BLOCK = 1024  # columns of a program


def tile_of(matrix: Matrix, num_loads: int, num_warps: int) -> dict[str, int]:
    """Launch arguments: rows and chunks of a tile, powers of two, and warps. A multiplication and
    the addition after it are fused whatever Triton's default is: that changes in 3.10, and with it
    the last bits.
    """
    rows = MAX_ROWS
    chunks = triton.next_power_of_2(triton.cdiv(matrix.num_columns, matrix.chunk))
    if matrix.kind == "awq":
        rows = AWQ_ROWS
        chunks = min(chunks, 32 * AWQ_WARPS)
        num_warps = AWQ_WARPS
    elif matrix.column_stride > 1:  # loads are of rows
        chunks = min(chunks, num_loads * LOADED[matrix.kind] // (MAX_ROWS * matrix.chunk))
    else:
        chunks = min(chunks, MAX_CHUNKS, num_loads // 4)
        rows = min(num_loads // chunks, MAX_ROWS)
    return {"ROWS": rows, "CHUNKS": chunks, "num_warps": num_warps, "enable_fp_fusion": True}


def compute_pairs(
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
    out_PD: Tensor,
) -> None:
    """Fill the rows of `out_PD`, float32 [P, D], whose experts have a pointer that is not 0.
    `index_TK` has int64 ids of experts, -1 for none, `pointers_E` int64 addresses of slots. All
    tensors are contiguous, and on one device.
    """
    (num_tokens, width) = x_TD.shape
    top_k = index_TK.shape[1]
    assert width == mlp.down.num_rows == mlp.gate.num_columns, (width, mlp)
    given = x_TD, index_TK, weights_TK, pointers_E, out_PD
    assert all(t.is_contiguous() for t in given), x_TD.stride()
    if num_tokens > 1:
        tiles.compute_pairs(mlp, *given)
        return
    expert_width = mlp.down.num_columns
    up = tile_of(mlp.gate, UP_LOADS, UP_WARPS)
    down = tile_of(mlp.down, DOWN_LOADS, DOWN_WARPS)
    hidden_PF = torch.empty(top_k, expert_width, dtype=torch.float32, device=x_TD.device)
    _up[(triton.cdiv(expert_width, up["ROWS"]), top_k)](
        x_TD, index_TK, weights_TK, pointers_E, hidden_PF, MLP=mlp, TOP_K=top_k, **up
    )
    _down[(triton.cdiv(width, down["ROWS"]), top_k)](
        hidden_PF, index_TK, pointers_E, out_PD, MLP=mlp, **down
    )


def sum_pairs(
    mlp: SlotMlp, out_PD: Tensor, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """[T, D]: the weighted sums over each token's experts, added in float32, once all are
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
        IS_WEIGHED=mlp.weighs_input,
        BLOCK=SUM_BLOCK,
        enable_fp_fusion=True,
    )
    return sum_TD


@triton.jit
def _up(
    x_TD,
    index_P,
    weights_P,
    pointers_E,
    hidden_PF,
    MLP: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    GATE: tl.constexpr = MLP.gate
    UP: tl.constexpr = MLP.up
    CHUNK: tl.constexpr = GATE.chunk
    pair = tl.program_id(1)
    slot, is_there = slot_of(index_P + pair, pointers_E)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_R = inside(row_R, GATE.num_rows, ROWS)
    x = x_TD + pair // TOP_K * GATE.num_columns
    gate_RN = tl.zeros((ROWS, CHUNKS), tl.float32)
    up_RN = tl.zeros((ROWS, CHUNKS), tl.float32)
    for column in range(0, GATE.num_columns, CHUNKS * CHUNK):
        x_NC = load_x(x, column, GATE.num_columns, CHUNKS, CHUNK)
        gate_RN += chunk_sums(slot, is_there, valid_R, x_NC, column, GATE, CHUNKS)
        if UP is not None:
            up_RN += chunk_sums(slot, is_there, valid_R, x_NC, column, UP, CHUNKS)
    weight = tl.where(is_there, tl.load(weights_P + pair).to(tl.float32), 0.0)
    weight = weight if MLP.weighs_input else 1.0
    gate_R = weight * tl.sum(gate_RN, 1) + load_bias(slot, is_there, valid_R, GATE)
    up_R = gate_R
    if UP is not None:
        up_R = weight * tl.sum(up_RN, 1) + load_bias(slot, is_there, valid_R, UP)
    hidden_R = mlp_hidden(gate_R, up_R, MLP.activation)
    tl.store(hidden_PF + pair * GATE.num_rows + row_R, hidden_R, mask=row_R < GATE.num_rows)


@triton.jit
def _down(
    hidden_PF,
    index_P,
    pointers_E,
    out_PD,
    MLP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    DOWN: tl.constexpr = MLP.down
    CHUNK: tl.constexpr = DOWN.chunk
    pair = tl.program_id(1)
    slot, is_there = slot_of(index_P + pair, pointers_E)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_R = inside(row_R, DOWN.num_rows, ROWS)
    hidden = hidden_PF + pair * DOWN.num_columns
    sums_RN = tl.zeros((ROWS, CHUNKS), tl.float32)
    for column in range(0, DOWN.num_columns, CHUNKS * CHUNK):
        hidden_NC = load_x(hidden, column, DOWN.num_columns, CHUNKS, CHUNK)
        sums_RN += chunk_sums(slot, is_there, valid_R, hidden_NC, column, DOWN, CHUNKS)
    out_R = tl.sum(sums_RN, 1) + load_bias(slot, is_there, valid_R, DOWN)
    is_row = is_there & (row_R < DOWN.num_rows)
    tl.store(out_PD + pair * DOWN.num_rows + row_R, out_R, mask=is_row)


@triton.jit
def slot_of(place, pointers_E):
    """The slot of the expert whose id is at `place`, and whether there is one."""
    expert = tl.load(place)
    pointer = tl.load(pointers_E + expert, mask=expert >= 0, other=0)
    slot = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint8)), _LOAD_BYTES)
    return slot, pointer != 0


@triton.jit
def _sum(
    out_PD,
    index_P,
    weights_P,
    sum_TD,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        is_there = tl.load(index_P + pair) >= 0
        weight = tl.load(weights_P + pair).to(tl.float32)
        weight = 1.0 if IS_WEIGHED else weight
        is_column = is_there & (column_D < WIDTH)
        out_D = tl.load(out_PD + pair * WIDTH + column_D, mask=is_column, other=0.0)
        sum_D += tl.where(is_there, weight, 0.0) * out_D
    sum_D = sum_D.to(sum_TD.dtype.element_ty)
    tl.store(sum_TD + token * WIDTH + column_D, sum_D, mask=column_D < WIDTH)
