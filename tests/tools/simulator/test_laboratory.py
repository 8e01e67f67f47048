"""Rows of a table: each says what was replayed, what it gave, and what nothing could beat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_infinity.cache.policies import ACTIVATION_AWARE
from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.predict.tracefile import save_trace
from moe_infinity.tools.simulator.baselines import SIMULATED_POLICIES
from moe_infinity.tools.simulator.laboratory import (
    Experiment,
    drawn,
    num_slots_of,
    run_experiment,
    table_of,
)
from tests.tools.simulator.traces import one_after_the_other

TOTAL = 3 * 6  # experts of the traces below
LAYER_S, LOAD_S = 0.001, 0.5
KEYS = {
    "trace", "policy", "capacity", "phase", "hit_rate", "belady_hit_rate", "stall_s_per_token",
    "tpot_s", "floor_tpot_s",
}  # fmt: skip
PREFETCH_KEYS = {"prefetch_precision", "prefetch_coverage", "prefetch_wasted_bytes"}


def experiment(policies: str = "lru", capacities: str = "50%", **others: Any) -> Experiment:
    return Experiment.from_text(
        policies=policies, capacities=capacities, bandwidth="100B/s", expert_bytes="50",
        layer_us=1000.0, **others,
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four requests with prompts."""
    path = tmp_path / "trace.npz"
    save_trace(path, one_after_the_other([(3, 9), (2, 8), (1, 9), (3, 7)]), num_experts=6)
    return path


def rows_of(path: Path, *args: str, **others: Any) -> list[dict[str, Any]]:
    return run_experiment([path], experiment(*args, **others))


# Capacities


@pytest.mark.parametrize(
    ("capacity", "slots"),
    [("1", 1), ("100", 100), ("10%", 10), (" 25 % ", 25), ("7.5%", 7), ("29%", 29), ("100%", 100)],
)
def test_a_capacity_is_a_number_of_slots_or_a_share_of_all_experts(capacity, slots):
    assert num_slots_of(capacity, 100) == slots


@pytest.mark.parametrize("capacity", ["0", "0%", "0.9%", "101", "101%", "-3", "-5%"])
def test_a_capacity_that_is_none_or_more_than_all_is_refused(capacity):
    with pytest.raises(ConfigError, match=f"capacity {capacity} is .* of 100 experts"):
        num_slots_of(capacity, 100)


@pytest.mark.parametrize("capacity", ["ten", "", "%", "1GB", "nan%", "inf%", "1.5"])
def test_what_is_no_capacity_is_named(capacity):
    with pytest.raises(ConfigError, match="is not a capacity, expected '10%'"):
        num_slots_of(capacity, 100)


# What a command line says


def test_an_unknown_policy_is_answered_by_the_known_ones():
    with pytest.raises(ConfigError, match="unknown policy 'no-such-policy'") as error:
        experiment("lru,no-such-policy")
    for name in (*SIMULATED_POLICIES, "belady", "clairvoyant"):
        assert name in str(error.value)


def test_an_unknown_factor_is_answered_by_the_known_ones():
    with pytest.raises(ConfigError, match="unknown factor 'luck', expected some of: request"):
        experiment(without="token, luck")


@pytest.mark.parametrize("wrong", [{"bandwidth": "0GB/s"}, {"expert_bytes": "0"}])
def test_hardware_without_bandwidth_or_bytes_is_refused(wrong):
    settings = {"bandwidth": "1GB/s", "expert_bytes": "1MB"} | wrong
    with pytest.raises(ConfigError, match="not above 0"):
        Experiment.from_text(policies="lru", capacities="10%", layer_us=1.0, **settings)


def test_sizes_have_units_and_lists_have_blanks():
    made = Experiment.from_text(
        policies=" lru , lfu", capacities="10%, 3 ,", bandwidth=" 1.2GB/s", expert_bytes="13MB",
        layer_us=250.0, without="token",
    )  # fmt: skip
    assert (made.policies, made.capacities, made.without) == (
        ["lru", "lfu"],
        ["10%", "3"],
        ["token"],
    )
    assert (made.hardware.bytes_per_s, made.hardware.expert_bytes) == (1.2e9, 13e6)
    assert made.hardware.layer_s == 250e-6


# Drawing


def test_a_draw_is_decided_by_its_seed():
    sequences = one_after_the_other([(1, 3)] * 20)
    one, same, other = ([s.token_ids_T[0] for s in drawn(sequences, 8, n)] for n in (1, 1, 2))
    assert one == same != other
    assert len(set(one)) == 8


def test_drawn_requests_follow_each_other():
    steps = np.concatenate([s.steps_T for s in drawn(one_after_the_other([(2, 3)] * 9), 5, 0)])
    assert (np.diff(steps) >= 0).all()
    assert len(np.unique(steps)) == 5 * 4


def test_without_a_draw_all_requests_stay_as_they_were():
    sequences = one_after_the_other([(2, 3)] * 3)
    assert drawn(sequences, None, 0) == sequences


def test_more_requests_than_there_are_cannot_be_drawn():
    with pytest.raises(ConfigError, match="cannot draw 4 requests of 3"):
        drawn(one_after_the_other([(1, 1)] * 3), 4, 0)


# Rows


