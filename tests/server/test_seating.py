"""Prompts and answers for which memory has no room: they wait for others, or are refused or cut."""

from __future__ import annotations

import math

import pytest

from moe_infinity.server import decoding as decoding_module
from moe_infinity.server.sequences import QueueFull
from tests.server.driving import (
    LONG,
    OTHER,
    SHORT,
    Client,
    assert_same_answer,
    generated,
    leave,
    make_engine,
    run_all,
)

pytestmark = pytest.mark.arithmetic


def test_a_prompt_without_room_beside_others_waits_for_them(few_slots, alone, monkeypatch):
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off", prefill_chunk=32)
    short = Client(engine, SHORT)
    engine.step()
    long = Client(engine, LONG)
    engine.step()
    assert 0 < long.running.num_prefilled < len(LONG)
    leave(few_slots, monkeypatch, -few_slots.engine.room.movable())
    engine._passes._chunk = None  # as long as fits
    engine.step()
    assert (engine.state()["prefilling"], engine.state()["waiting"]) == (0, 1)
    assert long.running.cache is None
    leave(few_slots, monkeypatch, 1 << 40)
    run_all(engine, short, long)
    assert_same_answer(short, alone["short"])
    assert_same_answer(long, alone["long"])


def test_slots_give_way_to_a_sequence_that_joins_a_batch(few_slots, monkeypatch):
    """Its keys and values, and those of the batch, are copied to be of one length."""
    room, table = few_slots.engine.room, few_slots.engine.tiers[-1].table
    engine = make_engine(few_slots, max_batch=2, max_gap=0.0, prefix_cache="off")
    short = Client(engine, SHORT, max_new_tokens=30)
    engine.step()
    add = engine._decoding.add
    given: list[int] = []

    def without_memory(sequence):
        with monkeypatch.context() as patched:
            leave(few_slots, patched, 0)
            before = table.num_withdrawn
            add(sequence)
            given.append(table.num_withdrawn - before)

    monkeypatch.setattr(engine._decoding, "add", without_memory)
    long = Client(engine, LONG)
    engine.step()
    num_layers = few_slots.model.config.num_hidden_layers
    num_short = len(SHORT) + len(short.token_ids) - 2  # when it is joined, without its newest
    num_joined = 2 * len(LONG)
    num_new = num_joined - num_short + num_joined // num_layers
    slot_bytes = few_slots.engine.tiers[-1].slots.slot_bytes
    assert given == [math.ceil(room.needs.kv.of(num_new) / slot_bytes)]
    run_all(engine, short, long)


def test_a_prompt_whose_embedding_is_begun_is_refused_without_room(few_slots, monkeypatch):
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off", prefill_chunk=32)
    short = Client(engine, SHORT)
    engine.step()
    long = Client(engine, LONG, pooling="mean", max_new_tokens=0)
    engine.step()
    leave(few_slots, monkeypatch, -few_slots.engine.room.movable())
    engine._passes._chunk = None  # as long as fits
    engine.step()
    assert isinstance(long.error, QueueFull), "read anew, its first tokens would count twice"
    leave(few_slots, monkeypatch, 1 << 40)
    run_all(engine, short)


def test_no_seat_is_taken_for_a_sequence_that_does_not_fit(moe, monkeypatch):
    """An answer stood still, its seat empty, until others had ended."""
    engine = make_engine(moe, max_batch=3, prefix_cache="off")
    greedy = [Client(engine, SHORT, client="greedy") for _ in range(3)]
    for _ in range(3):
        engine.step()
    assert engine.state()["decoding"] == 3
    monkeypatch.setattr(engine._passes, "can_hold", lambda sequence, others, held: not others)
    other = Client(engine, OTHER, client="other")
    engine.step()
    assert engine.state()["decoding"] == 3
    run_all(engine, *greedy, other)


def test_a_prompt_without_room_in_the_pass_of_another_is_read_after_it(moe, alone, monkeypatch):
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="off")
    reading = engine._prefilling
    at_once = engine._passes._num_at_once
    refused: list[int] = []

    def without_room_inside(sequence, *asked):
        if len(reading.under_way) > 1:
            refused.append(len(sequence.ids))
            raise QueueFull("there is no memory for this prompt: try again later")
        return at_once(sequence, *asked)

    monkeypatch.setattr(engine._passes, "_num_at_once", without_room_inside)
    long, short = Client(engine, LONG), Client(engine, SHORT)
    engine.step()
    assert refused
    assert not short.token_ids
    run_all(engine, short, long)
    assert_same_answer(short, alone["short"])
    assert_same_answer(long, alone["long"])


def test_an_answer_without_room_beside_others_goes_on_after_them(few_slots, alone, monkeypatch):
    monkeypatch.setattr(decoding_module, "DECODE_STEPS", 1)
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    first = Client(engine, OTHER)
    engine.step()
    second = Client(engine, SHORT)
    engine.step()
    assert second.token_ids
    leave(few_slots, monkeypatch, -few_slots.engine.room.movable())
    engine.step()
    assert (engine.state()["decoding"], engine.state()["waiting"]) == (1, 1)
    leave(few_slots, monkeypatch, 1 << 40)
    run_all(engine, first, second)
    assert engine.counts.cut == 0
    assert_same_answer(first, alone["other"])
    assert_same_answer(second, alone["short"])


def test_a_prompt_without_room_is_to_come_again_later(few_slots, monkeypatch):
    leave(few_slots, monkeypatch, -few_slots.engine.room.movable())
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    long = Client(engine, LONG)
    run_all(engine, long)
    assert isinstance(long.error, QueueFull)


def test_a_sequence_waits_for_a_seat_until_memory_has_room_for_it(few_slots, monkeypatch):
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    first, second = Client(engine, SHORT), Client(engine, OTHER)
    engine.step()
    assert engine.state()["waiting"] == 0
    third = Client(engine, SHORT)
    run_all(engine, first, second, third)
    fourth = Client(engine, SHORT)
    engine.step()
    leave(few_slots, monkeypatch, -few_slots.engine.room.movable())
    fifth = Client(engine, OTHER)
    engine.step()
    assert engine.state()["waiting"] == 1
    leave(few_slots, monkeypatch, 1 << 40)
    run_all(engine, fourth, fifth)
    assert fifth.token_ids == generated(few_slots, OTHER)


def test_an_answer_without_room_is_cut_and_says_so(few_slots, monkeypatch, caplog):
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    client = Client(engine, SHORT, max_new_tokens=60)
    engine.step()
    leave(few_slots, monkeypatch, -few_slots.engine.room.movable())
    run_all(engine, client)
    assert client.finish == "length"
    assert len(client.token_ids) < 60
    assert engine.counts.cut == 1
    assert "memory has no room for its keys and values" in caplog.text


def test_an_error_while_a_seat_is_given_loses_no_request(few_slots, monkeypatch):
    """Whoever fails all, or leaves, has to find it."""
    engine = make_engine(few_slots, prefix_cache="off")
    client = Client(engine, SHORT)
    with monkeypatch.context() as patched:
        patched.setattr(engine._passes, "can_hold", fail)
        with pytest.raises(OSError, match="too many open files"):
            engine.step()
    assert engine.state()["waiting"] == 1
    run_all(engine, client)
    assert client.token_ids


def fail(*args: object) -> bool:
    raise OSError("too many open files")
