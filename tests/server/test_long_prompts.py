"""In a pass over a long prompt others go on between layers, and it takes what memory is there."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from moe_infinity import MoE
from moe_infinity.errors import Cancelled
from moe_infinity.experts import Phase, Step
from moe_infinity.memory import room as room_module
from moe_infinity.server import passes as passes_module
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


def test_sequences_that_decode_go_on_between_the_layers_of_a_prompt(moe, alone):
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()
    long = Client(engine, LONG)
    before = len(short.token_ids)
    engine.step()
    num_layers = len(moe.engine.path.computers)
    assert len(short.token_ids) == before + num_layers, "one in each layer but the first, and one"
    run_all(engine, short, long)
    assert_same_answer(short, alone["short"])
    assert_same_answer(long, alone["long"])


def test_they_go_on_between_the_blocks_of_a_layer(few_slots, alone, monkeypatch):
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (32,))
    engine = make_engine(few_slots, max_batch=3, max_gap=0.0, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()
    long = Client(engine, LONG)
    before = len(short.token_ids)
    engine.step()
    num_blocks = 3 * len(few_slots.engine.path.computers)
    assert len(short.token_ids) == min(before + num_blocks, 12), "one in each block but the first"
    other = Client(engine, OTHER)
    run_all(engine, short, long, other)
    for client, name in ((short, "short"), (long, "long"), (other, "other")):
        assert_same_answer(client, alone[name])


def test_a_short_prompt_is_read_and_answered_in_the_pass_of_a_long_one(moe, alone):
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="off")
    long = Client(engine, LONG)
    short = Client(engine, SHORT)
    engine.step()
    assert short.token_ids, "it would have waited"
    run_all(engine, short, long)
    assert_same_answer(short, alone["short"])
    assert_same_answer(long, alone["long"])


def test_nobody_goes_on_before_the_gap_is_over(moe):
    engine = make_engine(moe, max_batch=3, max_gap=1e6, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()
    Client(engine, LONG)
    before = len(short.token_ids)
    engine.step()
    assert len(short.token_ids) == before + 1


def test_a_prompt_that_is_cancelled_is_left_between_two_layers(moe, alone):
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()
    long = Client(engine, LONG)
    entered: list[int] = []
    layer = moe.engine.run_layer

    def watched(moe_layer_idx, routing, *args):
        if routing.num_tokens == len(LONG):
            entered.append(moe_layer_idx)
            engine.cancel([long.running])
        return layer(moe_layer_idx, routing, *args)

    moe.engine.run_layer = watched
    try:
        engine.step()
    finally:
        del moe.engine.run_layer
    assert entered == [0]
    run_all(engine, short, long)
    assert isinstance(long.error, Cancelled)
    assert_same_answer(short, alone["short"])


# Memory


def chunks_of(engine, client) -> list[int]:
    sizes = []
    while not client.token_ids and client.error is None:
        before = client.running.num_prefilled
        engine.step()
        sizes.append(client.running.num_prefilled - before)
    return sizes


def test_where_experts_are_absent_a_prompt_is_one_pass(few_slots, alone):
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    long = Client(engine, LONG)
    assert chunks_of(engine, long) == [len(LONG)]
    run_all(engine, long)
    assert_same_answer(long, alone["long"])


def test_a_pass_ends_in_time_and_who_left_goes_on_from_there(few_slots, alone, monkeypatch):
    monkeypatch.setattr(passes_module, "USUAL_TOKENS", 16)
    monkeypatch.setattr(passes_module, "FIRST_PASS_TOKENS", 45)
    engine = make_engine(few_slots, max_batch=2)
    gone = Client(engine, LONG)
    engine.step()
    assert gone.running.num_prefilled == 45, "nothing tells yet how long it takes"
    monkeypatch.setattr(passes_module, "PASS_S", 0.0)
    engine.step()
    assert gone.running.num_prefilled == 68, "no pass has less than 32 tokens, so two are left"
    engine.cancel([gone.running])
    engine.step()
    again = Client(engine, LONG)
    monkeypatch.setattr(passes_module, "PASS_S", 1e6)
    assert chunks_of(engine, again) == [len(LONG)], "its beginning was known, the rest in one pass"
    assert again.running.num_cached == 64, "whole blocks of what was read"
    run_all(engine, again)
    assert_same_answer(again, alone["long"])


def test_slots_give_way_to_a_prompt_and_come_back(few_slots, alone, monkeypatch):
    table = few_slots.engine.tiers[-1].table
    num_slots = table.num_slots
    room = few_slots.engine.room
    needed = room.needs.of_pass(len(LONG), len(LONG)) + room.needs.kv.of(len(LONG))
    leave(few_slots, monkeypatch, needed - 2 * few_slots.engine.tiers[-1].slots.slot_bytes)
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    long = Client(engine, LONG)
    assert chunks_of(engine, long) == [len(LONG)]
    assert table.num_slots == num_slots - 2
    few_slots.check_invariants()
    leave(few_slots, monkeypatch, 1 << 40)
    run_all(engine, long)
    other = Client(engine, LONG, max_new_tokens=room_module.DECODE_STEPS + 2)
    run_all(engine, other)
    assert table.num_slots == num_slots
    assert_same_answer(long, alone["long"])


def test_slots_give_way_to_the_logits_of_a_whole_prompt(few_slots, monkeypatch):
    table = few_slots.engine.tiers[-1].table
    num_slots = table.num_slots
    needs = few_slots.engine.room.needs
    num_tokens = len(SHORT)
    leave(few_slots, monkeypatch, needs.of_pass(num_tokens, num_tokens) + needs.kv.of(num_tokens))
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    plain = Client(engine, SHORT, max_new_tokens=1)
    run_all(engine, plain)
    assert table.num_slots == num_slots
    scored = Client(engine, SHORT, max_new_tokens=0, echo=True)
    run_all(engine, scored)
    slot_bytes = few_slots.engine.tiers[-1].slots.slot_bytes
    spare = needs.kv.of(num_tokens)
    assert table.num_withdrawn == math.ceil((num_tokens * needs.logits - spare) / slot_bytes) > 0


def test_what_a_pass_takes_again_is_kept_for_it_while_others_go_on(few_slots, monkeypatch):
    leave(few_slots, monkeypatch, 1 << 40)
    room = few_slots.engine.room
    left = room.left()
    engine = make_engine(few_slots, max_batch=3, max_gap=0.0, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()
    decode = engine._passes.decode
    kept: list[int] = []

    def watched(*args):
        kept.append(left - room.left())
        return decode(*args)

    monkeypatch.setattr(engine._passes, "decode", watched)
    long = Client(engine, LONG)
    engine.step()
    num_between = len(few_slots.engine.path.computers) - 1
    assert kept == [room.needs.of_pass(len(LONG), len(LONG))] * num_between + [0]
    run_all(engine, short, long)


def test_what_was_freed_makes_room_for_a_prompt_before_slots_do(few_slots, alone, monkeypatch):
    table = few_slots.engine.tiers[-1].table
    num_slots = table.num_slots
    leave(few_slots, monkeypatch, 0)
    monkeypatch.setattr(
        room_module, "return_free_memory", lambda: leave(few_slots, monkeypatch, 1 << 40)
    )
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    long = Client(engine, LONG)
    assert chunks_of(engine, long) == [len(LONG)]
    assert table.num_slots == num_slots
    run_all(engine, long)
    assert_same_answer(long, alone["long"])


def test_what_was_freed_makes_room_for_a_pass_and_lets_slots_come_back(few_slots, monkeypatch):
    """Without the server, which asks before a pass, too."""
    room = few_slots.engine.room
    tier = few_slots.engine.tiers[-1]
    taken = 2 * tier.slots.slot_bytes

    def pass_of(phase: Phase) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(
                room_module, "return_free_memory", lambda: leave(few_slots, monkeypatch, 1 << 40)
            )
            room.make(Step(phase, 1, len(LONG), begins_B=np.array([True])))

    leave(few_slots, monkeypatch, -taken)
    pass_of(Phase.PREFILL)
    assert tier.table.num_withdrawn == 0
    leave(few_slots, monkeypatch, -taken)
    room.keep_free(0)
    assert tier.table.num_withdrawn == 2
    num_tokens = len(LONG) * room_module.DECODE_STEPS
    needs = room.needs.of_pass(num_tokens, num_tokens) + room.needs.kv.of(num_tokens)
    leave(few_slots, monkeypatch, needs - taken)  # enough for the step, and for no slot
    pass_of(Phase.DECODE)
    assert tier.table.num_withdrawn == 0


def test_a_prompt_for_which_slots_do_not_make_room_is_read_in_parts(few_slots, alone, monkeypatch):
    room = few_slots.engine.room
    kept = room.needs.kv.of(len(LONG))
    leave(few_slots, monkeypatch, room.needs.of_pass(45, len(LONG)) + kept - room.movable())
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    long = Client(engine, LONG)
    sizes = chunks_of(engine, long)
    assert sum(sizes) == len(LONG)
    assert max(sizes) <= 45
    assert len(sizes) <= 3, "fewer tokens at once than there is room for"
    run_all(engine, long)
    assert_same_answer(long, alone["long"])


def test_a_pass_beside_others_leaves_memory_for_their_tokens(few_slots, monkeypatch):
    room = few_slots.engine.room
    num_tokens = len(LONG)
    needed = room.needs.of_pass(num_tokens, num_tokens) + room.needs.kv.of(num_tokens)
    leave(few_slots, monkeypatch, needed - room.movable())
    alone = room.tokens_at_once(num_tokens, num_tokens, num_tokens)
    assert alone > 0
    assert room.tokens_at_once(num_tokens, num_tokens, num_tokens, is_alone=False) == 0
    spare = int(room.memory.num_bytes * room_module.SPARE_SHARE)
    leave(few_slots, monkeypatch, needed - room.movable() + spare)
    assert room.tokens_at_once(num_tokens, num_tokens, num_tokens, is_alone=False) == alone


def test_a_server_with_several_seats_leaves_it_also_for_those_who_come_later(moe, monkeypatch):
    asked: list[bool] = []
    at_once = moe.engine.room.tokens_at_once

    def watched(*args, is_alone):
        asked.append(is_alone)
        return at_once(*args, is_alone=is_alone)

    monkeypatch.setattr(moe.engine.room, "tokens_at_once", watched)
    for num_seats in (1, 2):
        engine = make_engine(moe, max_batch=num_seats, prefix_cache="off")
        run_all(engine, Client(engine, LONG, max_new_tokens=1))
    assert asked == [True, False]


# What runs inside a pass leaves no trace in it


def test_steps_without_others_are_noted_once(moe, monkeypatch):
    begun: list[int] = []
    monkeypatch.setattr(
        type(moe.engine.bookkeeping.tiers[0].policy), "begin_step", lambda *_: begun.append(1)
    )
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="off")
    client = Client(engine, LONG, max_new_tokens=4)
    run_all(engine, client)
    assert len(begun) == 4, "one prompt and three tokens"


def test_an_embedding_is_that_of_its_own_pass(moe, alone):
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="off")
    expected = Client(engine, LONG, max_new_tokens=0, pooling="last")
    run_all(engine, expected)
    short = Client(engine, SHORT)
    engine.step()
    beside = Client(engine, LONG, max_new_tokens=0, pooling="last")
    before = len(short.token_ids)
    engine.step()
    assert len(short.token_ids) > before + 1, "nobody went on inside"
    run_all(engine, short, beside)
    torch.testing.assert_close(embedding_of(beside), embedding_of(expected))
    assert_same_answer(short, alone["short"])


def embedding_of(client: Client) -> torch.Tensor:
    return torch.tensor(client.outputs[-1].embedding)


def test_while_a_short_prompt_is_read_in_the_pass_of_a_long_one_others_decode(moe, alone):
    """Where experts are absent, the short one reads the whole model, too."""
    engine = make_engine(moe, max_batch=4, max_gap=0.0, prefix_cache="off")
    first = Client(engine, SHORT, max_new_tokens=30)
    engine.step()
    long, short = Client(engine, LONG), Client(engine, OTHER)
    before = len(first.token_ids)
    engine.step()
    num_layers = len(moe.engine.path.computers)
    in_passes = 2 * (num_layers - 1)
    behind_passes = 2
    assert len(first.token_ids) == before + in_passes + behind_passes
    run_all(engine, first, long, short)
    assert first.token_ids == generated(moe, SHORT, max_new_tokens=30)
    assert_same_answer(long, alone["long"])
    assert_same_answer(short, alone["other"])


@pytest.mark.parametrize("left", ["long", "short"])
def test_one_of_two_passes_is_cancelled_while_both_are_under_way(moe, alone, left):
    engine = make_engine(moe, max_batch=4, max_gap=0.0, prefix_cache="off")
    first = Client(engine, SHORT, max_new_tokens=30)
    engine.step()
    clients = {"long": Client(engine, LONG), "short": Client(engine, OTHER)}
    layer = moe.engine.run_layer

    def watched(moe_layer_idx, routing, *args):
        if routing.num_tokens == len(OTHER):
            engine.cancel([clients[left].running])
        return layer(moe_layer_idx, routing, *args)

    moe.engine.run_layer = watched
    try:
        engine.step()
    finally:
        del moe.engine.run_layer
    run_all(engine, first, *clients.values())
    assert isinstance(clients.pop(left).error, Cancelled)
    ((stays, client),) = clients.items()
    assert_same_answer(client, alone["other" if stays == "short" else "long"])
    assert first.token_ids == generated(moe, SHORT, max_new_tokens=30)
    engine.check_invariants()


def test_predictions_come_back_when_slots_give_way_and_slots_are_filled_again(
    tiny_checkpoint, monkeypatch
):
    with MoE(tiny_checkpoint, host_memory="100%", dtype="float32", preload="wait") as moe:
        moe.preload()
        tokens = generated(moe, SHORT)
        books = moe.engine.bookkeeping
        tier = moe.engine.tiers[-1]
        assert books.predictor is None, "all experts are resident"
        with monkeypatch.context() as patched:
            leave(moe, patched, -2 * tier.slots.slot_bytes)
            moe.engine.room.keep_free(0)
            assert tier.table.num_withdrawn == 2
            assert generated(moe, SHORT) == tokens
            assert books.predictor is not None
        leave(moe, monkeypatch, 1 << 40)
        while tier.table.num_withdrawn:
            assert generated(moe, SHORT) == tokens
        until = time.monotonic() + 10
        while tier.table.num_resident < books.total_experts:
            assert time.monotonic() < until, "they were not filled again"
            time.sleep(0.01)
        assert moe.is_ready
        assert generated(moe, SHORT) == tokens
