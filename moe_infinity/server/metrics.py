"""What /metrics shows to Prometheus, and what /stats shows to the page at /."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_infinity.model import MoE
from moe_infinity.report import Report
from moe_infinity.server.engine import Engine

PREFIX = "moe_infinity"
SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
LETTERS = {-1: " ", 0: ".", 1: "l", 2: "r", 3: "a"}  # a letter per state of MoE.expert_states()


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

    def _seconds(self, name: str, meaning: str) -> Histogram:
        name = f"{PREFIX}_{name}_seconds"
        return Histogram(name, meaning, buckets=SECONDS, registry=self._registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Metrics of the engine and of the cache."""
        yield from engine_metrics(self._engine.state())
        yield from cache_metrics(self._moe.report())


def labelled(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    meaning: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """A metric with a value for each value of its label."""
    family = kind(f"{PREFIX}_{name}", meaning, labels=[label])
    for of_label, value in values.items():
        family.add_metric([of_label], value)
    return family


def engine_metrics(state: dict[str, Any]) -> Iterator[Metric]:
    """Metrics of what `Engine.state()` returned."""
    now = {name: state[name] for name in ("waiting", "prefilling", "decoding")}
    ended = ("finished", "cancelled", "expired", "failed", "refused")
    tokens = {"prompt": state["prompt_tokens"], "generated": state["generated_tokens"]}
    yield labelled(GaugeMetricFamily, "sequences", "Sequences now", "state", now)
    yield GaugeMetricFamily(f"{PREFIX}_kv_bytes", "KV cache of decoding", value=state["kv_bytes"])
    yield labelled(
        CounterMetricFamily,
        "sequences_ended",
        "By outcome",
        "outcome",
        {name: state[name] for name in ended},
    )
    yield labelled(CounterMetricFamily, "tokens", "Tokens", "kind", tokens)
    yield CounterMetricFamily(f"{PREFIX}_steps", "Steps of the engine", value=state["steps"])
    yield CounterMetricFamily(f"{PREFIX}_step_seconds", "Time in steps", value=state["stepping_s"])


def cache_metrics(report: Report) -> Iterator[Metric]:
    """Metrics of what `MoE.report()` returned."""
    lookups = CounterMetricFamily(
        f"{PREFIX}_expert_lookups", "Activated experts per layer and step", labels=["phase", "kind"]
    )
    phases = {"prefill": report.prefill, "decode": report.decode}
    for phase, counts in phases.items():
        lookups.add_metric([phase, "hit"], counts.hits)
        lookups.add_metric([phase, "late_hit"], counts.late_hits)
        lookups.add_metric([phase, "miss"], counts.misses)
    yield lookups
    read = {phase: counts.bytes_read for phase, counts in phases.items()}
    yield labelled(
        CounterMetricFamily, "expert_read_bytes", "Expert bytes read from disk", "phase", read
    )
    stall = {phase: counts.stall_s for phase, counts in phases.items()}
    yield labelled(
        CounterMetricFamily, "stall_seconds", "Compute waited for experts", "phase", stall
    )
    yield CounterMetricFamily(f"{PREFIX}_evictions", "Experts evicted", value=report.evictions)
    tiers = report.tiers
    yield labelled(
        GaugeMetricFamily,
        "tier_experts",
        "Experts in a tier",
        "tier",
        {t.tier: t.experts for t in tiers},
    )
    yield labelled(
        GaugeMetricFamily,
        "tier_capacity",
        "Experts it can hold",
        "tier",
        {t.tier: t.capacity for t in tiers},
    )


def stats_of(moe: MoE, engine: Engine, *, model: str) -> dict[str, Any]:
    """What the page draws: counts, and per MoE layer a string with one letter per expert."""
    letters = [
        "".join(LETTERS[state] for state in states) for states in moe.expert_states().tolist()
    ]
    return {
        "model": model,
        "engine": engine.state() | {"max_batch": engine.config.max_batch},
        "report": moe.report().as_dict(),
        "experts": letters,
    }
