"""Expected hit rates come from recorded routing: bundled curves, or a trace of the user."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.predict.tracefile import load_trace
from moe_infinity.tools.planning.hit_rates import (
    Curve,
    bundled_curves,
    expected_hit_rates,
    nearest_curve,
    replayed,
)
from moe_infinity.tools.simulator.schedule import interleave

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "traces"
CURVE = Curve("m", "t", "s", 64, 6, {"activation-aware": {"0.2": 0.5, "0.4": 0.7}})


@pytest.mark.parametrize(
    ("share", "rate"), [(0, 0), (0.1, 0.25), (0.2, 0.5), (0.3, 0.6), (0.7, 0.85), (1, 1), (2, 1)]
)
def test_between_recorded_shares_a_curve_is_a_straight_line(share, rate):
    assert CURVE.at(share) == pytest.approx(rate)


def test_bundled_curves_rise_and_beat_lru():
    for curve in bundled_curves():
        ours = list(curve.rates["activation-aware"].values())
        lru = list(curve.rates["lru"].values())
        assert ours == sorted(ours)
        assert all(0 <= low <= high + 0.01 for low, high in zip(lru, ours, strict=True))


def test_bundled_curves_say_where_they_come_from_and_how_to_make_them_again():
    found = json.loads(files("moe_infinity.tools.planning").joinpath("curves.json").read_text())
    for curve in found["curves"]:
        assert curve["source"]
        assert curve["trace"]
        assert curve["requests"]
        assert curve["seed"] == 0
        assert curve["made_by"].startswith("python benchmarks/policies/curves.py")


@pytest.mark.parametrize(
    ("num_experts", "top_k", "model"),
    [(128, 8, "DeepSeek-V2-Lite"), (256, 8, "DeepSeek-V2-Lite"), (8, 2, "gpt-oss-20b")],
)
def test_a_model_gets_the_curve_of_the_nearest_shape(num_experts, top_k, model):
    assert nearest_curve(num_experts, top_k, bundled_curves()).model == model


@pytest.mark.slow
def test_a_point_of_a_bundled_curve_comes_out_again():
    """LRU's at 30 %: the policy that replays fastest."""
    folder = TRACES / "deepseek-v2-lite_esft"
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    trace = load_trace(folder / "experts.npz")
    order = np.random.default_rng(0).permutation(len(trace.sequences))
    found = json.loads(files("moe_infinity.tools.planning").joinpath("curves.json").read_text())
    curve = next(c for c in found["curves"] if c["model"] == "DeepSeek-V2-Lite")
    few = interleave([trace.sequences[i] for i in order[: curve["requests"]]], 1)
    assert sum(len(sequence.steps_T) for sequence in few) == curve["tokens"]
    rates = replayed(few, ["lru"], [int(0.3 * 26 * 64)], num_experts=64)
    assert rates["lru"][0] == pytest.approx(curve["rates"]["lru"]["0.3"], abs=0.0006)


def test_a_trace_of_the_model_is_replayed_at_its_number_of_slots(tmp_path):
    """Two experts in turn: with a slot for each all but the first are hits, with one none."""
    path = write_trace(tmp_path, experts=np.arange(40)[:, None, None] % 2)
    one, two = (
        expected_hit_rates(num_layers=1, num_experts=4, top_k=1, trace=path)(slots)
        for slots in (1, 2)
    )
    assert one.decode == 0.0
    assert two.decode == pytest.approx(1.0)
    assert two.source == "replay of trace.npz"


def test_with_all_experts_in_slots_every_lookup_hits(tmp_path):
    path = write_trace(tmp_path, experts=np.arange(40)[:, None, None] % 2)
    for trace in (None, path):
        found = expected_hit_rates(num_layers=1, num_experts=4, top_k=1, trace=trace)(4)
        assert (found.decode, found.source) == (1.0, "all experts have slots")


def test_a_trace_of_another_model_is_an_error(tmp_path):
    path = write_trace(tmp_path, experts=np.zeros((8, 2, 1)))
    with pytest.raises(ConfigError, match="the model has 4 and"):
        expected_hit_rates(num_layers=1, num_experts=4, top_k=1, trace=path)(2)


def test_a_file_that_is_no_trace_is_an_error(tmp_path):
    path = tmp_path / "trace.npz"
    path.write_bytes(b"no")
    with pytest.raises(TraceError):
        expected_hit_rates(num_layers=1, num_experts=4, top_k=1, trace=path)(2)


def write_trace(folder: Path, *, experts: np.ndarray) -> Path:
    """Of four sequences; the first warms up."""
    path = folder / "trace.npz"
    offsets = np.linspace(0, len(experts), 5).astype(np.int64)
    np.savez(path, experts=experts.astype(np.uint8), offsets=offsets)
    return path
