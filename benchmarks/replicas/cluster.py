"""Replays requests over several replicas of a model: which router sends them where, and what that
does to their caches. Requests arrive at given times.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.replicas.replica import Replica, SimulatedRequest
from benchmarks.replicas.routers import ROUTERS, ReplicaRouter
from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.predict.tracefile import SequenceTrace, load_trace
from moe_infinity.tools.simulator.baselines import SIMULATED_POLICIES
from moe_infinity.tools.simulator.laboratory import hardware_of, num_slots_of, some_of
from moe_infinity.tools.simulator.processes import OnWork, adding_up, run_all
from moe_infinity.tools.simulator.replay import Hardware, Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterExperiment:
    """What to replay over which replicas. Times are in seconds."""

    routers: Sequence[str]
    replicas: Sequence[int]
    policies: Sequence[str]
    capacities: Sequence[str]  # of each replica
    hardware: Hardware  # of each replica
    num_places: int  # requests that a replica decodes at once
    rate: float  # requests a second, of each replica
    arrivals: Path | None = None  # a CSV with a column arrival_s; None: a Poisson process
    num_requests: int | None = None  # drawn at random; None: all
    num_tokens: int | None = None  # of each request, the first ones; None: all
    warmup: int = 0  # requests that are not counted
    seed: int = 0

    @classmethod
    def from_text(
        cls,
        *,
        routers: str,
        replicas: str,
        policies: str,
        capacities: str,
        bandwidth: str,
        expert_bytes: str,
        layer_us: float,
        **others: Any,
    ) -> ClusterExperiment:
        """From what a command line says. Raises ConfigError."""
        try:
            numbers = [int(word) for word in replicas.split(",")]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < 1:
            raise ConfigError(f"{replicas!r} is not a list of numbers of replicas, as in '1,2,4'")
        return cls(
            routers=some_of("router", routers, list(ROUTERS)),
            replicas=numbers,
            policies=some_of("policy", policies, SIMULATED_POLICIES),
            capacities=capacities.split(","),
            hardware=hardware_of(bandwidth, expert_bytes, layer_us),
            **others,
        )


@dataclass(slots=True)
class Recorded:
    """A request of a trace file, without a time."""

    sequence: SequenceTrace
    prompt_ids: list[int] = field(default_factory=list)
    session: str = ""


def load_requests(path: Path, sequences: Sequence[SequenceTrace]) -> list[Recorded]:
    """The sequences of the trace `path` with their prompts and sessions. A prompt is the part that
    was prefill, or else the text that `sequences.jsonl` beside the trace has, cut into the longest
    strings that are tokens of answers. A session is what that file calls `category`: a user who
    sends requests of one kind.
    """
    found = []
    beside = _beside(path, len(sequences))
    vocabulary: dict[str, int] = {}
    for sequence, about in zip(sequences, beside, strict=True):
        strings = about.get("generated_tokens") or []
        vocabulary |= dict(zip(map(str, strings), sequence.token_ids_T.tolist(), strict=False))
    for idx, (sequence, about) in enumerate(zip(sequences, beside, strict=True)):
        prompt_ids = sequence.token_ids_T[sequence.is_prefill_T].tolist()
        if not prompt_ids:
            prompt_ids = _cut(str(about.get("prompt") or ""), vocabulary)
        session = str(about.get("category") or idx)
        found.append(Recorded(sequence, prompt_ids, session))
    return found


def _beside(path: Path, num: int) -> list[dict[str, Any]]:
    try:
        lines = path.with_name("sequences.jsonl").read_text("utf-8").splitlines()
        found = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return [{}] * num
    return found if len(found) == num else [{}] * num


def _cut(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Ids of the longest strings of the vocabulary that the text begins with, and so on."""
    longest = max(map(len, vocabulary), default=0)
    ids = []
    at = 0
    while at < len(text):
        for length in range(min(longest, len(text) - at), 0, -1):
            token_id = vocabulary.get(text[at : at + length])
            if token_id is not None:
                ids.append(token_id)
                break
        else:
            length = 1
        at += length
    return ids


