"""Which tier holds how much of a model: the budgets that the engine would choose by itself, unless
one is given.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from moe_infinity.checkpoint.plan import Plan, stored_bytes
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.images.mmproj import VisionPart
from moe_infinity.loading.model import plan_from_headers
from moe_infinity.local import find_local
from moe_infinity.memory.device import AUTOMATIC_SHARE as GPU_SHARE
from moe_infinity.memory.device import LEAST_ROOM_SHARE
from moe_infinity.memory.needs import USUAL_TOKENS, KvBytes
from moe_infinity.memory.room import FIXED_SHARE, margin_of
from moe_infinity.sizes import format_bytes, parse_size
from moe_infinity.system.files import expanded
from moe_infinity.tools.planning.machine import PlanMachine
from moe_infinity.tools.planning.remote import hollow_copy


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """The contents of one kind of memory, in bytes."""

    name: str  # "gpu", "host" or "disk"
    available: float  # of a new process; of the disk what it holds
    runtime: int = 0
    dense: int = 0
    kv: int = 0
    num_slots: int = 0  # experts
    slot_bytes: int = 0

    @property
    def experts(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def left(self) -> float:
        """For activations and other programs."""
        return self.available - self.runtime - self.dense - self.kv - self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The tiers, the one that computes first; the disk, which has all, comes last."""

    tiers: tuple[TierBytes, ...]
    refusal: str | None  # why the model does not run; None: it runs
    all_in_memory: bool  # no step reads from the disk once all is loaded

    @property
    def host(self) -> TierBytes:
        return next(tier for tier in self.tiers if tier.name == "host")

    @property
    def gpu(self) -> TierBytes | None:
        return next((tier for tier in self.tiers if tier.name == "gpu"), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tiers = [asdict(t) | {"experts": t.experts, "left": t.left} for t in self.tiers]
        return {
            "fits": self.refusal is None,
            "refusal": self.refusal,
            "all_in_memory": self.all_in_memory,
            "tiers": tiers,
        }


def fit(
    sizes: ModelSizes, machine: PlanMachine, *, context: int, host_memory: int | str | None = None
) -> Fit:
    """Plan with room for the keys and values of `context` tokens. Raises ConfigError for a
    `host_memory` that is no size.
    """
    kv = sizes.kv.of(context)
    gpu = _gpu_tier(sizes, machine, kv) if machine.gpu else None
    on_host = gpu is None  # dense weights and the KV cache
    dense = sizes.dense_bytes - sizes.row_bytes if on_host else 0
    beside = machine.ram - margin_of(int(machine.ram)) - machine.runtime - dense
    beside = beside - kv - sizes.pass_bytes if on_host else beside * FIXED_SHARE
    budget = max(int(beside), 0)
    if host_memory is not None:
        budget = parse_size(host_memory, whole_bytes=sizes.expert_bytes)
    num_slots = min(budget // sizes.slot_bytes, sizes.total_experts)
    host = TierBytes(
        name="host",
        available=machine.ram,
        runtime=machine.runtime,
        dense=dense,
        kv=kv if on_host else 0,
        num_slots=num_slots,
        slot_bytes=sizes.slot_bytes,
    )
    tiers = (host,) if gpu is None else (gpu, host)
    disk = TierBytes(
        name="disk",
        available=sizes.dense_bytes + sizes.total_experts * sizes.stored_bytes,
        dense=sizes.dense_bytes,
        num_slots=sizes.total_experts,
        slot_bytes=sizes.stored_bytes,
    )
    return Fit(
        tiers=(*tiers, disk),
        refusal=_refusal(tiers, machine, budget),
        all_in_memory=num_slots == sizes.total_experts,
    )


def _gpu_tier(sizes: ModelSizes, machine: PlanMachine, kv: int) -> TierBytes:
    """Dense weights, the KV cache, and slots in most of what is left."""
    free = max(machine.gpu - sizes.dense_bytes, 0)
    room = max(kv, machine.gpu * LEAST_ROOM_SHARE)
    budget = min(free * GPU_SHARE, max(free - room, 0))
    return TierBytes(
        name="gpu",
        available=machine.gpu,
        dense=sizes.dense_bytes,
        kv=kv,
        num_slots=min(int(budget) // sizes.slot_bytes, sizes.total_experts),
        slot_bytes=sizes.slot_bytes,
    )


def _refusal(tiers: tuple[TierBytes, ...], machine: PlanMachine, budget: int) -> str | None:
    if budget > machine.ram:
        return (
            f"host_memory of {format_bytes(budget)} is more than is free "
            f"({format_bytes(machine.ram)})"
        )
    for tier in tiers:
        where = "the GPU" if tier.name == "gpu" else "memory"
        needed = tier.runtime + tier.dense + tier.kv
        if needed + tier.slot_bytes > tier.available:
            what = "dense weights, KV cache" + (", Python and torch" if tier.runtime else "")
            return (
                f"{what} and one expert take {format_bytes(needed + tier.slot_bytes)}, "
                f"{where} has {format_bytes(tier.available)}"
            )
        if tier.left < 0:
            over = format_bytes(-tier.left)
            return f"{where} lacks {over} for experts, dense weights and KV cache together"
        if tier.num_slots < 1:
            return f"no expert has room in {where}"
    return None


EMBEDDING = re.compile(r"(embed_tokens|embed_in|token_embd|tok_embeddings|word_embeddings|wte)\.")
# Tables beside the embedding of which a token looks up some rows, too.
TABLE = re.compile(r"(embed_tokens_per_layer|ngram_embedding)\.")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Expert bytes are of one expert of one MoE layer."""

    model: str
    architecture: str
    folder: Path | None  # the folder with its files; None: it is not on this machine
    num_layers: int  # MoE layers
    num_experts: int  # of a layer
    top_k: int
    packing: str | None
    slot_bytes: int
    stored_bytes: int  # read from the disk for a load
    expert_params: int
    dense_bytes: int
    row_bytes: int  # of these, embeddings that a CPU reads by row from the disk
    step_dense_bytes: int  # what a decode step reads of them: all but what is looked up by row
    dense_params: int  # that multiply every token; without embeddings and head
    table_params: int  # of tables beside the embedding
    head_params: int
    kv: KvBytes
    pass_bytes: int  # of memory for the activations of a pass

    @property
    def total_experts(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def expert_bytes(self) -> int:
        """The bytes of all experts in slots."""
        return self.total_experts * self.slot_bytes

    @property
    def activated_params(self) -> int:
        """Parameters that a token uses."""
        experts = self.num_layers * self.top_k * self.expert_params
        return self.dense_params + self.head_params + experts

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        folder = None if self.folder is None else str(self.folder)
        return asdict(self) | {"folder": folder, "activated_params": self.activated_params}


def sizes_of(model: str, *, config_from: str | None = None, kv_dtype: str = "auto") -> ModelSizes:
    """Return the sizes of a folder, GGUF file or hub id. If it is not on this machine, only headers
    are read from the hub. `config_from` and `kv_dtype` are as for `run`. Raises CheckpointError,
    UnsupportedModelError, and what `hollow_copy` raises.
    """
    plan_of = partial(plan_from_headers, config_from=config_from, dtype="auto")
    found = find_local(model)
    is_named = model.startswith((".", "/", "~")) or Path(model).exists()
    if found is None or (found == model and not is_named):
        with hollow_copy(model) as path:
            return _sizes(model, plan_of(str(path)), None, kv_dtype)
    plan = plan_of(found, beside=VisionPart(found))
    path = expanded(found)
    return _sizes(model, plan, path if path.is_dir() else path.parent, kv_dtype)


def _sizes(model: str, plan: Plan, folder: Path | None, kv_dtype: str) -> ModelSizes:
    if plan.top_k is None:
        raise UnsupportedModelError(
            f"{model}: its config does not say how many experts a token uses, so nothing can be "
            "planned\nhint: `moe-infinity inspect` shows its sizes"
        )
    embedding = {name: w for name, w in plan.dense.items() if EMBEDDING.search(name)}
    head = {name: w for name, w in plan.dense.items() if HEAD.search(name)}
    tables = {name: w for name, w in plan.dense.items() if TABLE.search(name)}
    unread = stored_bytes([*tables.values(), *(embedding.values() if head else ())])
    known = {*embedding, *head, *tables}
    others = [w for name, w in plan.dense.items() if name not in known]
    step = plan.step_bytes(kv_dtype, is_exact=False)
    return ModelSizes(
        model=model,
        architecture=plan.architecture,
        folder=folder,
        num_layers=len(plan.layers),
        num_experts=max(layer.num_experts for layer in plan.layers),
        top_k=plan.top_k,
        packing=plan.packing,
        slot_bytes=max(recipes.layout.slot_bytes for recipes in plan.recipes),
        stored_bytes=max(recipes.bytes_per_expert() for recipes in plan.recipes),
        expert_params=max(
            sum(prod(spec.shape) for spec in layer.layout.params) for layer in plan.layers
        ),
        dense_bytes=plan.dense_bytes,
        row_bytes=plan.row_bytes,
        step_dense_bytes=plan.dense_bytes - unread,
        dense_params=sum(prod(weight.shape) for weight in others if len(weight.shape) > 1),
        table_params=sum(prod(weight.shape) for weight in tables.values()),
        head_params=sum(prod(weight.shape) for weight in (head or embedding).values()),
        kv=step.kv,
        pass_bytes=step.of_pass(USUAL_TOKENS, USUAL_TOKENS),
    )
