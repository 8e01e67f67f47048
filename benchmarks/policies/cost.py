"""How long one MoE layer's bookkeeping takes: record, predict and score; and a match alone.

    python benchmarks/policies/cost.py      # last line is JSON; microseconds per MoE layer

26 layers of 64 experts, 6 per token, random routing, one sequence that decodes. A step's own cost
(learning, token tables, match with the collection) is shared out over its layers. The parts are
measured in separate passes; "all" is a pass with everything.
"""

from __future__ import annotations

import json
import time
from statistics import median

import numpy as np

from moe_infinity.cache.activation_aware import ActivationAware
from moe_infinity.experts import Phase, Step
from moe_infinity.predict.eamc import Eamc, EamcMatch, RequestEam
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder

LAYERS, EXPERTS, TOP_K = 26, 64, 6
STEPS, ROUNDS = 200, 7
NUM_STORED = 120
MATCHES = (100, 1_000, 10_000)


def routing(rng: np.random.Generator) -> np.ndarray:
    """[steps, layers, 1, K] int64."""
    return rng.random((STEPS, LAYERS, 1, EXPERTS)).argsort(axis=-1)[..., :TOP_K]


def random_eam(rng: np.random.Generator) -> RequestEam:
    counts = rng.poisson(rng.gamma(0.3, 3.0, (2, LAYERS, EXPERTS)))
    return RequestEam(counts[0], counts[1])


def decode_steps(rng: np.random.Generator) -> list[Step]:
    ids = rng.integers(0, 2_000, STEPS)
    begins = np.zeros(1, dtype=bool)
    return [Step(Phase.DECODE, 1, 1, begins, token_ids_T=ids[i : i + 1]) for i in range(STEPS)]


def run(predictor: Predictor, parts: str, rng: np.random.Generator) -> float:
    """Microseconds per layer of one pass over the steps."""
    recorder, policy = Recorder(LAYERS, EXPERTS), ActivationAware(predictor, LAYERS)
    experts, steps = routing(rng), decode_steps(rng)
    started = time.perf_counter()
    for step, experts_LTK in zip(steps, experts, strict=True):
        ended = recorder.begin_step(step)
        predictor.begin_step(step, ended)
        policy.begin_step(step)
        for layer in range(LAYERS):
            counted_TK = recorder.record(layer, experts_LTK[layer])
            if parts != "record":
                predictor.observe(layer, counted_TK)
            if parts == "all":
                policy.touch(layer, counted_TK)
                policy.scores()
    return (time.perf_counter() - started) / STEPS / LAYERS * 1e6


def filled(num_stored: int, rng: np.random.Generator) -> Eamc:
    eamc = Eamc(num_stored, LAYERS, EXPERTS)
    for _ in range(num_stored):
        eamc.add(random_eam(rng))
    return eamc


def match_cost(num_stored: int, rng: np.random.Generator) -> float:
    """Microseconds per layer to observe one layer and find the five nearest."""
    match = EamcMatch(filled(num_stored, rng))
    experts = routing(rng)[: 20_000 // LAYERS // 10, :, 0]
    started = time.perf_counter()
    for experts_LK in experts:
        match.begin()
        for layer in range(LAYERS):
            match.observe(layer, experts_LK[layer])
            match.nearest(5)
    return (time.perf_counter() - started) / len(experts) / LAYERS * 1e6


def main() -> None:
    rng = np.random.default_rng(0)
    predictor = Predictor(LAYERS, EXPERTS)
    for _ in range(NUM_STORED):
        predictor.eamc.add(random_eam(rng))
    times: dict[str, list[float]] = {"record": [], "record + predict": [], "all": []}
    for _ in range(ROUNDS):
        for parts, values in times.items():
            values.append(run(predictor, parts, rng))
    result = {"us_per_layer": {k: round(median(v), 1) for k, v in times.items()}}
    result["min_us_per_layer"] = {k: round(min(v), 1) for k, v in times.items()}
    result["match_us_per_layer"] = {
        n: round(median(match_cost(n, rng) for _ in range(5)), 1) for n in MATCHES
    }
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(json.dumps({"benchmark": "policies/cost", "num_stored": NUM_STORED, **result}))


if __name__ == "__main__":
    main()