def arrival_times(experiment: ClusterExperiment, num: int, num_replicas: int) -> list[float]:
    """In seconds, at the rate that was asked for. Raises ConfigError, TraceError."""
    mean_gap_s = 1 / (experiment.rate * num_replicas)
    if experiment.arrivals is None:
        gaps_s = np.random.default_rng(experiment.seed).exponential(mean_gap_s, num)
        return [float(time_s) for time_s in np.cumsum(gaps_s)]
    try:
        with experiment.arrivals.open(newline="") as file:
            times = [float(row["arrival_s"]) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise TraceError(f"{experiment.arrivals}: no column arrival_s of numbers") from error
    if len(times) < max(num, 2):
        raise ConfigError(f"{experiment.arrivals} has {len(times)} arrivals, {num} are wanted")
    times = sorted(times)[:num]
    span_s = times[-1] - times[0]
    if span_s <= 0:
        raise TraceError(f"{experiment.arrivals}: all requests arrive at once")
    return [(time_s - times[0]) / span_s * mean_gap_s * num for time_s in times]


class ClusterCell(NamedTuple):
    """What one row is about."""

    policy: str
    capacity: str
    num_replicas: int
    router: str


def run_cell(
    experiment: ClusterExperiment,
    recorded: Sequence[Recorded],
    num_experts: int,
    cell: ClusterCell,
    on_work: OnWork = lambda work: None,
) -> dict[str, Any]:
    """One row of a table. A unit of work is a request."""
    policy, capacity, num_replicas, router_name = cell
    num_layers = recorded[0].sequence.experts_TLK.shape[1]
    setup = Setup(
        policy=policy,
        num_slots=num_slots_of(capacity, num_layers * num_experts),
        prefetch=False,
        hardware=experiment.hardware,
    )
    times = arrival_times(experiment, len(recorded), num_replicas)
    requests = [
        SimulatedRequest(each.sequence, each.prompt_ids, each.session, arrival_s)
        for each, arrival_s in zip(recorded, times, strict=True)
    ]
    replicas = [
        Replica(
            setup,
            experiment.num_places,
            num_layers=num_layers,
            num_experts=num_experts,
        )
        for _ in range(num_replicas)
    ]
    router = ROUTERS[router_name](num_layers, num_experts)
    for num_before, request in enumerate(requests):
        if num_before == experiment.warmup:
            for replica in replicas:
                replica.cell.forget_counts()
        _advance(replicas, router, request.arrival_s)
        replicas[router.choose(request, replicas)].submit(request)
        on_work(1)
    _advance(replicas, router, np.inf)
    return {
        "policy": policy,
        "capacity": capacity,
        "replicas": num_replicas,
        "router": router_name,
        **_measured(replicas, requests[experiment.warmup :]),
    }


def _advance(replicas: Sequence[Replica], router: ReplicaRouter, until_s: float) -> None:
    for replica in replicas:
        replica.advance(until_s)
        for request in replica.ended:
            router.note_end(request)
        replica.ended.clear()


def _measured(replicas: Sequence[Replica], requests: Sequence[SimulatedRequest]) -> dict[str, Any]:
    decode = [replica.cell.counters.decode for replica in replicas]
    tokens = [counters.tokens for counters in decode]
    lookups = sum(c.hits + c.late_hits + c.misses for c in decode)
    first_s = [request.first_token_s - request.arrival_s for request in requests]
    latency_s = [request.end_s - request.arrival_s for request in requests]
    span_s = max(r.end_s for r in requests) - requests[0].arrival_s
    return {
        "hit_rate": sum(c.hits for c in decode) / max(lookups, 1),
        "stall_s_per_token": sum(c.stall_s for c in decode) / max(sum(tokens), 1),
        "first_token_s_p50": float(np.median(first_s)),
        "first_token_s_p95": float(np.quantile(first_s, 0.95)),
        "latency_s_p50": float(np.median(latency_s)),
        "latency_s_p95": float(np.quantile(latency_s, 0.95)),
        "tokens_per_s": sum(len(r.sequence.steps_T) for r in requests) / span_s,
        "busiest_share": max(tokens) / max(sum(tokens), 1) * len(replicas),
    }


def run_cluster(
    paths: Sequence[Path],
    experiment: ClusterExperiment,
    *,
    jobs: int = 1,
    on_requests: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """One row per trace, policy, capacity, number of replicas and router, whatever the number of
    processes that `jobs` allows. `on_requests` gets how many requests of rows are done, and how
    many there are. Raises TraceError, ConfigError.
    """
    cells = [
        ClusterCell(*cell)
        for cell in product(
            experiment.policies, experiment.capacities, experiment.replicas, experiment.routers
        )
    ]
    recordings = [_recorded_of(path, experiment) for path in paths]
    total = len(cells) * sum(len(recorded) for recorded, _ in recordings)
    on_work = adding_up(on_requests, total)
    rows = []
    for path, (recorded, num_experts) in zip(paths, recordings, strict=True):
        run = partial(run_cell, experiment, recorded, num_experts)
        of_path = run_all(run, cells, jobs=jobs, on_work=on_work)
        rows += [{"trace": str(path), **row} for row in of_path]
    return rows


def _recorded_of(path: Path, experiment: ClusterExperiment) -> tuple[list[Recorded], int]:
    """The requests that arrive, in order, and experts per layer."""
    trace = load_trace(path)
    if not any(len(sequence.steps_T) for sequence in trace.sequences):
        raise TraceError(f"{path}: no tokens in it")
    recorded = load_requests(path, trace.sequences)
    order = np.random.default_rng(experiment.seed).permutation(len(recorded))
    recorded = [recorded[idx] for idx in order if len(recorded[idx].sequence.steps_T)]
    if experiment.num_requests is not None:
        if experiment.num_requests > len(recorded):
            raise ConfigError(f"cannot draw {experiment.num_requests} of {len(recorded)} requests")
        recorded = recorded[: experiment.num_requests]
    if experiment.warmup >= len(recorded):
        raise ConfigError(f"{path}: a warm-up of {experiment.warmup} leaves no request to count")
    num_tokens = experiment.num_tokens
    cut = [replace(each, sequence=each.sequence.first(num_tokens)) for each in recorded]
    return cut, trace.num_experts


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{'replicas':>8} {'router':12} {'capacity':>8} {'hit rate':>8} {'stall/token':>12} "
        f"{'first token, p50, p95':>22} {'latency, p50, p95':>22} {'tokens/s':>8} {'busiest':>7}"
    ]
    trace = None
    for row in rows:
        if (row["trace"], row["policy"]) != trace:
            trace = row["trace"], row["policy"]
            lines.append(" ".join(trace))
        lines.append(
            f"{row['replicas']:>8} {row['router']:12} {row['capacity']:>8} {row['hit_rate']:>8.1%} "
            f"{row['stall_s_per_token'] * 1e3:>9.2f} ms "
            f"{row['first_token_s_p50']:>10.1f} {row['first_token_s_p95']:>9.1f} s "
            f"{row['latency_s_p50']:>10.1f} {row['latency_s_p95']:>9.1f} s "
            f"{row['tokens_per_s']:>8.2f} {row['busiest_share']:>7.2f}"
        )
    return "\n".join(lines)
