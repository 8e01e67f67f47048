"""Compare policies on recorded traces: every policy at every capacity, as rows of a table.

Beside each row stands what no policy can beat: Belady's hit rate, and the time a token takes at
least, the larger of computing it and of loading what even Belady misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_infinity.cache.counters import Counters, PrefetchCounters
from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.experts import Phase
from moe_infinity.predict.tables import FACTORS
from moe_infinity.predict.tracefile import SequenceTrace, load_trace
from moe_infinity.sizes import parse_size
from moe_infinity.tools.simulator.baselines import SIMULATED_POLICIES
from moe_infinity.tools.simulator.processes import OnWork, adding_up, run_all
from moe_infinity.tools.simulator.replay import (
    BELADY,
    CLAIRVOYANT,
    OMNISCIENT,
    Hardware,
    Setup,
    replay,
)
from moe_infinity.tools.simulator.schedule import interleave, steps_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The replays of one experiment."""

    policies: Sequence[str]
    capacities: Sequence[str]  # "10%" of all experts, or a number of slots
    hardware: Hardware
    prefetch: bool = False
    warmup: int = 0  # requests that are replayed and not counted
    draw: int | None = None  # of each trace, draw so many requests at random
    seed: int = 0
    users: int = 1
    without: Sequence[str] = ()  # factors the predictor leaves out

    @property
    def all_policies(self) -> list[str]:
        """Those asked for, each once, and those that nothing can beat."""
        references = (BELADY, CLAIRVOYANT) if self.prefetch else (BELADY,)
        return list(dict.fromkeys((*self.policies, *references)))

    @classmethod
    def from_text(
        cls,
        *,
        policies: str,
        capacities: str,
        bandwidth: str,
        expert_bytes: str,
        layer_us: float,
        without: str = "",
        **others: Any,
    ) -> Experiment:
        """From what a command line says. Raises ConfigError."""
        return cls(
            policies=some_of("policy", policies, (*SIMULATED_POLICIES, *OMNISCIENT)),
            capacities=_words(capacities) or [capacities],
            hardware=hardware_of(bandwidth, expert_bytes, layer_us),
            without=some_of("factor", without, FACTORS),
            **others,
        )


def hardware_of(bandwidth: str, expert_bytes: str, layer_us: float) -> Hardware:
    """From what a command line says. Raises ConfigError."""
    hardware = Hardware(
        bytes_per_s=parse_size(bandwidth.strip().removesuffix("/s"), whole_bytes=0),
        expert_bytes=parse_size(expert_bytes, whole_bytes=0),
        layer_s=layer_us / 1e6,
    )
    if not hardware.bytes_per_s or not hardware.expert_bytes:
        raise ConfigError(f"bandwidth {bandwidth} and expert bytes {expert_bytes}: not above 0")
    return hardware


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def some_of(what: str, text: str, allowed: Sequence[str]) -> list[str]:
    """The words of a list with commas. Raises ConfigError for one that is not allowed."""
    words = _words(text)
    for word in words:
        if word not in allowed:
            raise ConfigError(f"unknown {what} {word!r}, expected some of: {', '.join(allowed)}")
    return words


def num_slots_of(capacity: str, total_experts: int) -> int:
    """Slots of "76" or "10%". Raises ConfigError."""
    text = capacity.strip()
    try:
        slots = int(float(text[:-1]) * total_experts / 100) if text.endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{capacity!r} is not a capacity, expected '10%' of all experts or a number of slots"
        ) from error
    if not 1 <= slots <= total_experts:
        raise ConfigError(
            f"capacity {capacity} is {slots} of {total_experts} experts, expected 1 to all"
        )
    return slots


def drawn(sequences: Sequence[SequenceTrace], num: int | None, seed: int) -> list[SequenceTrace]:
    """Draw `num` requests at random and run them one after the other, in the order drawn. None: all
    requests, as they were recorded. Raises ConfigError if there are fewer than `num`.
    """
    if num is None:
        return list(sequences)
    if num > len(sequences):
        raise ConfigError(f"cannot draw {num} requests of {len(sequences)}")
    chosen = np.random.default_rng(seed).permutation(len(sequences))[:num]
    return interleave([sequences[i] for i in chosen], 1)


