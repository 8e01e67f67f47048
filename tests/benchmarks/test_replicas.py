"""Replays over several replicas: routers choose as they say, and one replica is one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.replicas.__main__ import main
from benchmarks.replicas.cluster import (
    ClusterCell,
    ClusterExperiment,
    Recorded,
    arrival_times,
    load_requests,
    run_cell,
    run_cluster,
)
from benchmarks.replicas.replica import Replica, SimulatedRequest
from benchmarks.replicas.routers import ROUTERS
from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.experts import Phase
from moe_infinity.predict.tracefile import SequenceTrace, load_trace, save_trace
from moe_infinity.tools.simulator.replay import Hardware, Setup, replay
from moe_infinity.tools.simulator.schedule import interleave, steps_of
from tests.tools.simulator.traces import one_after_the_other, sequence

LAYERS, EXPERTS = 3, 6
HARDWARE = Hardware(bytes_per_s=100.0, expert_bytes=50, layer_s=2.0)
MANY = [(3, 4), (0, 5), (2, 1), (1, 6), (4, 0), (0, 1)]


def setup(policy: str = "activation-aware") -> Setup:
    return Setup(policy=policy, num_slots=7, prefetch=False, hardware=HARDWARE)


def replica(num_places: int = 1, policy: str = "activation-aware") -> Replica:
    return Replica(setup(policy), num_places, num_layers=LAYERS, num_experts=EXPERTS)


def request(recorded: SequenceTrace, arrival_s: float = 0.0, **about: Any) -> SimulatedRequest:
    fields: dict[str, Any] = {"prompt_ids": [], "session": "", "arrival_s": arrival_s} | about
    return SimulatedRequest(recorded, **fields)


def experiment(**changes: Any) -> ClusterExperiment:
    fields: dict[str, Any] = {
        "routers": ["round-robin"], "replicas": [1], "policies": ["lru"], "capacities": ["7"],
        "hardware": HARDWARE, "num_places": 1, "rate": 1e-6,
    }  # fmt: skip
    return ClusterExperiment(**fields | changes)


# One replica


@pytest.mark.parametrize("policy", ["lru", "activation-aware"])
@pytest.mark.parametrize("num_users", [1, 2])
def test_one_replica_hits_what_a_replay_hits(policy, num_users):
    sequences = one_after_the_other(MANY)
    (cell,) = replay(
        steps_of(interleave(sequences, num_users)),
        [setup(policy)],
        num_layers=LAYERS,
        num_experts=EXPERTS,
    )
    alone = replica(num_users, policy)
    requests = [request(each) for each in sequences]
    for each in requests:
        alone.submit(each)
    alone.advance(np.inf)
    if num_users == 1:  # else places and prompts come in another order
        for phase in Phase:
            found, expected = alone.cell.counters.of(phase), cell.counters.of(phase)
            assert (found.hits, found.misses, found.tokens, found.steps) == (
                expected.hits, expected.misses, expected.tokens, expected.steps,
            )  # fmt: skip
            assert found.stall_s == pytest.approx(expected.stall_s)
    tokens = sum(alone.cell.counters.of(phase).tokens for phase in Phase)
    assert tokens == sum(map(sum, MANY))
    assert sorted(map(id, alone.ended)) == sorted(map(id, requests))
    ends = [each.end_s for each in alone.ended]
    assert ends == sorted(ends)
    alone.cell.table.check_invariants()


def test_time_is_that_of_layers_and_waiting():
    alone = replica()
    late = request(sequence(np.zeros((2, LAYERS, 1), int)), arrival_s=100.0)
    alone.submit(late)
    alone.advance(np.inf)
    assert late.first_token_s == pytest.approx(100 + LAYERS * (HARDWARE.layer_s + 0.5))
    assert late.end_s == pytest.approx(late.first_token_s + LAYERS * HARDWARE.layer_s)


def test_a_replica_works_no_further_than_it_is_told():
    alone = replica()
    alone.submit(request(sequence(np.zeros((5, LAYERS, 1), int))))
    alone.advance(8.0)
    assert 8.0 <= alone.clock_s < 8.0 + 2 * LAYERS * HARDWARE.layer_s
    assert (alone.load, alone.ended) == (1, [])


# Routers


def chosen(name: str, requests: list[SimulatedRequest], loads: list[int]) -> list[int]:
    router = ROUTERS[name](LAYERS, EXPERTS)
    replicas = [replica() for _ in loads]
    for each, load in zip(replicas, loads, strict=True):
        for _ in range(load):
            each.submit(request(sequence(np.zeros((1, LAYERS, 1), int))))
    return [router.choose(each, replicas) for each in requests]


def test_routers_choose_as_their_names_say():
    some = [request(each) for each in one_after_the_other([(0, 1)] * 4)]
    assert chosen("round-robin", some, [5, 0, 0]) == [0, 1, 2, 0]
    assert chosen("least-loaded", some, [2, 1, 2]) == [1, 1, 1, 1]
    sessions = [request(some[0].sequence, session=name) for name in "abcabc"]
    found = chosen("hash", sessions, [0, 0, 0])
    assert found[:3] == found[3:]
    fewer = chosen("hash", sessions, [0, 0])
    moved = [a for a, b in zip(found, fewer, strict=True) if a != b]
    assert set(moved) <= {2}, "only what the third one had goes elsewhere"


@pytest.mark.parametrize("name", ["eam", "eam-oracle"])
def test_requests_of_one_kind_go_to_one_replica_and_hit_more(name):
    rng = np.random.default_rng(0)
    recorded = []
    for task in rng.integers(0, 2, 60):
        cells = rng.random((6, LAYERS, 3)).argsort(axis=2)[:, :, :2] + 3 * task
        ids = rng.integers(0, 5, 6) + 10 * task
        recorded.append(sequence(cells, num_prompt=2, token_ids=ids))
    file_of = [Recorded(s, s.token_ids_T[:2].tolist()) for s in recorded]
    rows = {
        router: run_cell(
            experiment(capacities=["9"]), file_of, EXPERTS, ClusterCell("lru", "9", 2, router)
        )
        for router in ("round-robin", name)
    }
    assert rows[name]["hit_rate"] > rows["round-robin"]["hit_rate"] + 0.1
    assert rows[name]["busiest_share"] < 1.6


# Files


def test_prompts_of_a_trace_without_them_come_from_the_text_beside_it(tmp_path):
    file = tmp_path / "experts.npz"
    strings = [["The", " cat", "s"], [" cat", " sat"]]
    experts = np.zeros((5, LAYERS, 1), np.uint8)
    np.savez(file, experts=experts, offsets=[0, 3, 5])
    about = [
        {"generated_tokens": s, "prompt": p, "category": c}
        for s, p, c in zip(strings, ["The cats sat?", "zzz"], ["a", None], strict=True)
    ]
    (tmp_path / "sequences.jsonl").write_text("\n".join(map(json.dumps, about)))
    first, second = load_requests(file, load_trace(file).sequences)
    assert (first.prompt_ids, first.session) == ([0, 1, 2, 3], "a")
    assert (second.prompt_ids, second.session) == ([], "1")


def test_arrivals_have_the_rate_that_was_asked_for(tmp_path):
    file = tmp_path / "arrivals.csv"
    file.write_text("arrival_s,tokens\n10,1\n12,1\n11,1\n20,1\n")
    of_file = experiment(arrivals=file, rate=0.5)
    assert arrival_times(of_file, 4, 2) == pytest.approx([0, 0.4, 0.8, 4])
    with pytest.raises(ConfigError, match="has 4 arrivals, 5 are wanted"):
        arrival_times(of_file, 5, 1)
    random = arrival_times(experiment(rate=0.5), 4000, 2)
    assert random[-1] / 4000 == pytest.approx(1.0, rel=0.1)
    file.write_text("time\n1\n")
    with pytest.raises(TraceError, match="no column arrival_s"):
        arrival_times(of_file, 4, 1)


def test_arrivals_that_are_all_at_once_are_refused(tmp_path):
    file = tmp_path / "arrivals.csv"
    file.write_text("arrival_s\n3\n3\n")
    with pytest.raises(TraceError, match="all requests arrive at once"):
        arrival_times(experiment(arrivals=file), 2, 1)


def test_a_trace_without_tokens_is_refused(tmp_path):
    file = tmp_path / "empty.npz"
    np.savez(file, experts=np.zeros((0, LAYERS, 1), np.uint8), offsets=[0])
    with pytest.raises(TraceError, match="no tokens in it"):
        run_cluster([file], experiment())


def test_so_many_requests_are_drawn(trace):
    seen: list[tuple[int, int]] = []
    run_cluster([trace], experiment(num_requests=2), on_requests=lambda *at: seen.append(at))
    assert seen == [(0, 2), (1, 2), (2, 2)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.npz"
    save_trace(path, one_after_the_other(MANY), num_experts=EXPERTS)
    return path


def test_every_cell_is_a_row(trace):
    wanted = experiment(routers=["hash", "eam"], replicas=[1, 2], warmup=2, num_tokens=4)
    rows = run_cluster([trace], wanted)
    assert [(row["replicas"], row["router"]) for row in rows] == [
        (1, "hash"), (1, "eam"), (2, "hash"), (2, "eam"),
    ]  # fmt: skip
    for row in rows:
        assert 0 <= row["hit_rate"] <= 1
        assert 0 < row["first_token_s_p50"] <= row["latency_s_p50"] <= row["latency_s_p95"]


def test_the_command_prints_a_table_and_names_mistakes(trace, capsys):
    args = [str(trace), "--replicas", "2", "--router", "least-loaded", "--capacity", "50%"]
    main([*args, "--jobs", "1"])
    assert "least-loaded" in capsys.readouterr().out
    for wrong, said in (
        (["--replicas", "two"], "'two' is not a list of numbers"),
        (["--replicas", "0"], "'0' is not a list of numbers"),
        (["--router", "fate"], "unknown router 'fate'"),
        (["--warmup", "6"], "a warm-up of 6 leaves no request"),
        (["--draw", "7"], "cannot draw 7 of 6 requests"),
        (["--rate", "0"], "--rate is not above 0"),
    ):
        with pytest.raises(SystemExit, match=said):
            main([*args, *wrong])
    assert capsys.readouterr().out == ""
