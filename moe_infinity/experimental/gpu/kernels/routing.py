"""What routers compute, in two kernels: the logits of all experts, and the choice among them.
reference.py has the definitions.

    router_logits    [block of tokens, block of experts]    a product of matrices
    choose           [token]                                the largest scores, one after the other

A score is compared as an int32 that has its order: NaN is the largest, and two numbers below all
others stand for experts that do not exist or are chosen, and for those of groups that are not kept.

Legend: B tokens, E experts, D model width, K experts of a token, G groups of M experts, T tokens of
a block, R rows of the weight in a block, C columns of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.descriptions import TINY, ExpertChoice
from moe_infinity.kernels.triton.experts import product

TILE = 16  # tokens and experts of a program
COLUMNS = 128  # of a block
WARPS = 4
STAGES = 3  # blocks whose loads are under way

_TINY = tl.constexpr(TINY)
_NAN_ORDER = tl.constexpr(0x7FFFFFFF)
_NOT_KEPT = tl.constexpr(-0x7FFFFFFF)  # -inf is -0x7F800001
_GONE = tl.constexpr(-0x80000000)


def router_logits(x_BD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Return [B, E] in float32, as are products and sums. All is contiguous, and on one device."""
    num_tokens, width = x_BD.shape
    num_experts = len(weight_ED)
    assert weight_ED.shape[1] == width, (weight_ED.shape, width)
    given = x_BD, weight_ED, bias_E
    assert all(t.is_contiguous() for t in given if t is not None), x_BD.stride()
    logits_BE = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x_BD.device)
    _router_logits[(triton.cdiv(num_tokens, TILE), triton.cdiv(num_experts, TILE))](
        *given,
        logits_BE,
        num_tokens,
        NUM_EXPERTS=num_experts,
        WIDTH=width,
        TILE=TILE,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    return logits_BE


def choose(
    logits_BE: Tensor, correction_E: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 [B, K], and their weights, [B, K]. `logits_BE` is
    float32; all is contiguous, and on one device.
    """
    num_tokens, num_experts = logits_BE.shape
    assert choice.fits(num_experts), (choice, num_experts)
    given = logits_BE, correction_E
    assert all(t.is_contiguous() for t in given if t is not None), logits_BE.stride()
    assert logits_BE.dtype == torch.float32, logits_BE.dtype
    device = logits_BE.device
    index_BK = torch.empty(num_tokens, choice.top_k, dtype=torch.int64, device=device)
    weights_BK = torch.empty(num_tokens, choice.top_k, dtype=choice.dtype, device=device)
    members = num_experts // choice.num_groups
    _choose[(num_tokens,)](
        logits_BE,
        correction_E,
        index_BK,
        weights_BK,
        SCORES=choice.scores,
        WEIGHTS=choice.weights,
        FACTOR=choice.factor,
        TOP_K=choice.top_k,
        SLOTS=triton.next_power_of_2(choice.top_k),
        NUM_GROUPS=choice.num_groups,
        GROUPS=triton.next_power_of_2(choice.num_groups),
        KEPT_GROUPS=choice.kept_groups,
        GROUP_SCORE=choice.group_score,
        NUM_MEMBERS=members,
        MEMBERS=triton.next_power_of_2(members),
        num_warps=1,  # so nothing is passed through shared memory for each chosen expert
        enable_fp_fusion=True,
    )
    return index_BK, weights_BK


@triton.jit(do_not_specialize=["num_tokens"])
def _router_logits(
    x_BD,
    weight_ED,
    bias_E,
    logits_BE,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Both are multiplied in their dtype if they have one, otherwise in float32."""
    token_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row_R = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token_T = token_T < num_tokens
    is_row_R = row_R < NUM_EXPERTS
    logits_TR = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column_C = first + tl.arange(0, COLUMNS)
        is_column_C = column_C < WIDTH
        x_TC = tl.load(
            x_BD + token_T[:, None] * WIDTH + column_C[None, :],
            mask=is_token_T[:, None] & is_column_C[None, :],
            other=0.0,
        )
        weight_RC = tl.load(
            weight_ED + row_R[:, None] * WIDTH + column_C[None, :],
            mask=is_row_R[:, None] & is_column_C[None, :],
            other=0.0,
        )
        if x_TC.dtype != weight_RC.dtype:
            x_TC = x_TC.to(tl.float32)
            weight_RC = weight_RC.to(tl.float32)
        logits_TR = product(x_TC, tl.trans(weight_RC), logits_TR)
    if bias_E is not None:
        logits_TR += tl.load(bias_E + row_R, mask=is_row_R, other=0.0).to(tl.float32)[None, :]
    at_TR = token_T[:, None] * NUM_EXPERTS + row_R[None, :]
    tl.store(logits_BE + at_TR, logits_TR, mask=is_token_T[:, None] & is_row_R[None, :])


@triton.jit
def _choose(
    logits_BE,
    correction_E,
    index_BK,
    weights_BK,
    SCORES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FACTOR: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    NUM_MEMBERS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits_E = logits_BE + token * (NUM_GROUPS * NUM_MEMBERS)
    group_G = tl.arange(0, GROUPS)
    member_M = tl.arange(0, MEMBERS)
    expert_GM = group_G[:, None] * NUM_MEMBERS + member_M[None, :]
    exists_GM = (group_G < NUM_GROUPS)[:, None] & (member_M < NUM_MEMBERS)[None, :]
    logits_GM = tl.load(logits_E + expert_GM, mask=exists_GM, other=float("-inf"))
    most = tl.max(tl.max(logits_GM, 1), 0)  # of what is no NaN
    total = tl.sum(tl.sum(tl.exp(logits_GM - most), 1), 0)
    ranked_GM = _scores(logits_GM, most, total, SCORES)
    if correction_E is not None:
        correction_GM = tl.load(correction_E + expert_GM, mask=exists_GM, other=0.0)
        ranked_GM += correction_GM.to(tl.float32)
    order_GM = tl.where(exists_GM, _order(ranked_GM), _GONE)
    if KEPT_GROUPS < NUM_GROUPS:
        is_kept_G = _kept(order_GM, expert_GM, group_G, NUM_GROUPS, KEPT_GROUPS, GROUP_SCORE)
        order_GM = tl.where(exists_GM & ~is_kept_G[:, None], _NOT_KEPT, order_GM)

    k_K = tl.arange(0, SLOTS)
    chosen_K = tl.zeros((SLOTS,), tl.int32)
    for k in tl.static_range(TOP_K):
        largest = tl.max(tl.max(order_GM, 1), 0)
        expert = tl.min(tl.min(tl.where(order_GM == largest, expert_GM, _NAN_ORDER), 1), 0)
        chosen_K = tl.where(k_K == k, expert, chosen_K)
        order_GM = tl.where(expert_GM == expert, _GONE, order_GM)

    is_k_K = k_K < TOP_K
    logits_K = tl.load(logits_E + chosen_K, mask=is_k_K, other=float("-inf"))
    weights_K = _weights(_scores(logits_K, most, total, SCORES), is_k_K, WEIGHTS) * FACTOR
    at_K = token * TOP_K + k_K
    tl.store(index_BK + at_K, chosen_K.to(tl.int64), mask=is_k_K)
    tl.store(weights_BK + at_K, weights_K.to(weights_BK.dtype.element_ty), mask=is_k_K)


@triton.jit
def _scores(logits, most, total, SCORES: tl.constexpr):
    """Given the largest logit of all experts, and the sum of the exponentials of the rest."""
    if SCORES == "softmax":
        scores = tl.exp(logits - most) / total
    elif SCORES == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORES == "logits")
        scores = logits
    return scores


@triton.jit
def _weights(scores_K, is_k_K, WEIGHTS: tl.constexpr):
    if WEIGHTS == "softmax":
        scores_K = tl.where(is_k_K, scores_K, float("-inf"))
        weights_K = tl.exp(scores_K - tl.max(scores_K, 0))
        weights_K /= tl.sum(weights_K, 0)
    elif WEIGHTS == "divided by their sum":
        weights_K = scores_K / (tl.sum(tl.where(is_k_K, scores_K, 0.0), 0) + _TINY)
    else:
        tl.static_assert(WEIGHTS == "as they are")
        weights_K = scores_K
    return weights_K


@triton.jit
def _order(values):
    """int32s that are in the order of these float32s; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values == values, order, _NAN_ORDER)


@triton.jit
def _value(order):
    """The float32s that are in this order."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _kept(
    order_GM,
    expert_GM,
    group_G,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
):
    """[G]: whether a group is one of those whose score is largest."""
    order_G = tl.max(order_GM, 1)
    if GROUP_SCORE == "sum of two best":
        is_best_GM = order_GM == order_G[:, None]
        best_G = tl.min(tl.where(is_best_GM, expert_GM, _NAN_ORDER), 1)
        second_G = tl.max(tl.where(expert_GM == best_G[:, None], _GONE, order_GM), 1)
        order_G = _order(_value(order_G) + _value(second_G))
    else:
        tl.static_assert(GROUP_SCORE == "best")
    order_G = tl.where(group_G < NUM_GROUPS, order_G, _GONE)
    is_kept_G = group_G < 0
    for _ in tl.static_range(KEPT_GROUPS):
        largest = tl.max(order_G, 0)
        group = tl.min(tl.where(order_G == largest, group_G, _NAN_ORDER), 0)
        is_kept_G = is_kept_G | (group_G == group)
        order_G = tl.where(group_G == group, _GONE, order_G)
    return is_kept_G
