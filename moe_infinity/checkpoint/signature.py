"""A signature tells a model from others with the same config, by some values of all its dense
weights. It is the same whether an embedding is in memory or looked up in its file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.architectures.stored_embedding import StoredEmbedding

SIGNED_VALUES = 16  # of each dense parameter: enough to tell one fine-tuning from another
OF_ADAPTERS = (
    "active_adapters",
    "disable_adapters",
    "merged_adapters",
    "scaling",
)  # of PEFT's layers


def signature_of(model: nn.Module, layers: list[ExpertsModule]) -> str:
    """A short text that tells this model from others: its class, MoE layers and experts, and a hash
    of its dense weights. What was learned of one model is no use to another.
    """
    experts = "+".join(str(layer.num_experts) for layer in layers)
    return f"{type(model).__name__} {experts} {digest_of(model)[:16]}"


def digest_of(model: nn.Module) -> str:
    """A hash of some values of every dense parameter, in memory or not, and of which adapters of
    PEFT take part.
    """
    digest = hashlib.sha256()
    for name, shape, values in _signed(model):
        digest.update(name.encode() + str(shape).encode())
        digest.update(values.float().cpu().numpy().tobytes())
    for name, module in model.named_modules():
        if isinstance(
            getattr(module, "disable_adapters", None), bool
        ):  # a model has a method of this name
            values_of = [str(getattr(module, each, None)) for each in OF_ADAPTERS]
            digest.update(f"{name} {values_of}".encode())
    return digest.hexdigest()


def _signed(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yield the name, shape and first values of each parameter, once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        stem = f"{prefix}." if prefix else ""
        if isinstance(module, StoredEmbedding):
            num_rows = -(-SIGNED_VALUES // module.embedding_dim)
            first = torch.arange(min(num_rows, module.num_embeddings), device="cpu")
            values = module.rows.look_up(first, module.dtype).flatten()[:SIGNED_VALUES]
            yield f"{stem}weight", (module.num_embeddings, module.embedding_dim), values
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                values = parameter.detach().flatten()[:SIGNED_VALUES]
                yield stem + name, tuple(parameter.shape), values
