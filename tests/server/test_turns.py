"""Clients share seats, the queue and the time of prompts. Each answer is what it is alone."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from moe_infinity.experts import Phase
from moe_infinity.server import limits
from moe_infinity.server.sequences import QueueFull
from moe_infinity.server.turns import PromptShares, SeatQueue, to_yield
from tests.server.driving import Client, assert_same_answer, make_engine, run_all

GREEDY_ONE = [[1, 2, 3, 4 + each] for each in range(20)]
OTHER = [7, 8, 9]


def waiting(client: str, num_tokens: int = 1) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(client=client, images=None), ids=[0] * num_tokens, num_prefilled=0
    )


def seats_of(engine: Any) -> dict[str, int]:
    seated = (*engine._prefilling, *engine._decoding)
    return dict(Counter(sequence.request.client for sequence in seated))


def test_another_client_gets_a_seat_in_the_next_step(moe):
    engine = make_engine(moe, max_batch=4, prefix_cache="off")
    many = [Client(engine, each, client="a", max_new_tokens=30) for each in GREEDY_ONE]
    for _ in range(6):
        engine.step()
    assert seats_of(engine) == {"a": 4}
    one = Client(engine, OTHER, client="b", max_new_tokens=5)
    engine.step()
    engine.step()
    assert one.outputs
    assert seats_of(engine) == {"a": 3, "b": 1}
    assert sum(bool(client.outputs) for client in many) == 4
    run_all(engine, one)
    assert not any(client.is_done for client in many)
    run_all(engine, *many)


def test_whoever_gave_a_seat_away_goes_on_where_it_was(moe):
    """Its tokens and logprobs are those of the sequence alone, and no prompt is read twice."""
    alone = make_engine(moe, max_batch=4, prefix_cache="off")
    expected = [Client(alone, each, max_new_tokens=30) for each in GREEDY_ONE[:4]]
    run_all(alone, *expected)
    engine = make_engine(moe, max_batch=4, prefix_cache="off")
    many = [Client(engine, each, client="a", max_new_tokens=30) for each in GREEDY_ONE[:4]]
    for _ in range(8):
        engine.step()
    others = [Client(engine, OTHER, client="b", max_new_tokens=5) for _ in range(4)]
    engine.step()
    assert engine.state()["waiting"] == 4  # two of each
    run_all(engine, *many, *others)
    for client, same in zip(many, expected, strict=True):
        assert_same_answer(client, same)
    num_prompt = sum(len(client.prompt_ids) for client in (*many, *others))
    assert engine.counts.prompt_tokens == num_prompt


def test_who_comes_back_to_a_batch_begins_anew_for_the_recorder_alone(moe):
    engine = make_engine(moe, max_batch=3)
    owners: list[Any] = [
        SimpleNamespace(seat=0, is_known=True, ids=[1]),
        SimpleNamespace(seat=2, ids=[1]),
    ]
    owners[1].is_known = False
    step = engine._passes._step(Phase.DECODE, owners, [5, 6])
    assert step.begins_B.tolist() == [False, False, True]
    assert owners[1].is_known


def test_with_one_seat_a_sequence_keeps_it(moe):
    engine = make_engine(moe, max_batch=1)
    first = Client(engine, GREEDY_ONE[0], client="a")
    engine.step()
    second = Client(engine, OTHER, client="b")
    third = Client(engine, GREEDY_ONE[1], client="a")
    run_all(engine, first)
    assert not second.outputs
    run_all(engine, second)
    assert not third.is_done
    run_all(engine, third)


def test_clients_take_turns_with_the_chunks_of_their_prompts(moe):
    engine = make_engine(moe, max_batch=4, prefill_chunk=2, prefix_cache="off")
    long = [Client(engine, [1] * 20, client="a", max_new_tokens=1) for _ in range(3)]
    engine.step()
    short = Client(engine, [2] * 6, client="b", max_new_tokens=1)
    for _ in range(6):
        engine.step()
    assert short.is_done
    run_all(engine, *long)


def test_a_short_prompt_waits_for_no_long_ones_of_many_clients(moe):
    engine = make_engine(moe, max_batch=8, prefill_chunk=8, prefix_cache="off")
    long = [Client(engine, [1] * 40, client=str(each), max_new_tokens=1) for each in range(5)]
    for _ in range(7):
        engine.step()
    for _ in range(3):  # it comes again and again
        short = Client(engine, [2] * 3, client="b", max_new_tokens=1)
        engine.step()
        assert short.is_done
        for _ in range(4):
            engine.step()
    run_all(engine, *long)


def test_who_comes_late_has_saved_up_nothing():
    shares = PromptShares(100)
    first, late = waiting("a", 1000), waiting("b", 1000)
    for _ in range(5):
        assert shares.next_of([first]) is first
        shares.note(first, 100)
    chosen = []
    for _ in range(6):
        chosen.append(shares.next_of([first, late]))
        shares.note(chosen[-1], 100)
    assert chosen.count(first) == 3
    for _ in range(5):
        shares.note(shares.next_of([late]), 100)
    assert shares.next_of([late, first]) is late  # the first has gone, and comes anew


def test_a_client_that_fills_its_queue_leaves_room_for_another(moe):
    engine = make_engine(moe, max_batch=1, max_queue=2)
    clients = [Client(engine, OTHER, client="a", max_new_tokens=1) for _ in range(2)]
    with pytest.raises(QueueFull):
        Client(engine, OTHER, client="a")
    clients.append(Client(engine, OTHER, client="b", max_new_tokens=1))
    by_client = engine.state()["waiting_by_client"]
    assert sorted(by_client.values()) == [1, 2]
    assert not {"a", "b"} & by_client.keys()
    run_all(engine, *clients)


def test_the_queues_of_all_clients_have_a_limit():
    turns = SeatQueue(2)
    for client in range(limits.CLIENTS.most):
        turns.add([waiting(str(client)), waiting(str(client))])
    with pytest.raises(QueueFull, match="all clients"):
        turns.add([waiting("another")])


def test_long_prompts_that_wait_have_a_limit():
    turns = SeatQueue(64)
    turns.add([waiting("a", limits.QUEUED_TOKENS_OF_ONE.most + 1)])  # alone it is taken
    with pytest.raises(QueueFull, match="long prompts are waiting"):
        turns.add([waiting("a")])
    turns.add([waiting("b", limits.QUEUED_TOKENS_OF_ONE.most - 1)])
    with pytest.raises(QueueFull, match="other clients"):
        turns.add([waiting("c")])


def test_a_seat_is_given_away_where_the_difference_is_two():
    seated = [waiting("a"), waiting("a"), waiting("b")]
    assert to_yield(seated, "c") is seated[1]
    assert to_yield(seated, "b") is None
    assert to_yield([waiting("a")], "b") is None
    assert to_yield([], "b") is None
