"""What every model is asked: the same ids for all, others in each repeat."""

from __future__ import annotations

import pytest

from moe_infinity.errors import ConfigError
from moe_infinity.tools.bench.config import BenchConfig
from moe_infinity.tools.bench.measuring import BenchTest, Workload


def workload(lengths: str = "4,2", num_decoded: int = 3, ids: tuple[int, ...] = ()) -> Workload:
    lengths_asked = BenchConfig(prompt=lengths).lengths
    return Workload(
        lengths=lengths_asked, num_decoded=num_decoded, repeats=2, vocab_size=50, text_ids=ids
    )


def test_tests_have_the_names_that_users_of_llama_bench_know():
    assert [test.name for test in (BenchTest(128, 0), BenchTest(128, 64))] == [
        "pp128",
        "tg64 @ d128",
    ]


def test_tokens_are_decoded_after_the_shortest_prompt_only():
    lengths = [(length, len(ids)) for length, ids in workload().texts(0)]
    assert lengths == [(4, 4), (2, 5)]


def test_the_longest_text_may_be_the_one_that_is_decoded():
    assert workload("4,2", num_decoded=3).num_positions == 5
    assert workload("9,2", num_decoded=3).num_positions == 9


def test_every_system_gets_the_same_ids_and_every_repeat_others():
    assert list(workload().texts(0)) == list(workload().texts(0))
    assert list(workload().texts(0)) != list(workload().texts(1))


def test_ids_are_those_of_the_vocabulary():
    ids = [i for _, text in workload("300", 0).texts(0) for i in text]
    assert min(ids) >= 0
    assert max(ids) < 50


def test_a_text_is_read_in_circles():
    ((_, ids),) = workload("8", num_decoded=0, ids=(7, 8, 9)).texts(0)
    assert len(ids) == 8
    assert all(
        following == {7: 8, 8: 9, 9: 7}[i] for i, following in zip(ids, ids[1:], strict=False)
    )


@pytest.mark.parametrize("lengths", ["", "x", "128,", "0", "-5", "1.5", "128 600"])
def test_a_length_that_is_none_is_refused_with_the_text(lengths):
    with pytest.raises(ConfigError, match="no number of tokens above 0\nhint: "):
        BenchConfig(prompt=lengths)
