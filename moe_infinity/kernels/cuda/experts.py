"""The experts of a few tokens, each read from where a pointer says it is: a slot of the device or,
through the link, page-locked host memory. Two kernels in every layer of a captured step.

    up     [block of F rows, pair]     hidden = activation(gate x, up x)            float32
    down   [block of D rows, token]    out = sum over k of weight * down hidden     rounded once

One program computes all of an output, always in the same order. So a token's result depends on x,
its experts and its weights alone, not on where experts are, on the other tokens of the batch or on
what was cached. Weights are read once for each pair, which suits the few tokens of a decode step:
most of their experts differ.

Legend: T tokens, K experts per token, P = T * K pairs, D model width, F expert width, R rows, N
chunks of columns.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.kernels.cuda.slot_mlp import LOAD_BYTES, LOADED, Matrix, SlotMlp
from moe_infinity.kernels.cuda.weights import chunk_sums, load_bias, load_x

_LOAD_BYTES = tl.constexpr(LOAD_BYTES)
_NO_LIMIT = tl.constexpr(math.inf)
_NAN = tl.constexpr(tl.PropagateNan.ALL)

# Loads of 16 bytes in a tile, and the warps that share them. Each thread has 4 loads under way,
# from the two matrices of up or the one of down (awq: 8). Down has another input for each expert,
# so its tiles have more rows to share it. Its programs are few, 256 for one token of Qwen3-30B-A3B,
# so each has more warps.
UP_LOADS = 256
UP_WARPS = 4
DOWN_LOADS = 1024
DOWN_WARPS = 8
DOWN_STAGES = 1  # experts whose loads are under way; not measured: benchmarks/gpu_tiles.py
AWQ_ROWS = 32
AWQ_WARPS = 4  # a load is 16 bytes of a column; each thread has chunks of its own
MAX_CHUNKS = 128  # of a row at once; tiles of shorter rows have more rows
MAX_ROWS = 16  # more would leave too few programs


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


def slot_moe(mlp: SlotMlp, x_TD: Tensor, pointers_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
    """[T, D] -> [T, D], in the dtype of x, summed in float32. `pointers_TK` are int64 addresses of
    slots, 0 for a pair without an expert. All tensors are contiguous and on one device.
    """
    (num_tokens, width) = x_TD.shape
    top_k = pointers_TK.shape[1]
    assert width == mlp.down.num_rows == mlp.gate.num_columns, (width, mlp)
    assert all(t.is_contiguous() for t in (x_TD, pointers_TK, top_k_weights_TK)), x_TD.stride()
    num_pairs = num_tokens * top_k
    expert_width = mlp.down.num_columns
    up = tile_of(mlp.gate, UP_LOADS, UP_WARPS)
    down = tile_of(mlp.down, DOWN_LOADS, DOWN_WARPS)
    hidden_PF = torch.empty(num_pairs, expert_width, dtype=torch.float32, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    _up[(triton.cdiv(expert_width, up["ROWS"]), num_pairs)](
        x_TD,
        pointers_TK,
        top_k_weights_TK,
        hidden_PF,
        MLP=mlp,
        TOP_K=top_k,
        **up,
    )
    _down[(triton.cdiv(width, down["ROWS"]), num_tokens)](
        hidden_PF,
        pointers_TK,
        top_k_weights_TK,
        out_TD,
        MLP=mlp,
        TOP_K=top_k,
        STAGES=DOWN_STAGES,
        **down,
    )
    return out_TD


@triton.jit
def _up(
    x_TD,
    pointers_P,
    weights_P,
    hidden_PF,
    MLP: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    GATE: tl.constexpr = MLP.gate
    UP: tl.constexpr = MLP.up
    ACTIVATION: tl.constexpr = MLP.activation
    CHUNK: tl.constexpr = GATE.chunk
    pair = tl.program_id(1)
    pointer = tl.load(pointers_P + pair)
    slot = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint8)), _LOAD_BYTES)
    is_there = pointer != 0
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
    if ACTIVATION.limit < _NO_LIMIT:
        gate_R = tl.minimum(gate_R, ACTIVATION.limit, propagate_nan=_NAN)
    hidden_R = activated(gate_R, tl.constexpr(ACTIVATION.function), ACTIVATION.alpha)
    if UP is not None:
        up_R = weight * tl.sum(up_RN, 1) + load_bias(slot, is_there, valid_R, UP)
        if ACTIVATION.limit < _NO_LIMIT:
            up_R = tl.clamp(up_R, -ACTIVATION.limit, ACTIVATION.limit, propagate_nan=_NAN)
        hidden_R *= up_R + ACTIVATION.shift
    tl.store(hidden_PF + pair * GATE.num_rows + row_R, hidden_R, mask=row_R < GATE.num_rows)


@triton.jit
def _down(
    hidden_PF,
    pointers_P,
    weights_P,
    out_TD,
    MLP: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    DOWN: tl.constexpr = MLP.down
    CHUNK: tl.constexpr = DOWN.chunk
    token = tl.program_id(1)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_R = inside(row_R, DOWN.num_rows, ROWS)
    biases_R = tl.zeros((ROWS,), tl.float32)
    sums_RN = tl.zeros((ROWS, CHUNKS), tl.float32)
    for pair in tl.range(token * TOP_K, token * TOP_K + TOP_K, num_stages=STAGES):
        pointer = tl.load(pointers_P + pair)
        slot = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint8)), _LOAD_BYTES)
        is_there = pointer != 0
        weight = tl.load(weights_P + pair).to(tl.float32)
        weight = 1.0 if MLP.weighs_input else weight
        weight = tl.where(is_there, weight, 0.0)
        hidden = hidden_PF + pair * DOWN.num_columns
        for column in range(0, DOWN.num_columns, CHUNKS * CHUNK):
            hidden_NC = load_x(hidden, column, DOWN.num_columns, CHUNKS, CHUNK)
            products_RN = chunk_sums(slot, is_there, valid_R, hidden_NC, column, DOWN, CHUNKS)
            sums_RN += weight * products_RN
        biases_R += weight * load_bias(slot, is_there, valid_R, DOWN)
    out_R = tl.sum(sums_RN, 1) + biases_R
    out = out_R.to(out_TD.dtype.element_ty)
    tl.store(out_TD + token * DOWN.num_rows + row_R, out, mask=row_R < DOWN.num_rows)


@triton.jit
def inside(row_R, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """Rows beyond the last one become the last. Only where needed: Triton does not know clamped
    rows to be contiguous.
    """
    if NUM_ROWS % ROWS != 0:
        row_R = tl.minimum(row_R, NUM_ROWS - 1)
    return row_R


@triton.jit
def activated(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    if FUNCTION == "silu":
        hidden = x * tl.sigmoid(ALPHA * x)
    elif FUNCTION == "gelu":
        hidden = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # 1 + tanh(z) = 2 sigmoid(2 z), without cancellation
        hidden = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(FUNCTION == "relu2")
        x = tl.maximum(x, 0.0, propagate_nan=_NAN)
        hidden = x * x
    return hidden
