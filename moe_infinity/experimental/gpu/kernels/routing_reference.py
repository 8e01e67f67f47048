"""What routers compute, in plain PyTorch: the definition of the kernels of routing.py.

Legend: B tokens, E experts, D model width, K experts of a token, G groups of M experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.choice import GROUP_SCORES, TINY, ExpertChoice


def router_logits(x_BD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """[B, E] in float32, as are products and sums, whatever x and the weight are in."""
    bias_E = None if bias_E is None else bias_E.float()
    return torch.nn.functional.linear(x_BD.float(), weight_ED.float(), bias_E)


def choose(
    logits_BE: Tensor, correction_E: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """The experts of each token, int64 [B, K], and their shares, [B, K]. `logits_BE` is float32.

    The largest is first, of equal ones the one with the lower index. NaN is larger than anything.
    """
    num_experts = logits_BE.shape[1]
    assert choice.fits(num_experts), (choice, num_experts)
    scores_BE = _scores(logits_BE, choice)
    ranked_BE = scores_BE if correction_E is None else scores_BE + correction_E.float()
    order_BE = _descending(ranked_BE)
    if choice.num_groups > 1:
        is_kept_BE = _is_kept(ranked_BE, choice)
        kept_first_BE = _descending(is_kept_BE.gather(1, order_BE).byte())
        order_BE = order_BE.gather(1, kept_first_BE)
    index_BK = order_BE[:, : choice.top_k].contiguous()
    shares_BK = scores_BE.gather(1, index_BK)
    if choice.shares == "softmax":
        shares_BK = shares_BK.softmax(1)
    elif choice.shares == "divided by their sum":
        shares_BK = shares_BK / (shares_BK.sum(1, keepdim=True) + TINY)
    return index_BK, (shares_BK * choice.factor).to(choice.dtype)


def _scores(logits_BE: Tensor, choice: ExpertChoice) -> Tensor:
    if choice.scores == "softmax":
        return logits_BE.softmax(1)
    return logits_BE.sigmoid() if choice.scores == "sigmoid" else logits_BE


def _is_kept(ranked_BE: Tensor, choice: ExpertChoice) -> Tensor:
    """[B, E]: whether an expert is of a kept group."""
    ranked_BGM = ranked_BE.unflatten(1, (choice.num_groups, -1))
    num_best = 1 + GROUP_SCORES.index(choice.group_score)
    groups_BG = ranked_BGM.topk(num_best, dim=2).values.sum(2)
    kept_BG = torch.zeros_like(groups_BG, dtype=torch.bool)
    kept_BG.scatter_(1, _descending(groups_BG)[:, : choice.kept_groups], True)
    return kept_BG[:, :, None].expand_as(ranked_BGM).flatten(1)


def _descending(values: Tensor) -> Tensor:
    return values.sort(dim=1, descending=True, stable=True).indices
