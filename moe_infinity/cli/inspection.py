"""Sizes of a checkpoint, and how many experts different budgets hold. Only headers are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from moe_infinity.checkpoint.file_names import find_gguf
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.plan import Plan, stored_bytes
from moe_infinity.images.mmproj import VisionPart
from moe_infinity.loading.model import plan_from_headers
from moe_infinity.local import local_folder
from moe_infinity.sizes import format_bytes

SHOWN_SHARES = (0.05, 0.10, 0.25, 0.50, 1.00)


@dataclass(frozen=True, slots=True)
class Budget:
    """How many experts one setting of host_memory holds."""

    host_memory: str
    num_bytes: int
    experts: int
    experts_per_layer: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The sizes of a checkpoint."""

    model: str
    architecture: str
    moe_layers: int
    experts_per_layer: int
    top_k: int | None  # experts per token; None: the config does not say
    packing: str | None  # how the checkpoint is quantized; None: not at all
    bytes_per_expert: int  # in a slot
    stored_bytes_per_expert: int  # on disk
    unpacked_bytes_per_expert: int  # where no kernel computes with packed weights
    expert_bytes: int  # all experts, in slots
    dense_bytes: int  # all other weights, on disk
    shared_expert_bytes: int  # the part of dense_bytes that is shared experts
    is_byte_copy: bool  # whether loads only copy; otherwise each converts its expert
    header_bytes: int  # bytes read to make this summary
    expert_types: dict[str, str]  # by MoE layers, e.g. "0-3, 5": the type of each stored weight
    dense_types: dict[str, int]  # bytes of other weights by type
    budgets: tuple[Budget, ...]

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        top_k = "" if self.top_k is None else f", {self.top_k} per token"
        loads = "plain byte copies" if self.is_byte_copy else "converted one expert at a time"
        expert = f"{format_bytes(self.bytes_per_expert)}, loads are {loads}"
        if self.packing is not None:
            unpacked = format_bytes(self.unpacked_bytes_per_expert)
            expert += f"; {self.packing}, unpacked to {unpacked} where no kernel reads it packed"
        shared = self.shared_expert_bytes
        lines = [
            f"{self.model}: {self.architecture}",
            f"MoE layers        {self.moe_layers}",
            f"experts per layer {self.experts_per_layer}{top_k}",
            f"one expert        {expert}",
            f"all experts       {format_bytes(self.expert_bytes)}",
            f"dense weights     {format_bytes(self.dense_bytes)}, "
            + (f"{format_bytes(shared)} of it shared experts" if shared else "no shared experts"),
        ]
        if self.packing is not None:
            lines += [f"layers {layers:<10} {types}" for layers, types in self.expert_types.items()]
            sizes = [f"{t} {format_bytes(size)}" for t, size in self.dense_types.items()]
            lines.append(f"dense types       {', '.join(sizes)}")
        lines += [
            "",
            f"{'host_memory':>11}  {'bytes':>10}  {'experts':>8}  {'per layer':>9}",
        ]
        lines += [
            f"{b.host_memory:>11}  {format_bytes(b.num_bytes):>10}  "
            f"{b.experts:>8,}  {b.experts_per_layer:>9.1f}"
            for b in self.budgets
        ]
        return "\n".join(lines)


def inspect_checkpoint(
    model: str,
    *,
    config_from: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Summary:
    """The sizes of a checkpoint folder, hub id or GGUF file, from its headers.

    A hub id must be in the local cache: nothing is downloaded. Raises CheckpointError,
    UnsupportedModelError.
    """
    plan = plan_from_headers(
        model if find_gguf(model) is not None else local_folder(model),
        config_from=config_from,
        beside=VisionPart(model),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    slot_bytes = max(recipes.layout.slot_bytes for recipes in plan.recipes)
    total = sum(layer.num_experts for layer in plan.layers)
    return Summary(
        model=model,
        architecture=plan.architecture,
        moe_layers=len(plan.layers),
        experts_per_layer=max(layer.num_experts for layer in plan.layers),
        top_k=plan.top_k,
        packing=plan.packing,
        bytes_per_expert=max(recipes.layout.num_bytes for recipes in plan.recipes),
        stored_bytes_per_expert=max(recipes.bytes_per_expert() for recipes in plan.recipes),
        unpacked_bytes_per_expert=max(layer.layout.num_bytes for layer in plan.layers),
        expert_bytes=plan.expert_bytes,
        dense_bytes=plan.dense_bytes,
        shared_expert_bytes=plan.shared_expert_bytes,
        is_byte_copy=all(recipes.is_byte_copy for recipes in plan.recipes),
        header_bytes=plan.header_bytes,
        expert_types=_expert_types(plan),
        dense_types=_dense_types(plan),
        budgets=tuple(
            _budget(share, slot_bytes, total, len(plan.layers)) for share in SHOWN_SHARES
        ),
    )


def _expert_types(plan: Plan) -> dict[str, str]:
    layers: dict[str, list[int]] = {}
    for number, recipes in enumerate(plan.recipes):
        types = []
        for recipe in recipes.recipes:
            kinds = dict.fromkeys(weight.kind for weight in recipe.weights)
            types.append(f"{recipe.name.rpartition('.')[2]} {' and '.join(kinds)}")
        layers.setdefault(", ".join(types), []).append(number)
    return {_runs(numbers): types for types, numbers in layers.items()}


def _runs(numbers: list[int]) -> str:
    """Return numbers as text: 0, 1, 2 and 5 are "0-2, 5"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)


def _dense_types(plan: Plan) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for weight in plan.dense.values():
        if isinstance(weight, PackedTensor):
            name = weight.format.name
        else:
            name = weight.stored_dtype.lower()
        sizes[name] += stored_bytes([weight])
    return dict(sizes.most_common())


def _budget(share: float, slot_bytes: int, total: int, num_layers: int) -> Budget:
    experts = int(slot_bytes * total * share) // slot_bytes
    return Budget(f"{share:.0%}", experts * slot_bytes, experts, round(experts / num_layers, 1))