def test_there_is_a_row_for_every_policy_capacity_and_phase_and_for_belady(trace):
    rows = rows_of(trace, "lru,lfu", "50%,5")
    found = [(row["policy"], row["capacity"], row["phase"]) for row in rows]
    wanted = [
        (p, c, ph) for p in ("lru", "lfu", "belady") for c in ("50%", "5")
        for ph in ("prefill", "decode")
    ]  # fmt: skip
    assert sorted(found) == sorted(wanted)
    assert {row["trace"] for row in rows} == {str(trace)}
    assert {row["num_slots"] for row in rows} == {9, 5}


def test_rows_have_the_promised_keys_and_their_numbers_belong_together(trace):
    for row in rows_of(trace, ",".join(SIMULATED_POLICIES), "50%", prefetch=True):
        assert row.keys() >= KEYS
        json.dumps(row)
        lookups = row["hits"] + row["late_hits"] + row["misses"]
        assert row["hit_rate"] == pytest.approx(row["hits"] / lookups)
        stall_s = row["stall_s_per_token"] * row["tokens"]
        assert row["tpot_s"] == pytest.approx(3 * LAYER_S + stall_s / row["steps"])
        assert row["floor_tpot_s"] >= 3 * LAYER_S
        if row["phase"] == "decode":
            assert row.keys() >= PREFETCH_KEYS
            assert row["tokens"] == 9 + 8 + 9 + 7


def test_without_prefetch_time_is_computing_plus_loading_what_was_missed(trace):
    for row in rows_of(trace, "lru", "50%"):
        assert row["stall_s_per_token"] == pytest.approx(row["misses"] * LOAD_S / row["tokens"])
        if row["policy"] == "belady":
            assert row["hit_rate"] == row["belady_hit_rate"]
            assert row["floor_tpot_s"] == pytest.approx(row["misses"] * LOAD_S / row["steps"])


def test_the_clairvoyant_is_there_when_there_is_prefetch(trace):
    assert {r["policy"] for r in rows_of(trace)} == {"lru", "belady"}
    rows = rows_of(trace, ACTIVATION_AWARE, prefetch=True)
    assert {r["policy"] for r in rows} == {ACTIVATION_AWARE, "belady", "clairvoyant"}
    begun = {r["policy"]: r["prefetches"] for r in rows if r["phase"] == "decode"}
    assert begun["belady"] == 0 < begun["clairvoyant"]


def test_a_policy_named_twice_has_one_row(trace):
    assert len(rows_of(trace, "belady,lru,lru")) == 2 * 2


def test_all_experts_in_memory_miss_each_one_once(trace):
    rows = rows_of(trace, "lru", "100%")
    misses = sum(row["misses"] for row in rows if row["policy"] == "lru")
    assert misses == TOTAL


def test_users_decode_together(trace):
    alone, together = (rows_of(trace, users=users)[1] for users in (1, 2))
    assert (alone["phase"], alone["users"], together["users"]) == ("decode", 1, 2)
    assert alone["tokens"] == together["tokens"]
    assert together["steps"] < 0.7 * alone["steps"]


def test_a_warm_up_is_not_counted(trace):
    decode = rows_of(trace, warmup=3)[1]
    assert decode["tokens"] == 7


def test_a_warm_up_of_all_requests_leaves_nothing_and_says_so(trace):
    with pytest.raises(ConfigError, match="warm-up of 4 leaves no request"):
        rows_of(trace, warmup=4)


def test_a_trace_without_tokens_is_refused(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, experts=np.zeros((0, 3, 2), np.uint8), offsets=np.array([0, 0]))
    with pytest.raises(TraceError, match="no tokens in it"):
        rows_of(path)


def test_token_ids_are_taken_from_the_file_of_texts_beside_a_trace_without_any(tmp_path):
    """Only they tell the experts here: who does not know them waits longer."""
    ids = np.random.default_rng(0).integers(0, 3, 800)
    experts = np.stack([2 * ids, 2 * ids + 1], axis=1)[:, None].repeat(3, axis=1)
    stalls = []
    for name in ("known", "unknown"):
        folder = tmp_path / name
        folder.mkdir()
        np.savez(folder / "experts.npz", experts=experts.astype(np.uint8), offsets=[0, 800])
        if name == "known":
            line = {"generated_tokens": [f"word {number}" for number in ids.tolist()]}
            (folder / "sequences.jsonl").write_text(json.dumps(line) + "\n")
        rows = rows_of(folder / "experts.npz", ACTIVATION_AWARE, "50%", prefetch=True)
        stalls.append(rows[0]["stall_s_per_token"])
    assert stalls[0] < 0.95 * stalls[1]


# For people


def test_the_table_has_a_line_for_every_row_under_the_name_of_its_trace(trace):
    rows = rows_of(trace, "lru,activation-aware", "50%,5", prefetch=True)
    other = [row | {"trace": "other.npz"} for row in rows]
    head, *lines = table_of(rows + other).splitlines()
    assert "hit rate" in head
    assert [line for line in lines if line in (str(trace), "other.npz")] == [
        str(trace),
        "other.npz",
    ]
    assert len(lines) == 2 + 2 * len(rows)
    for row, line in zip(rows, lines[1:], strict=False):
        assert line.split()[:3] == [row["policy"], row["capacity"], row["phase"]]
        assert f"{row['hit_rate']:.1%}" in line
        assert f"{row['tpot_s'] * 1e3:.2f} ms" in line


def test_what_was_not_measured_is_a_dash(trace):
    rows = rows_of(trace)
    prefill = next(row for row in rows if row["phase"] == "prefill")
    assert table_of([prefill]).splitlines()[-1].split()[-2:] == ["-", "-"]
