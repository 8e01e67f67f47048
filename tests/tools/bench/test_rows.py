"""Medians, bounds and the table, from made-up samples."""

from __future__ import annotations

import pytest

from moe_infinity.tools.bench.measuring import BenchTest, Measured, Needs, Sample
from moe_infinity.tools.bench.rows import Rates, bound_of, rows_of, table_of

PROMPT, DECODE = BenchTest(10, 0), BenchTest(10, 4)
NEEDS = Needs(dense_bytes=600, expert_bytes=100.0, prompt_flops=2e6)
RATES = Rates(memory=1000.0, disk=50.0, products=1e7)


def decoded(seconds: float, disk_bytes: int = 0) -> Sample:
    return Sample(4, seconds, hits=12, lookups=16, bytes_read=400, disk_bytes=disk_bytes)


def test_a_decoded_token_is_bounded_by_the_weights_it_reads_from_memory():
    # 600 bytes of dense weights and 4 experts a token of 100: 1000 bytes.
    assert bound_of(DECODE, [decoded(8.0)], NEEDS, RATES) == pytest.approx(1.0)


def test_a_token_whose_misses_take_longer_is_bounded_by_the_disk():
    assert bound_of(DECODE, [decoded(8.0, disk_bytes=400)], NEEDS, RATES) == pytest.approx(0.5)


def test_a_prompt_is_bounded_by_its_products_and_by_the_disk():
    assert bound_of(PROMPT, [Sample(10, 1.0)], NEEDS, RATES) == pytest.approx(5.0)
    slow = Sample(10, 1.0, disk_bytes=1000)
    assert bound_of(PROMPT, [slow], NEEDS, RATES) == pytest.approx(0.5)


def test_there_is_no_bound_where_nothing_was_measured():
    nothing = Rates(None, None, None)
    assert bound_of(DECODE, [decoded(8.0)], NEEDS, nothing) is None
    assert bound_of(PROMPT, [Sample(10, 1.0)], NEEDS._replace(prompt_flops=None), RATES) is None


def test_of_two_measurements_of_a_rate_the_faster_counts():
    assert Rates(1.0, None, None).best(Rates(2.0, 3.0, None)) == Rates(2.0, 3.0, None)


def measured(*seconds: float, needs: Needs | None = NEEDS) -> Measured:
    return Measured(needs, "as it is", {DECODE: [decoded(s) for s in seconds]})


def test_a_row_has_the_median_the_spread_and_the_share_of_the_bound():
    (row,) = rows_of({"25%": measured(4.0, 8.0, 16.0)}, RATES)
    told = row.as_dict()
    assert (told["tokens_per_s"], told["tokens_per_s_min"], told["tokens_per_s_max"]) == (
        0.5, 0.25, 1.0,
    )  # fmt: skip
    assert told["hit_rate"] == 0.75
    assert told["bytes_read_per_token"] == 100
    assert told["share_of_bound"] == pytest.approx(0.5)


def test_rows_are_by_test_with_prompts_first_and_by_system():
    samples = {DECODE: [decoded(1.0)], PROMPT: [Sample(10, 1.0)]}
    found = {name: Measured(NEEDS, "", samples) for name in ("50%", "25%")}
    rows = rows_of(found, RATES)
    assert [(row.test, row.model) for row in rows] == [
        (PROMPT, "50%"), (PROMPT, "25%"), (DECODE, "50%"), (DECODE, "25%"),
    ]  # fmt: skip


def test_the_table_is_markdown_and_says_what_its_tests_are():
    lines = table_of(rows_of({"25%": measured(4.0)}, RATES)).splitlines()
    assert len({len(line) for line in lines[:3]}) == 1
    assert [line.count("|") for line in lines[:3]] == [9, 9, 9]
    assert lines[-1] == "tg4 @ d10: 4 tokens decoded one by one, after 10"
