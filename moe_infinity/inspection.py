"""What a checkpoint holds and what budgets would hold of it, from headers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from moe_infinity.checkpoint.loading import plan_from_headers
from moe_infinity.errors import CheckpointError
from moe_infinity.memory.host import format_bytes

SHOWN_SHARES = (0.05, 0.10, 0.25, 0.50, 1.00)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one host_memory setting holds."""

    host_memory: str
    num_bytes: int
    experts: int
    experts_per_layer: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint in numbers."""

    model: str
    architecture: str
    moe_layers: int
    experts_per_layer: int
    top_k: int | None
    packing: str | None  # how the checkpoint is quantized; None: not at all
    bytes_per_expert: int  # in a slot
    stored_bytes_per_expert: int  # on disk
    unpacked_bytes_per_expert: int  # what computes where no kernel reads it packed
    expert_bytes: int  # all experts, in slots
    dense_bytes: int  # everything else, on disk
    shared_expert_bytes: int  # the part of it that shared experts are
    is_byte_copy: bool  # loads are plain copies; otherwise each expert is converted as it is loaded
    header_bytes: int  # what this command read
    budgets: tuple[Budget, ...]

    def as_dict(self) -> dict[str, Any]:
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
    model: str, *, dtype: str = "auto", trust_remote_code: bool = False
) -> Summary:
    """Raises CheckpointError, UnsupportedModelError."""
    folder = local_folder(model)
    plan = plan_from_headers(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    slot_bytes = max(recipes.layout.slot_bytes for recipes in plan.recipes)
    total = sum(row.num_experts for row in plan.layers)
    return Summary(
        model=model,
        architecture=plan.architecture,
        moe_layers=len(plan.layers),
        experts_per_layer=max(row.num_experts for row in plan.layers),
        top_k=plan.top_k,
        packing=plan.packing,
        bytes_per_expert=max(recipes.layout.num_bytes for recipes in plan.recipes),
        stored_bytes_per_expert=max(recipes.bytes_per_expert() for recipes in plan.recipes),
        unpacked_bytes_per_expert=max(row.layout.num_bytes for row in plan.layers),
        expert_bytes=plan.expert_bytes,
        dense_bytes=plan.dense_bytes,
        shared_expert_bytes=plan.shared_expert_bytes,
        is_byte_copy=all(recipes.is_byte_copy for recipes in plan.recipes),
        header_bytes=plan.header_bytes,
        budgets=tuple(
            _budget(share, slot_bytes, total, len(plan.layers)) for share in SHOWN_SHARES
        ),
    )


def local_folder(model: str) -> str:
    """The folder itself, or where the hub cache has the model. Nothing is downloaded. Raises
    CheckpointError.
    """
    if Path(model).is_dir():
        return model
    try:
        return snapshot_download(model, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{model}: neither a folder nor a model in the local hub cache\n"
            f"hint: `hf download {model}` first"
        ) from error


def _budget(share: float, slot_bytes: int, total: int, rows: int) -> Budget:
    experts = int(slot_bytes * total * share) // slot_bytes
    return Budget(f"{share:.0%}", experts * slot_bytes, experts, round(experts / rows, 1))
