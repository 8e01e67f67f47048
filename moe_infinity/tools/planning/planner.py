"""Puts a plan together: sizes of the model and rates of the machine in, what to expect out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from moe_infinity.errors import CheckpointError
from moe_infinity.system.files import nearest_folder
from moe_infinity.system.machine import num_cores
from moe_infinity.tools.planning import rates
from moe_infinity.tools.planning.disk import measure_disk
from moe_infinity.tools.planning.fit import Fit, ModelSizes, fit
from moe_infinity.tools.planning.hit_rates import HitRate, expected_hit_rates
from moe_infinity.tools.planning.machine import PlanMachine
from moe_infinity.tools.planning.rates import this_machine
from moe_infinity.tools.planning.remote import all_parts, parts_of
from moe_infinity.tools.planning.speed import Constants, Speed, speed

DISK_S = 3.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The run to plan: one sequence."""

    prompt: int = 512  # tokens
    context: int = 4096  # tokens that the KV cache has room for
    host_memory: str | None = None  # as the option; None: its default
    config_from: str | None = None  # as the option --config
    trace: Path | None = None  # recorded routing to take hit rates from


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The expectation of one variant of a model."""

    fit: Fit
    hits: tuple[HitRate, ...]  # of the tiers with slots, the one that computes first
    speed: Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The same model in fewer bits."""

    name: str
    sizes: ModelSizes
    outlook: Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All that the page says."""

    sizes: ModelSizes
    machine: PlanMachine
    planned: PlannedRun
    outlook: Outlook
    variants: tuple[Variant, ...]
    constants: Constants

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands to type; none if the model does not run."""
        if self.outlook.fit.refusal is not None:
            return ()
        model = self.sizes.model
        include = ""
        if self.sizes.folder is None:  # of a hub, perhaps with a file
            model, file = parts_of(model)
            include = f" --include {quote(all_parts(file))}" if file else ""
        model = quote(model)
        run = f'moe-infinity run {model} -p "Write a haiku about rain." --report'
        if self.planned.config_from is not None:
            run += f" --config {quote(self.planned.config_from)}"
        if self.sizes.kv.dtype != "auto":
            run += f" --kv-dtype {self.sizes.kv.dtype}"
        if self.planned.host_memory is not None:
            run += f" --host-memory {quote(self.planned.host_memory)}"
        download = (f"moe-infinity pull {model}{include}",) if self.sizes.folder is None else ()
        return *download, run

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        variants = [
            {"name": v.name, "bytes": disk_bytes(v.sizes), **outlook_dict(v.outlook)}
            for v in self.variants
        ]
        return {
            "model": self.sizes.as_dict(),
            "machine": self.machine.as_dict(),
            "prompt_tokens": self.planned.prompt,
            "context_tokens": self.planned.context,
            **outlook_dict(self.outlook),
            "variants": variants,
            "constants": asdict(self.constants),
            "commands": list(self.commands),
        }


def outlook_dict(outlook: Outlook) -> dict[str, Any]:
    names = [tier.name for tier in outlook.fit.tiers]
    hits = [asdict(hit) for hit in outlook.hits]
    return {
        "fit": outlook.fit.as_dict(),
        "hit_rates": dict(zip(names, hits, strict=False)),
        "speed": outlook.speed.as_dict(),
    }


def disk_bytes(sizes: ModelSizes) -> int:
    return sizes.dense_bytes + sizes.total_experts * sizes.stored_bytes


# int4 of `moe-infinity pack` has a scale of 16 bits for each 32 columns, int8 one for each row;
# GGUF types as their blocks are, Q4_K_M as a whole file has on average (llama.cpp's own table).
FORMS: tuple[tuple[str, float, float | None], ...] = (
    ("moe-infinity pack --experts int8", 8.03, None),
    ("moe-infinity pack --experts int4", 4.5, None),
    ("GGUF, Q8_0", 8.5, 8.5),
    ("GGUF, Q4_K_M", 4.85, 4.85),
)
FEWER = 0.9  # a variant is shown if it takes less than this share of the bytes


def make_plan(
    sizes: ModelSizes, machine: PlanMachine, planned: PlannedRun, constants: Constants
) -> RunPlan:
    """Raises ConfigError, TraceError."""
    hit_rates = expected_hit_rates(  # of all variants: they have as many experts
        num_layers=sizes.num_layers,
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        trace=planned.trace,
    )

    def outlook(of: ModelSizes) -> Outlook:
        fitted = fit(of, machine, context=planned.context, host_memory=planned.host_memory)
        hits = tuple(hit_rates(t.num_slots) for t in fitted.tiers if t.name != "disk")
        found = speed(of, machine, fitted, hits, prompt=planned.prompt, constants=constants)
        return Outlook(fit=fitted, hits=hits, speed=found)

    return RunPlan(
        sizes=sizes,
        machine=machine,
        planned=planned,
        outlook=outlook(sizes),
        variants=tuple(
            Variant(name=name, sizes=packed, outlook=outlook(packed))
            for name, packed in packed_sizes(sizes)
        ),
        constants=constants,
    )


def packed_sizes(sizes: ModelSizes) -> list[tuple[str, ModelSizes]]:
    """Return the outlooks of variants with fewer bytes by name. What is packed already is not
    packed again by us, but others may offer it as a GGUF file.
    """
    found = []
    dense_params = sizes.dense_params + 2 * sizes.head_params + sizes.table_params
    for name, bits, dense_bits in FORMS:
        if sizes.packing is not None and dense_bits is None:
            continue
        expert = int(sizes.expert_params * bits / 8)
        if expert > FEWER * sizes.stored_bytes:
            continue
        change: dict[str, int] = {"slot_bytes": expert, "stored_bytes": expert}
        if dense_bits is not None:
            share = min(dense_params * dense_bits / 8 / sizes.dense_bytes, 1.0)
            change["dense_bytes"] = int(sizes.dense_bytes * share)
            change["step_dense_bytes"] = int(sizes.step_dense_bytes * share)
            change["row_bytes"] = int(sizes.row_bytes * share)
        found.append((name, replace(sizes, **change)))  # type: ignore[arg-type]
    return found


def measured_machine(sizes: ModelSizes, *, measures_disk: bool) -> PlanMachine:
    """This one. The disk is measured where the model lies; for one that is not here yet, where it
    would come to. If that fails, its rate is assumed.
    """
    measures: dict[str, Callable[[], float]] = {
        "new_memory": partial(rates.new_memory_rate, num_cores()),
        "memory": partial(rates.memory_rate, num_cores()),
        "products": rates.products_rate,
        "link": rates.link_rate,
        "gpu_memory": rates.gpu_memory_rate,
    }
    if measures_disk:
        try:
            rate = measure_disk(_place_of(sizes), DISK_S, read_bytes=sizes.stored_bytes)
            measures["disk"] = lambda: rate
        except CheckpointError as error:
            logger.warning("the rate of the disk is assumed: %s", error)
    return this_machine(measures, rates.find_gpu())


def _place_of(sizes: ModelSizes) -> Path:
    return nearest_folder(Path(HF_HUB_CACHE)) if sizes.folder is None else sizes.folder
