"""START HERE. `moe-infinity bench`: from what is asked to a table and its conditions."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moe_infinity.cli.inspection import Summary, inspect_checkpoint
from moe_infinity.errors import CheckpointError, ConfigError, UnsupportedModelError
from moe_infinity.loading.kind import find_kind, load_tokenizer
from moe_infinity.memory.cuda import device_memory_bytes
from moe_infinity.model import MoE
from moe_infinity.sizes import format_bytes, parse_size
from moe_infinity.system.machine import (
    available_memory_bytes,
    machine_memory_bytes,
    num_cores,
    processor_name,
)
from moe_infinity.tools.bench.config import BenchConfig
from moe_infinity.tools.bench.measuring import OnRun, Workload, measure, opened_ours
from moe_infinity.tools.bench.rows import Rates, Row, rows_of, table_of
from moe_infinity.tools.planning.disk import WEIGHTS, measure_disk
from moe_infinity.tools.planning.rates import memory_rate, products_rate

PACKAGES = ("moe-infinity", "torch", "transformers", "numba")
SHARE = 0.8  # of the free memory that models may take together
DISK_S = 2.0  # for measuring the disk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Rows and what they were measured under."""

    conditions: dict[str, Any]
    rates: Rates
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = self.rates._asdict()
        rows = [row.as_dict() for row in self.rows]
        return {"conditions": self.conditions, "rates": rates, "rows": rows}

    def __str__(self) -> str:
        about = self.conditions
        versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items())
        return "\n".join(
            [
                f"{about['model']}: {about['cpu']}, {about['threads']} threads, {about['device']}",
                f"{versions}; models {about['order']}; text {about['text']}",
                "",
                table_of(self.rows),
                "",
                _said_of_bounds(self.rates),
            ]
        )


def run_bench(
    model: str,
    config: BenchConfig,
    options: dict[str, Any],
    *,
    open_model: Callable[..., AbstractContextManager[MoE]],
    on_run: OnRun,
) -> BenchResult:
    """Measure a checkpoint. `options` are fields of OffloadConfig, without host_memory.

    Raises ConfigError, CheckpointError, UnsupportedModelError.
    """
    named = {name: options[name] for name in ("config_from", "trust_remote_code")}
    summary = inspect_checkpoint(model, dtype=options["dtype"], **named)
    workload = _workload(model, config, named)
    machine = _about_machine(options["device"])
    together = _fit_together(summary, [*config.budgets.values()], device=options["device"])
    rates_now = partial(
        _measure_rates,
        Path(model),
        bytes_per_expert=summary.stored_bytes_per_expert,
        num_threads=machine["threads"],
    )
    rates = rates_now()
    systems = {
        name: partial(
            opened_ours, partial(open_model, model, **options, host_memory=host_memory), summary
        )
        for name, host_memory in config.budgets.items()
    }
    found = measure(systems, workload, together=together, on_run=on_run)
    rates = rates.best(rates_now())
    asked = {
        "model": model,
        "options": {name: str(value) for name, value in options.items() if value is not None},
        "text": "drawn at random" if config.text is None else str(config.text),
        "repeats": config.repeat,
        "order": "in turn" if together else "one after the other",
        "systems": {name: measured.about for name, measured in found.items()},
    }
    return BenchResult(machine | asked, rates, rows_of(found, rates))


def _workload(model: str, config: BenchConfig, named: dict[str, Any]) -> Workload:
    """Raises ConfigError if the model has no room for such texts, UnsupportedModelError."""
    kind = find_kind(model, **named).config
    if kind.is_encoder_decoder:
        raise UnsupportedModelError(f"{model}: bench measures models with a decoder only")
    text = kind.get_text_config()
    ids: list[int] = []
    if config.text is not None:
        ids = load_tokenizer(model, **named)(config.read_text())["input_ids"]
        if not ids:
            raise ConfigError(f"--text: {config.text} is empty")
    workload = Workload(
        lengths=config.lengths,
        num_decoded=config.decode,
        repeats=config.repeat,
        vocab_size=text.vocab_size,
        text_ids=ids,
    )
    room = getattr(text, "max_position_embeddings", None)
    if room is not None and workload.num_positions > room:
        raise ConfigError(
            f"{workload.num_positions:,} tokens are longer than the context of {model}, "
            f"{room:,} tokens\nhint: smaller --prompt or --decode"
        )
    return workload


def _said_of_bounds(rates: Rates) -> str:
    """Return a line that says what the bounds of the table are made of."""
    known = [
        f"{name} {rate / 1e9:,.1f} {unit}"
        for name, rate, unit in (
            ("memory", rates.memory, "GB/s"),
            ("disk", rates.disk, "GB/s"),
            ("products", rates.products, "GFLOP/s"),
        )
        if rate is not None
    ]
    return "\n".join(
        [
            f"bound: with the best rates measured before and after ({', '.join(known)}).",
            "Decoding reads dense weights and activated experts from memory, misses from the disk;",
            "a prompt multiplies. More than 100% means that the machine was busy when they were",
            "measured, or that weights fit into the caches of the processor.",
        ]
    )


def _about_machine(device: str) -> dict[str, Any]:
    """Versions, processor, threads, memory."""
    return {
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "cpu": processor_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": machine_memory_bytes(),
        "device": device if device_memory_bytes(device) is not None else "cpu",
    }


def _fit_together(summary: Summary, budgets: Sequence[str | None], *, device: str) -> bool:
    """Return True if models of all budgets fit into memory at once. Raises ConfigError if not even
    one does.
    """
    free = available_memory_bytes()
    own = [_num_bytes(summary, budget, free) for budget in budgets]
    if max(own) > free:
        raise ConfigError(
            f"{format_bytes(summary.dense_bytes)} of dense weights and "
            f"{format_bytes(max(own) - summary.dense_bytes)} for experts, "
            f"{format_bytes(free)} of memory are free\nhint: a smaller --host-memory"
        )
    if device_memory_bytes(device) is not None:
        return False  # each takes most of a GPU's memory
    return sum(own) <= SHARE * free


def _num_bytes(summary: Summary, budget: str | None, free: int) -> int:
    """Return the bytes of a model with that budget; None is its own choice."""
    if budget is None:
        beside_dense = max(free - summary.dense_bytes, 0)
        return summary.dense_bytes + min(beside_dense, summary.expert_bytes)
    asked = parse_size(budget, whole_bytes=summary.expert_bytes)
    return summary.dense_bytes + min(asked, summary.expert_bytes)


def _measure_rates(checkpoint: Path, *, bytes_per_expert: int, num_threads: int) -> Rates:
    """Measure this machine's processor and memory, and of the disk that a folder or file is on."""
    return Rates(
        memory=memory_rate(num_threads),
        disk=_disk_rate(checkpoint, bytes_per_expert),
        products=products_rate(),
    )


def _disk_rate(checkpoint: Path, bytes_per_expert: int) -> float | None:
    """None if no weight file is large enough to be read past the page cache."""
    files = [checkpoint]
    if checkpoint.is_dir():
        files = [file for file in checkpoint.iterdir() if file.suffix in WEIGHTS]
    largest = max(files, key=lambda file: file.stat().st_size)
    try:
        return measure_disk(largest, DISK_S, read_bytes=bytes_per_expert)
    except CheckpointError as error:
        logger.info("no bound by the disk: %s", error)
        return None
