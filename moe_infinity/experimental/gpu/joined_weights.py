"""The weights of several layers as one, for one product in place of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Of layers with the same input. Each layer's own weight becomes a part of what they share, and
    so its bias. Where only some have a bias the others' is 0.
    """
    sizes = [each.out_features for each in linears]
    with torch.no_grad():
        weight = torch.cat(tuple(each.weight for each in linears))
        bias = None
        if any(each.bias is not None for each in linears):
            biases = (_bias_of(each) for each in linears)
            bias = torch.cat(tuple(biases))
    for each, part in zip(linears, weight.split(sizes), strict=True):
        each.weight.data = part
    if bias is not None:
        for each, part in zip(linears, bias.split(sizes), strict=True):
            if each.bias is not None:
                each.bias.data = part
    return weight, bias


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
