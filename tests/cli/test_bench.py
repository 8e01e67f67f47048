"""`moe-infinity bench`: a table on stdout, or one object; refusals before anything is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from moe_infinity.tools.bench import benchmark
from moe_infinity.tools.planning import rates

SHORT = ("--prompt", "6,3", "--decode", 4, "--repeat", 2)


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MEASURE_S", 0.01)
    monkeypatch.setattr(rates, "READ_BYTES", 1 << 20)


def result_of(command: Any, *args: object) -> dict[str, Any]:
    outcome = command("bench", *args, *SHORT, "--json")
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = json.loads(outcome.out)
    return result


def test_every_budget_has_a_row_for_every_test(command, tiny_checkpoint):
    result = result_of(command, tiny_checkpoint, "--host-memory", "25%,100%")
    rows = {(row["test"], row["host_memory"]): row for row in result["rows"]}
    assert [*rows] == [
        (test, budget) for test in ("pp3", "pp6", "tg4 @ d3") for budget in ("25%", "100%")
    ]
    assert all(len(row["samples"]) == 2 and row["tokens_per_s"] > 0 for row in rows.values())


def test_hits_and_bytes_are_those_of_the_budget(command, tiny_checkpoint):
    result = result_of(command, tiny_checkpoint, "--host-memory", "25%,100%")
    small, large = (row for row in result["rows"] if row["test"] == "tg4 @ d3")
    assert 0 <= small["hit_rate"] < 1
    assert small["bytes_read_per_token"] > 0
    assert (large["hit_rate"], large["bytes_read_per_token"]) == (1, 0)
    # 3 layers of 2 experts a token
    assert [sample["lookups"] for sample in large["samples"]] == [24, 24]


def test_the_bound_of_decoding_is_what_a_token_reads_over_the_rate_of_memory(
    command, tiny_checkpoint
):
    result = result_of(command, tiny_checkpoint, "--host-memory", "100%")
    (row,) = (row for row in result["rows"] if row["test"] == "tg4 @ d3")
    attention = 3 * (32 * 32 * 2 + 2 * 16 * 32 + 2 * 8)
    norms = 7 * 32
    router = 3 * 8 * 32
    logits = 128 * 32
    experts = 3 * 2 * 3 * 32 * 16
    num_bytes = 2 * (attention + norms + router + logits + experts)
    assert row["bound_tokens_per_s"] == pytest.approx(result["rates"]["memory"] / num_bytes)


def test_conditions_say_what_was_run_and_in_which_order(command, tiny_checkpoint, monkeypatch):
    args = (tiny_checkpoint, "--host-memory", "25%,50%", "--policy", "lru")
    about = result_of(command, *args)["conditions"]
    assert about["order"] == "in turn"
    assert about["options"]["policy"] == "lru"
    assert {"torch", "python", "moe-infinity"} <= set(about["versions"])
    assert about["threads"] == torch.get_num_threads()
    monkeypatch.setattr(benchmark, "SHARE", 0.0)
    assert result_of(command, *args)["conditions"]["order"] == "one after the other"


def test_the_table_goes_to_stdout_and_nothing_else(command, tiny_checkpoint):
    outcome = command("bench", tiny_checkpoint, *SHORT, "--host-memory", "100%")
    assert outcome.code == 0
    assert "| tg4 @ d3 |" in outcome.out
    assert "tokens/s" in outcome.out
    assert outcome.err == ""


def test_a_text_takes_the_place_of_random_tokens(command, tiny_checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("w5 w6 w7")
    about = result_of(command, tiny_checkpoint, "--text", text)["conditions"]
    assert about["text"] == str(text)


def test_without_decoding_there_are_prompts_only(command, tiny_checkpoint):
    outcome = command("bench", tiny_checkpoint, *SHORT, "--decode", 0, "--json")
    assert [row["test"] for row in json.loads(outcome.out)["rows"]] == ["pp3", "pp6"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--prompt", "x"], "'x' is no number of tokens"),
        (["--prompt", "600"], "longer than the context"),
        (["--host-memory", "25%,lots"], "'lots' is not a size"),
        (["--host-memory", "25%,1"], "holds no expert"),
        (["--host-memory", "4000TiB"], "machine"),
        (["--policy", "none"], "'none'"),
    ],
)
def test_what_cannot_be_measured_is_an_error_on_stderr(command, tiny_checkpoint, args, said):
    outcome = command("bench", tiny_checkpoint, "--prompt", "4", "--decode", "1", *args)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(said)


def test_a_model_that_does_not_fit_into_free_memory_is_refused(
    command, tiny_checkpoint, monkeypatch
):
    monkeypatch.setattr(benchmark, "available_memory_bytes", lambda: 1000)
    outcome = command("bench", tiny_checkpoint, *SHORT, "--host-memory", "100%")
    assert outcome.code == 1
    assert outcome.said("of dense weights")
    assert outcome.said("hint: a smaller --host-memory")


@pytest.mark.parametrize("args", [["--repeat", "0"], ["--decode", "-1"], ["--text", "missing"]])
def test_numbers_out_of_range_are_wrong_usage(command, tiny_checkpoint, args):
    assert command("bench", tiny_checkpoint, *args).code == 2
