"""The work of a router with its logits in one kernel: the choice among all experts. reference.py
has the definition. A program looks at one token, and takes the largest scores one after the other.

A score is compared as an int32 that has its order: NaN is the largest, and two numbers below all
others stand for experts that do not exist or are chosen, and for those of groups that are not kept.

Legend: B tokens, E experts, K experts of a token, G groups of M experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_infinity.gpu.kernels.descriptions import TINY, ExpertChoice

_TINY = tl.constexpr(TINY)
_NAN_ORDER = tl.constexpr(0x7FFFFFFF)
_NOT_KEPT = tl.constexpr(-0x7FFFFFFF)  # -inf is -0x7F800001
_GONE = tl.constexpr(-0x80000000)


def choose(
    logits_BE: Tensor, correction_E: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 [B, K], and their weights, [B, K]. They are
    compared in float32. All is contiguous, and on one device.
    """
    num_tokens, num_experts = logits_BE.shape
    assert choice.fits(num_experts), (choice, num_experts)
    given = logits_BE, correction_E
    assert all(t.is_contiguous() for t in given if t is not None), logits_BE.stride()
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
    logits_GM = tl.load(logits_E + expert_GM, mask=exists_GM, other=float("-inf")).to(tl.float32)
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
    logits_K = tl.load(logits_E + chosen_K, mask=is_k_K, other=float("-inf")).to(tl.float32)
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
