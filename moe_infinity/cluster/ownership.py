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

HEAD = 0
NOBODY = -1
SAMPLE_BYTES = 64  # of one expert of every layer: enough to tell one fine-tuning from another


def owners(layers: Sequence[ExpertsModule], num_shares: int) -> NDArray[np.int64]:
    """[L, E]: whose share each expert is; NOBODY where a layer has fewer experts."""
    experts_E = np.arange(max(layer.num_experts for layer in layers))
    layers_L1 = np.arange(len(layers))[:, None]
    num_L1 = np.array([layer.num_experts for layer in layers])[:, None]
    owners_LE: NDArray[np.int64] = (layers_L1 + experts_E) % num_shares
    owners_LE[experts_E[None, :] >= num_L1] = NOBODY
    return owners_LE


def digest_of(plan: Plan, reader: Reader) -> str:
    """Hash some bytes of an expert of every layer: hosts have to read the same checkpoint."""
    digest = hashlib.sha256()
    for layer, recipes in zip(plan.layers, plan.recipes, strict=True):
        extent = recipes.recipes[0].extents(layer.num_experts - 1)[0]
        some = bytearray(min(SAMPLE_BYTES, extent.num_bytes))
        reader.read_into(replace(extent, num_bytes=len(some)), memoryview(some))
        digest.update(repr((extent.num_bytes, layer.num_experts)).encode() + some)
    return digest.hexdigest()
