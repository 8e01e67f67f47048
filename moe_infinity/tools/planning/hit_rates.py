"""How often decoding finds an expert in its slots, by the share of experts that have one.

    curves.json          recorded routing of published models, replayed with the engine's policy;
                         made again by benchmarks/policies/curves.py
    a trace of the user  replayed at the number of slots that is planned

A model without a trace gets the curve of the recorded model whose shape is nearest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from math import log2
from pathlib import Path

from moe_infinity.cache.policies import ACTIVATION_AWARE
from moe_infinity.errors import ConfigError
from moe_infinity.predict.tracefile import SequenceTrace, load_trace
from moe_infinity.tools.simulator.replay import Hardware, Setup, replay
from moe_infinity.tools.simulator.schedule import interleave, steps_of

CURVES = "curves.json"
WARMUP_SHARE = 4  # a quarter of a trace's requests are replayed first and not counted
ONLY_HITS = Hardware(bytes_per_s=1.0, expert_bytes=1, layer_s=1.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """Decode hit rates of one recorded model."""

    model: str
    trace: str
    source: str
    num_experts: int  # of an MoE layer
    top_k: int
    rates: dict[str, dict[str, float]]  # by policy, by share of the experts that have slots

    def at(self, share: float, policy: str = ACTIVATION_AWARE) -> float:
        """Between two recorded shares as on a straight line; without slots 0, with all 1."""
        known = {float(text): rate for text, rate in self.rates[policy].items()}
        points = [(0.0, 0.0), *sorted(known.items()), (1.0, 1.0)]
        share = min(max(share, 0.0), 1.0)
        for (left, low), (right, high) in pairwise(points):
            if share <= right:
                return low + (high - low) * (share - left) / (right - left)
        return 1.0

    def distance(self, num_experts: int, top_k: int) -> float:
        """From a model of this shape: how often to double or halve one to get the other."""
        return abs(log2(num_experts / self.num_experts)) + abs(log2(top_k / self.top_k))


@dataclass(frozen=True, slots=True)
class HitRate:
    """An expected hit rate, and where it comes from."""

    decode: float
    source: str


def bundled_curves() -> list[Curve]:
    """Those that come with the package."""
    text = files("moe_infinity.tools.planning").joinpath(CURVES).read_text("utf-8")
    names = Curve.__dataclass_fields__.keys()
    return [Curve(**{name: curve[name] for name in names}) for curve in json.loads(text)["curves"]]


def nearest_curve(num_experts: int, top_k: int, curves: Sequence[Curve]) -> Curve:
    return min(curves, key=lambda curve: curve.distance(num_experts, top_k))


def expected_hit_rates(
    *, num_layers: int, num_experts: int, top_k: int, trace: Path | None = None
) -> Callable[[int], HitRate]:
    """Return hit rates of decoding by the number of slots of all layers together. Raises TraceError
    for a trace that cannot be read, ConfigError for one of another model.
    """
    total = num_layers * num_experts
    if trace is None:
        curve = nearest_curve(num_experts, top_k, bundled_curves())
    else:
        sequences = _sequences_of(trace, num_layers, num_experts, top_k)

    def with_slots(num_slots: int) -> HitRate:
        if num_slots >= total:
            return HitRate(1.0, "all experts have slots")
        if num_slots < 1:
            return HitRate(0.0, "no expert has a slot")
        if trace is None:
            return HitRate(curve.at(num_slots / total), f"curve of {curve.model}, recorded")
        rates = replayed(sequences, [ACTIVATION_AWARE], [num_slots], num_experts=num_experts)
        return HitRate(rates[ACTIVATION_AWARE][0], f"replay of {trace.name}")

    return with_slots


def _sequences_of(
    trace: Path, num_layers: int, num_experts: int, top_k: int
) -> list[SequenceTrace]:
    """Raises TraceError, and ConfigError if the model has another shape."""
    recorded = load_trace(trace)
    sequences = [sequence for sequence in recorded.sequences if len(sequence.steps_T)]
    shapes = {sequence.experts_TLK.shape[1:] for sequence in sequences}
    if shapes != {(num_layers, top_k)} or recorded.num_experts > num_experts:
        raise ConfigError(
            f"{trace}: recorded with {recorded.num_experts} experts a layer and (MoE layers, "
            f"experts a token) {sorted(shapes)}, the model has {num_experts} and "
            f"{(num_layers, top_k)}\nhint: `moe-infinity trace` records one of this model"
        )
    return sequences


def replayed(
    sequences: Sequence[SequenceTrace],
    policies: Sequence[str],
    num_slots: Sequence[int],
    *,
    num_experts: int,
) -> dict[str, list[float]]:
    """Decode hit rates by policy, one for each number of slots: one user, no prefetch."""
    num_layers = sequences[0].experts_TLK.shape[1]
    setups = [
        Setup(policy=policy, num_slots=slots, prefetch=False, hardware=ONLY_HITS)
        for policy in policies
        for slots in num_slots
    ]
    cells = replay(
        steps_of(interleave(list(sequences), 1)),
        setups,
        num_layers=num_layers,
        num_experts=num_experts,
        warmup=len(sequences) // WARMUP_SHARE,
    )
    rates: dict[str, list[float]] = {policy: [] for policy in policies}
    for cell in cells:
        rates[cell.setup.policy].append(cell.counters.decode.hit_rate or 0.0)
    return rates
