"""The messages of a head to an expert host: steps that begin, what routers chose, and rows to
compute.

A host keeps account of every step as the head does, so that its policy and its predictions are
those of one machine. What does not concern a host yet waits for the next message to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.cluster.share import Share
from moe_infinity.cluster.wire import WireMessage
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.kernels.many_rows import RowPath

ARRAYS_OF_A_STEP = ("begins_B", "counted_T", "token_ids_T", "sequence_T")


class LayerRouting(NamedTuple):
    """The experts that the router of one MoE layer chose, [T, K]."""

    moe_layer_idx: int
    top_k_index_TK: Ints


Event = Step | LayerRouting


class RowsRequest(NamedTuple):
    """The events since the last request, the newest last, and rows of the newest layer."""

    number: int  # the answer has it, too
    events: Sequence[Event]
    shared_rows: Share

    def message(self) -> WireMessage:
        tensors: dict[str, Tensor] = {"x": self.shared_rows.x_ID, "input": self.shared_rows.input_P}
        events = []
        for idx, event in enumerate(self.events):
            fields, arrays = _told(event)
            events.append(fields)
            tensors |= {f"{idx} {name}": torch.from_numpy(array) for name, array in arrays.items()}
        fields = {
            "number": self.number,
            "events": events,
            "experts": self.shared_rows.expert_idxs,
            "stops": self.shared_rows.stops,
            "path": self.shared_rows.path,
        }
        return WireMessage(fields, tensors)

    @classmethod
    def of(cls, message: WireMessage) -> RowsRequest:
        fields, tensors = message
        events = []
        for idx, told in enumerate(fields["events"]):
            names = (name.partition(" ") for name in tensors if name.startswith(f"{idx} "))
            events.append(
                _event(told, {name: tensors[f"{idx} {name}"].numpy() for _, _, name in names})
            )
        share = Share(
            fields["experts"],
            fields["stops"],
            tensors["x"],
            tensors["input"],
            fields["path"] and RowPath(fields["path"]),
        )
        return cls(fields["number"], events, share)


def _told(event: Event) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    if isinstance(event, LayerRouting):
        return {"layer": event.moe_layer_idx}, {
            "top_k_index_TK": np.ascontiguousarray(event.top_k_index_TK)
        }
    arrays = {name: getattr(event, name) for name in ARRAYS_OF_A_STEP}
    fields = {
        "phase": event.phase.value,
        "num_sequences": event.num_sequences,
        "tokens_per_sequence": event.tokens_per_sequence,
    }
    return fields, {
        name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None
    }


def _event(told: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Event:
    if "layer" in told:
        return LayerRouting(told["layer"], arrays["top_k_index_TK"])
    sizes = (told["num_sequences"], told["tokens_per_sequence"])
    return Step(Phase(told["phase"]), *sizes, **cast(dict[str, Any], arrays))


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
