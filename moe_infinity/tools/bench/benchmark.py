"""START HERE. `moe-infinity bench`: from what is asked to a table and its conditions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moe_infinity.checkpoint.kind import find_kind, load_tokenizer
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError, UnsupportedModelError
from moe_infinity.inspection import Summary, inspect_checkpoint
from moe_infinity.model import MoE
from moe_infinity.tools.bench.conditions import about_machine, fit_together
from moe_infinity.tools.bench.config import BenchConfig, host_memory_of
from moe_infinity.tools.bench.ours import opened_ours
from moe_infinity.tools.bench.peer import Peer, parse_compare, require_llama_cpp
from moe_infinity.tools.bench.rates import measure_rates
from moe_infinity.tools.bench.rows import LLAMA_CPP, Rates, Row, rows_of, table_of
from moe_infinity.tools.bench.run import OnRun, System, measure
from moe_infinity.tools.bench.workload import Workload


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

    Raises ConfigError, CheckpointError, UnsupportedModelError; MoEInfinityError if llama.cpp fails.
    """
    gguf = _check(config, options)
    named = {name: options[name] for name in ("config_from", "trust_remote_code")}
    summary = inspect_checkpoint(model, dtype=options["dtype"], **named)
    workload = _workload(model, config, named)
    machine = about_machine(options["device"])
    together = fit_together(
        summary,
        [host_memory_of(budget) for budget in config.budgets],
        others_bytes=0 if gguf is None else gguf.stat().st_size,
        device=options["device"],
    )
    rates_now = partial(
        measure_rates,
        Path(model),
        bytes_per_expert=summary.stored_bytes_per_expert,
        num_threads=machine["threads"],
    )
    rates = rates_now()
    systems = _ours(model, config, options, summary, open_model)
    if gguf is not None:
        systems[LLAMA_CPP] = _theirs(gguf, config.llama_python, machine["threads"], workload)
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


def _check(config: BenchConfig, options: dict[str, Any]) -> Path | None:
    """What is wrong is said before anything is loaded. The file to compare with. Raises
    ConfigError.
    """
    for budget in config.budgets:
        OffloadConfig(**options, host_memory=host_memory_of(budget))
    if config.compare is None:
        return None
    file = parse_compare(config.compare)
    require_llama_cpp(config.llama_python)
    return file


def _workload(model: str, config: BenchConfig, named: dict[str, Any]) -> Workload:
    """Raises ConfigError if the model has no room for such texts, UnsupportedModelError."""
    kind = find_kind(model, **named).config
    if kind.is_encoder_decoder:
        raise UnsupportedModelError(f"{model}: bench measures models with a decoder only")
    text = kind.get_text_config()
    ids: list[int] = []
    if config.text is not None:
        ids = load_tokenizer(model, **named)(config.text.read_text("utf-8"))["input_ids"]
        if not ids:
            raise ConfigError(f"--text: {config.text} is empty")
    workload = Workload.from_text(
        config.prompt,
        num_decoded=config.decode,
        repeats=config.repeat,
        vocab_size=text.vocab_size,
        ids=ids,
    )
    room = getattr(text, "max_position_embeddings", None)
    if room is not None and workload.num_positions > room:
        raise ConfigError(
            f"{workload.num_positions:,} tokens are longer than the context of {model}, "
            f"{room:,} tokens\nhint: smaller --prompt or --decode"
        )
    return workload


def _ours(
    model: str,
    config: BenchConfig,
    options: dict[str, Any],
    summary: Summary,
    open_model: Callable[..., AbstractContextManager[MoE]],
) -> dict[str, Callable[[], AbstractContextManager[System]]]:
    def opened(budget: str) -> AbstractContextManager[System]:
        host_memory = host_memory_of(budget)
        return opened_ours(open_model(model, **options, host_memory=host_memory), summary)

    return {budget: partial(opened, budget) for budget in config.budgets}


def _theirs(
    file: Path, python: str, num_threads: int, workload: Workload
) -> Callable[[], AbstractContextManager[System]]:
    num_positions = workload.num_positions
    return lambda: closing(
        Peer(file, python=python, num_threads=num_threads, num_positions=num_positions)
    )


def _said_of_bounds(rates: Rates) -> str:
    """What the bounds of the table are made of."""
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
