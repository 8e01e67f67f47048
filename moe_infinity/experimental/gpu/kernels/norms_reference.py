"""The reference of norms.py, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

# The normed row is rounded before it is multiplied by the weight, and after; or after alone; and
# that after multiplying by 1 + weight.
FORMS = ("rounded twice", "rounded once", "plus one")


def plain_rms_norm(x: Tensor, weight_D: Tensor, eps: float, form: str) -> Tensor:
    """The definition. Source: what classes of transformers compute, e.g. Qwen3MoeRMSNorm,
    GptOssRMSNorm and Qwen3NextRMSNorm.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "rounded twice":
        return weight_D * normed.to(x.dtype)
    weight = weight_D.float() + 1.0 if form == "plus one" else weight_D.float()
    return (normed * weight).to(x.dtype)


def plain_add_rms_norm(
    x: Tensor, added: tuple[Tensor, ...], weight_D: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """The sum of x and the sum of the others, and its norm. Every sum is rounded."""
    total = x + sum(added[1:], added[0])
    return total, plain_rms_norm(total, weight_D, eps, form)
