"""Which model this is, as a short text: what was learned of one model is no use to another."""

from __future__ import annotations

import hashlib

from torch import nn

from moe_infinity.architectures.adapters import ExpertsModule

VALUES = 16  # of each dense parameter: enough to tell one fine-tuning from another


def signature_of(model: nn.Module, layers: list[ExpertsModule]) -> str:
    """Class, MoE layers and experts, and a hash of some weights of every dense parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:VALUES].float().cpu().numpy()
        digest.update(name.encode() + str(tuple(parameter.shape)).encode() + values.tobytes())
    experts = "+".join(str(layer.num_experts) for layer in layers)
    return f"{type(model).__name__} {experts} {digest.hexdigest()[:16]}"