class Recording(NamedTuple):
    """The requests of a trace that are replayed."""

    path: Path
    sequences: list[SequenceTrace]
    num_experts: int

    @property
    def num_layers(self) -> int:
        return int(self.sequences[0].experts_TLK.shape[1])

    @property
    def total_experts(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def num_steps(self) -> int:
        return len(np.unique(np.concatenate([each.steps_T for each in self.sequences])))


class PolicyReplay(NamedTuple):
    """The part of an experiment that one process replays: a policy at some capacities."""

    recording: Recording
    policy: str
    capacities: Sequence[str]


class Outcome(NamedTuple):
    """The counts of a cell."""

    num_slots: int
    counters: Counters
    prefetches: PrefetchCounters
    evictions: int


def run_experiment(
    paths: Sequence[Path],
    experiment: Experiment,
    *,
    jobs: int = 1,
    on_steps: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """One row per trace, policy, capacity and phase, whatever the number of processes that `jobs`
    allows. `on_steps` gets how many steps of cells are done, and how many there are. Raises
    TraceError, ConfigError.
    """
    recordings = [_recording_of(path, experiment) for path in paths]
    parts = _parts_of(recordings, experiment, jobs)
    total = sum(len(part.capacities) * part.recording.num_steps for part in parts)
    on_work = adding_up(on_steps, total)
    found = run_all(partial(_run_part, experiment), parts, jobs=jobs, on_work=on_work)
    outcomes = {
        (part.recording.path, part.policy, capacity): outcome
        for part, of_part in zip(parts, found, strict=True)
        for capacity, outcome in zip(part.capacities, of_part, strict=True)
    }
    return [row for recording in recordings for row in _rows_of(recording, outcomes, experiment)]


def _recording_of(path: Path, experiment: Experiment) -> Recording:
    trace = load_trace(path)
    whole = [sequence for sequence in trace.sequences if len(sequence.steps_T)]
    if not whole or not whole[0].experts_TLK.shape[1]:
        raise TraceError(f"{path}: no tokens in it")
    sequences = drawn(whole, experiment.draw, experiment.seed)
    if experiment.users > 1:
        sequences = interleave(sequences, experiment.users)
    if experiment.warmup >= len(sequences):
        raise ConfigError(f"{path}: a warm-up of {experiment.warmup} leaves no request to count")
    recording = Recording(path, sequences, trace.num_experts)
    for capacity in experiment.capacities:
        num_slots_of(capacity, recording.total_experts)  # a mistake is said before the long work
    return recording


def _parts_of(
    recordings: Sequence[Recording], experiment: Experiment, jobs: int
) -> list[PolicyReplay]:
    """A policy is one part, as its capacities share what it learns. With more jobs than that makes
    parts, every capacity is one.
    """
    policies = experiment.all_policies
    capacities = list(dict.fromkeys(experiment.capacities))
    together = [capacities]
    if jobs > len(recordings) * len(policies):
        together = [[capacity] for capacity in capacities]
    return [
        PolicyReplay(recording, policy, some)
        for recording in recordings
        for policy in policies
        for some in together
    ]


def _run_part(experiment: Experiment, part: PolicyReplay, on_work: OnWork) -> list[Outcome]:
    """Replay each capacity."""
    recording = part.recording
    setups = [
        Setup(
            policy=part.policy,
            num_slots=num_slots_of(capacity, recording.total_experts),
            prefetch=experiment.prefetch and part.policy != BELADY,
            hardware=experiment.hardware,
        )
        for capacity in part.capacities
    ]
    cells = replay(
        steps_of(recording.sequences),
        setups,
        num_layers=recording.num_layers,
        num_experts=recording.num_experts,
        warmup=experiment.warmup,
        without=experiment.without,
        on_step=lambda: on_work(len(setups)),
    )
    return [
        Outcome(cell.setup.num_slots, cell.counters, cell.table.prefetches, cell.table.evictions)
        for cell in cells
    ]


def _rows_of(
    recording: Recording,
    outcomes: Mapping[tuple[Path, str, str], Outcome],
    experiment: Experiment,
) -> Iterator[dict[str, Any]]:
    for policy in experiment.all_policies:
        for capacity in experiment.capacities:
            outcome = outcomes[recording.path, policy, capacity]
            best = outcomes[recording.path, BELADY, capacity]
            for phase in Phase:
                if outcome.counters.of(phase).steps:
                    yield {
                        "trace": str(recording.path),
                        "policy": policy,
                        "capacity": capacity,
                        "users": experiment.users,
                        "phase": phase.value,
                        **_measured(
                            outcome, phase, recording.num_layers, experiment.hardware, best
                        ),
                    }


def _measured(
    outcome: Outcome, phase: Phase, num_layers: int, hardware: Hardware, best: Outcome
) -> dict[str, Any]:
    counters = outcome.counters.of(phase)
    reference = best.counters.of(phase)
    prefetches = outcome.prefetches
    compute_s = num_layers * hardware.layer_s
    row: dict[str, Any] = {
        "num_slots": outcome.num_slots,
        "tokens": counters.tokens,
        "steps": counters.steps,
        "hits": counters.hits,
        "late_hits": counters.late_hits,
        "misses": counters.misses,
        "hit_rate": counters.hit_rate,
        "belady_hit_rate": reference.hit_rate,
        "evictions": outcome.evictions,
        "stall_s_per_token": counters.stall_s / counters.tokens,
        "tpot_s": compute_s + counters.stall_s / counters.steps,
        "floor_tpot_s": max(compute_s, reference.misses * hardware.load_s / counters.steps),
    }
    if phase is Phase.DECODE:
        row |= {
            "prefetches": prefetches.begun,
            "prefetch_precision": prefetches.precision,
            "prefetch_coverage": prefetches.coverage(counters.misses),
            "prefetch_wasted_bytes": prefetches.wasted * hardware.expert_bytes,
        }
    return row


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{'policy':18} {'capacity':>8} {'phase':8} {'hit rate':>8} {'Belady':>7} "
        f"{'stall/token':>12} {'time/step':>11} {'at least':>11} {'precision':>9} {'coverage':>8}"
    ]
    trace = None
    for row in rows:
        if row["trace"] != trace:
            trace = row["trace"]
            lines.append(f"{trace}")
        lines.append(
            f"{row['policy']:18} {row['capacity']:>8} {row['phase']:8} "
            f"{_percent(row['hit_rate']):>8} {_percent(row['belady_hit_rate']):>7} "
            f"{row['stall_s_per_token'] * 1e3:>9.2f} ms {row['tpot_s'] * 1e3:>8.2f} ms "
            f"{row['floor_tpot_s'] * 1e3:>8.2f} ms {_percent(row.get('prefetch_precision')):>9} "
            f"{_percent(row.get('prefetch_coverage')):>8}"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
