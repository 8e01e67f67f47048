"""Modules of a model on a GPU that compute in fewer kernels than their own code launches."""

from __future__ import annotations

import torch
from torch import nn

from moe_infinity.cuda.attention_modules import fuse_attention
from moe_infinity.cuda.norms import fuse_norms
from moe_infinity.cuda.routers import fuse_routers


class FusedModules:
    """They have other forward methods, until close()."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        found = [
            *fuse_norms(model, device),
            *fuse_attention(model),
            *fuse_routers(model, device),
        ]
        self.modules = [module for module, _ in found]
        for module, forward in found:
            vars(module)["forward"] = forward

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module in self.modules:
            vars(module).pop("forward", None)
