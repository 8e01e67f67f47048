"""`moe-infinity simulate`: traces in, a table or one JSON object out, mistakes named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_infinity.predict.tracefile import save_trace
from tests.tools.simulator.traces import one_after_the_other


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.npz"
    save_trace(path, one_after_the_other([(3, 9), (2, 8)]), num_experts=6)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the shared traces are."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    experts = np.random.default_rng(0).integers(0, 6, (30, 3, 1)).astype(np.uint8)
    np.savez(folder / "experts.npz", experts=experts, offsets=[0, 10, 30])
    return folder


def test_simulate_json_is_one_object_with_rows(command, trace):
    args = ["--policy", "lru,activation-aware", "--capacity", "50%,4", "--json"]
    outcome = command("simulate", trace, *args)
    assert (outcome.code, len(outcome.out.splitlines())) == (0, 1)
    rows = json.loads(outcome.out)["rows"]
    assert len(rows) == 3 * 2 * 2
    keys = {"trace", "policy", "capacity", "phase", "hit_rate", "stall_s_per_token", "tpot_s"}
    assert all(row.keys() >= keys for row in rows)
    decode = [row for row in rows if row["phase"] == "decode"]
    assert all(row.keys() >= {"prefetch_precision", "prefetch_coverage"} for row in decode)


def test_simulate_prints_a_table_for_people(command, trace):
    outcome = command("simulate", trace, "--capacity", "50%")
    assert outcome.code == 0
    for name in ("hit rate", "lru", "moe-infinity-v3", "activation-aware", "belady", str(trace)):
        assert name in outcome.out


def test_the_last_line_of_a_table_names_the_machine_of_its_times(command, trace):
    args = ["--capacity", "50%", "--policy", "lru"]
    options = ["--expert-bytes", "2MB", "--bandwidth", "3GB/s", "--compute-us", "70"]
    outcome = command("simulate", trace, *args, *options)
    assert outcome.out.splitlines()[-1] == (
        "Times: experts of 2MB (--expert-bytes) over 3GB/s (--bandwidth), 70 us for each layer "
        "(--compute-us)."
    )


def test_simulate_takes_a_folder_and_several_traces(command, trace, folder):
    outcome = command("simulate", folder, trace, "--policy", "lru", "--capacity", "50%", "--json")
    traces = [row["trace"] for row in json.loads(outcome.out)["rows"]]
    assert list(dict.fromkeys(traces)) == [str(folder / "experts.npz"), str(trace)]


def test_simulate_passes_every_option_on(command, folder):
    args = [
        "--policy", "activation-aware", "--capacity", "9", "--prefetch", "--bandwidth", "1KB/s",
        "--expert-bytes", "500", "--compute-us", "1000000", "--warmup", "1", "--draw", "2",
        "--seed", "3", "--users", "1", "--without", "eamc,layer", "--json",
    ]  # fmt: skip
    rows = json.loads(command("simulate", folder, *args).out)["rows"]
    belady = next(row for row in rows if row["policy"] == "belady")
    assert {row["policy"] for row in rows} == {"activation-aware", "belady", "clairvoyant"}
    assert belady["tokens"] in (10, 20), "one of the two was the warm-up"
    assert belady["tpot_s"] == pytest.approx(3 * 1.0 + 0.5 * belady["misses"] / belady["steps"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--policy", "no-such-policy"],
            "unknown policy 'no-such-policy', expected some of: activation-aware, lru",
        ),
        (["--without", "luck"], "unknown factor 'luck'"),
        (["--capacity", "150%"], "capacity 150% is 27 of 18 experts"),
        (["--capacity", "much"], "'much' is not a capacity"),
        (["--bandwidth", "fast"], "'fast' is not a size"),
        (["--warmup", "2"], "a warm-up of 2 leaves no request"),
        (["--draw", "3"], "cannot draw 3 requests of 2"),
    ],
)
def test_a_wrong_option_is_code_1_and_a_message(command, trace, args, said):
    outcome = command("simulate", trace, *args)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(said)


def test_a_file_that_is_no_trace_is_code_1_and_named(command, tmp_path):
    (tmp_path / "notes.npz").write_text("not a trace")
    outcome = command("simulate", tmp_path / "notes.npz")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("notes.npz: not a trace")


def test_a_folder_without_a_trace_is_code_1_and_names_the_file(command, tmp_path):
    outcome = command("simulate", tmp_path)
    assert outcome.code == 1
    assert outcome.said("experts.npz")
