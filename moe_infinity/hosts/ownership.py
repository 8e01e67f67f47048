"""Which host has which experts: share 0 is the head's.

Experts go round the hosts, each layer beginning with the next one, so that shares differ by one
expert at most and every layer is spread. L MoE layers, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader

SAMPLE_BYTES = 64  # of one expert of every layer: enough to tell one fine-tuning from another


def owners(num_layers: int, num_experts: int, num_shares: int) -> NDArray[np.int64]:
    """[L, E]: of every expert, whose it is."""
    layers_L1 = np.arange(num_layers)[:, None]
    owners_LE: NDArray[np.int64] = (layers_L1 + np.arange(num_experts)) % num_shares
    return owners_LE


def owned_by(share_idx: int, num_shares: int, layers: Sequence[ExpertsModule]) -> NDArray[np.bool_]:
    """[L, E]: which experts are one share's."""
    num_experts = max(layer.num_experts for layer in layers)
    exists_LE = np.array([np.arange(num_experts) < layer.num_experts for layer in layers])
    own_LE: NDArray[np.bool_] = exists_LE & (
        owners(len(layers), num_experts, num_shares) == share_idx
    )
    return own_LE


def digest_of(plan: Plan, reader: Reader) -> str:
    """Of some bytes of an expert of every layer: hosts have to read the same checkpoint."""
    digest = hashlib.sha256()
    for layer, recipes in zip(plan.layers, plan.recipes, strict=True):
        extent = recipes.recipes[0].extents(layer.num_experts - 1)[0]
        some = bytearray(min(SAMPLE_BYTES, extent.num_bytes))
        reader.read_into(replace(extent, num_bytes=len(some)), memoryview(some))
        digest.update(repr((extent.num_bytes, layer.num_experts)).encode() + some)
    return digest.hexdigest()
