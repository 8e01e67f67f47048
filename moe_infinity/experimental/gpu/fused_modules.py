"""Modules of a model on a GPU that compute in fewer kernels than their own code launches."""

from __future__ import annotations

import torch
from torch import nn

from moe_infinity.experimental.gpu.attention_modules import fuse_attention
from moe_infinity.experimental.gpu.decoder_layers import fuse_layers
from moe_infinity.experimental.gpu.mlps import fuse_mlps
from moe_infinity.experimental.gpu.norms import find_norms
from moe_infinity.experimental.gpu.routers import fuse_routers


class FusedModules:
    """They have other forward methods, until close()."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        norms = find_norms(model, device)
        found = [
            *((module, norm.forward) for module, norm in norms.items()),
            *fuse_attention(model, device),
            *fuse_routers(model, device),
            *fuse_mlps(model, device),
            *fuse_layers(model, norms),
        ]
        self.modules = [module for module, _ in found]
        for module, forward in found:
            vars(module)["forward"] = forward

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module in self.modules:
            vars(module).pop("forward", None)
