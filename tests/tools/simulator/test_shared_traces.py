"""On real routing: the default policy keeps more hits than the paper's baselines, below Belady."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_infinity.cache.policies import ACTIVATION_AWARE
from moe_infinity.tools.simulator.laboratory import Experiment, run_experiment

SHARED_TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
pytestmark = pytest.mark.slow
BASELINES = ("lru", "lfu", "request-lfu")


@pytest.fixture(scope="module")
def hit_rates() -> dict[str, float]:
    """Of decoding 2 requests after a warm-up of 1, a fifth of the experts in memory."""
    file = SHARED_TRACES / "gpt-oss-20b_decode" / "experts.npz"
    if not file.exists():
        pytest.skip(f"{file} is not on this machine")
    experiment = Experiment.from_text(
        policies=",".join((ACTIVATION_AWARE, *BASELINES)), capacities="20%",
        bandwidth="1.2GB/s", expert_bytes="13MB", layer_us=1000.0, draw=3, warmup=1,
    )  # fmt: skip
    return {layer["policy"]: layer["hit_rate"] for layer in run_experiment([file], experiment)}


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_default_policy_has_more_hits_than_each_baseline(hit_rates, baseline):
    assert hit_rates[ACTIVATION_AWARE] > hit_rates[baseline] + 0.01


def test_belady_has_more_hits_than_all(hit_rates):
    assert all(hit_rates["belady"] > rate for name, rate in hit_rates.items() if name != "belady")
