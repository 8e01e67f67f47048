"""The numbers that /metrics shows to Prometheus, and /stats to the page at /."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from moe_infinity.model import MoE
from moe_infinity.report import Report
from moe_infinity.server.engine import Engine

PREFIX = "moe_infinity"
SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics(Collector):
    """The metrics of one server. Each has its own registry, so a process may have several.

    Counts of engine and cache are read at each scrape: steps do nothing for them.
    """

    def __init__(self, moe: MoE, engine: Engine) -> None:
        self._moe = moe
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.ttft_s = self._seconds("ttft", "From a request's arrival to its first output")
        self.request_s = self._seconds("request", "From a request's arrival to its last output")
        self.responses = Counter(
            f"{PREFIX}_http_responses",
            "Answers by route and status",
            ["route", "status"],
            registry=self._registry,
        )
        self.refusals = Counter(
            f"{PREFIX}_http_refusals",
            "Requests that were refused or failed, in a stream too, by route and status",
            ["route", "status"],
            registry=self._registry,
        )

    def num_refusals(self) -> int:
        """How many requests were refused or failed."""
        (family,) = self.refusals.collect()
        return int(sum(each.value for each in family.samples if each.name.endswith("_total")))

    def _seconds(self, name: str, meaning: str) -> Histogram:
        name = f"{PREFIX}_{name}_seconds"
        return Histogram(name, meaning, buckets=SECONDS, registry=self._registry)

    def first_outputs(self) -> dict[str, float]:
        """How many requests had a first output, and the sum of the seconds until then."""
        (family,) = self.ttft_s.collect()
        samples = {sample.name: sample.value for sample in family.samples}
        name = f"{PREFIX}_ttft_seconds"
        return {"count": samples[f"{name}_count"], "seconds": samples[f"{name}_sum"]}

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Metrics of the engine and of the cache."""
        yield from engine_metrics(self._engine.state())
        yield from cache_metrics(self._moe.report())


def engine_metrics(state: dict[str, Any]) -> Iterator[Metric]:
    """Metrics of what `Engine.state()` returned."""
    gauge = GaugeMetricFamily(f"{PREFIX}_sequences", "Sequences now", labels=["state"])
    for name in ("waiting", "prefilling", "decoding"):
        gauge.add_metric([name], state[name])
    yield gauge
    waiting = GaugeMetricFamily(
        f"{PREFIX}_client_waiting", "Sequences that wait, by hash of client", labels=["client"]
    )
    for client, num in state["waiting_by_client"].items():
        waiting.add_metric([client], num)
    yield waiting
    yield GaugeMetricFamily(f"{PREFIX}_kv_bytes", "KV cache of decoding", value=state["kv_bytes"])
    yield GaugeMetricFamily(f"{PREFIX}_prefix_bytes", "Prefix cache", value=state["prefix_bytes"])
    room = GaugeMetricFamily(f"{PREFIX}_prefix_capacity_bytes", "Prefix cache, at most")
    room.add_metric([], state["prefix_capacity_bytes"])
    yield room
    ended = CounterMetricFamily(f"{PREFIX}_sequences_ended", "By outcome", labels=["outcome"])
    for name in ("finished", "cancelled", "expired", "failed", "refused"):
        ended.add_metric([name], state[name])
    yield ended
    tokens = CounterMetricFamily(f"{PREFIX}_tokens", "Tokens", labels=["kind"])
    tokens.add_metric(["prompt"], state["prompt_tokens"])
    tokens.add_metric(["cached"], state["cached_tokens"])
    tokens.add_metric(["generated"], state["generated_tokens"])
    yield tokens
    stored = state["prompt_store"]
    yield CounterMetricFamily(
        f"{PREFIX}_prompt_store_hits", "Prompts that began with it", value=stored["hits"]
    )
    yield CounterMetricFamily(
        f"{PREFIX}_prompt_store_tokens", "Prompt tokens from it", value=stored["tokens"]
    )
    moved = CounterMetricFamily(f"{PREFIX}_prompt_store_bytes", "On its disk", labels=["kind"])
    moved.add_metric(["read"], stored["read_bytes"])
    moved.add_metric(["written"], stored["written_bytes"])
    yield moved
    yield SummaryMetricFamily(
        f"{PREFIX}_mask_seconds",
        "Masks of tokens that a grammar allows",
        count_value=state["masks"],
        sum_value=state["masking_s"],
    )
    yield CounterMetricFamily(f"{PREFIX}_steps", "Steps of the engine", value=state["steps"])
    yield CounterMetricFamily(
        f"{PREFIX}_cut_answers", "Answers that memory had no more room for", value=state["cut"]
    )
    yield GaugeMetricFamily(
        f"{PREFIX}_longest_gap_seconds",
        "Longest time between two steps of a running sequence",
        value=state["longest_gap_s"],
    )
    yield CounterMetricFamily(f"{PREFIX}_step_seconds", "Time in steps", value=state["stepping_s"])


def cache_metrics(report: Report) -> Iterator[Metric]:
    """Metrics of what `MoE.report()` returned."""
    lookups = CounterMetricFamily(
        f"{PREFIX}_expert_lookups", "Activated experts per layer and step", labels=["phase", "kind"]
    )
    read = CounterMetricFamily(
        f"{PREFIX}_expert_read_bytes", "Expert bytes read from disk", labels=["phase"]
    )
    stall = CounterMetricFamily(
        f"{PREFIX}_stall_seconds", "Compute waited for experts", labels=["phase"]
    )
    for phase, counters in (("prefill", report.prefill), ("decode", report.decode)):
        lookups.add_metric([phase, "hit"], counters.hits)
        lookups.add_metric([phase, "late_hit"], counters.late_hits)
        lookups.add_metric([phase, "miss"], counters.misses)
        read.add_metric([phase], counters.bytes_read)
        stall.add_metric([phase], counters.stall_s)
    read.add_metric(["preload"], report.preload.bytes_read)
    yield lookups
    yield read
    yield stall
    yield CounterMetricFamily(f"{PREFIX}_evictions", "Experts evicted", value=report.evictions)
    experts = GaugeMetricFamily(f"{PREFIX}_tier_experts", "Experts in a tier", labels=["tier"])
    room = GaugeMetricFamily(f"{PREFIX}_tier_capacity", "Experts it can hold", labels=["tier"])
    for tier in report.tiers:
        experts.add_metric([tier.tier], tier.experts)
        room.add_metric([tier.tier], tier.capacity)
    yield experts
    yield room


def stats_of(moe: MoE, engine: Engine, metrics: Metrics, *, model: str) -> dict[str, Any]:
    """Return what the page draws: counts, and per MoE layer a string with one letter per expert.

    A letter is "d" for an expert in device memory, "h" in host memory, "." on disk only, "l" while
    it loads and " " if there is none; a capital says that the last step activated it.
    """
    report = moe.report()  # before the states: experts may be preloaded meanwhile
    fastest = report.tiers[0].tier[0]
    letters = {-1: " ", 0: ".", 1: "l", 2: fastest, 3: fastest.upper(), 4: "h"}
    states_LE = moe.expert_states().tolist()
    return {
        "model": model,
        "engine": engine.state() | {"max_batch": engine.config.max_batch},
        "ttft": metrics.first_outputs(),
        "refusals": metrics.num_refusals(),
        "report": report.as_dict(),
        "experts": ["".join(letters[state] for state in states) for states in states_LE],
    }
