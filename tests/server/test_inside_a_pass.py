"""What goes wrong inside a pass over a long prompt, or beside it, ends no other request."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from moe_infinity.architectures import prompt_blocks
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import Phase, Step
from moe_infinity.memory import room as room_module
from moe_infinity.server import batch as batch_module
from moe_infinity.server import reading as reading_module
from tests.server.driving import LONG, OTHER, SHORT, Client, leave, make_engine, run_all


def test_a_join_that_fails_ends_those_of_its_batch(moe, monkeypatch):
    """The sequence was in no list any more: its client waited for ever."""
    engine = make_engine(moe, max_batch=3, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()

    def failing(*_):
        raise MemoryError("no memory for keys")

    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "joined", failing)
        other = Client(engine, OTHER)
        engine.step()
    for client in (short, other):
        assert isinstance(client.error, MemoryError)
    engine.check_invariants()
    later = [Client(engine, SHORT), Client(engine, OTHER)]
    run_all(engine, *later)
    assert all(client.finish for client in later)


def test_a_client_may_leave_after_a_join_that_failed(moe, monkeypatch):
    engine = make_engine(moe, max_batch=3, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()

    def failing(*_):
        engine.cancel([short.running])
        raise MemoryError("no memory for keys")

    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "joined", failing)
        monkeypatch.setattr(engine._decoding, "step", list)  # not yet
        other = Client(engine, OTHER)
        engine.step()
    monkeypatch.undo()
    engine.step()
    assert isinstance(other.error, MemoryError)
    engine.check_invariants()


def test_short_prompts_take_at_most_half_of_the_time_of_a_long_pass(moe, monkeypatch):
    """Where experts are absent a short one takes seconds, and more come meanwhile."""
    jumped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jumped[0])
    monkeypatch.setattr(reading_module, "time", clock)
    engine = make_engine(moe, max_batch=8, max_gap=0.0, prefix_cache="off")
    prefill = engine._passes.prefill

    def slow_inside(*args, **kwargs):
        if len(engine._prefilling.under_way) > 1:
            jumped[0] += 10.0
        return prefill(*args, **kwargs)

    monkeypatch.setattr(engine._passes, "prefill", slow_inside)
    long = Client(engine, LONG, max_new_tokens=1)
    shorts = [Client(engine, SHORT) for _ in range(6)]
    engine.step()
    assert long.is_done
    assert sum(bool(short.token_ids) for short in shorts) == 1
    run_all(engine, *shorts)


def test_a_layer_that_fails_inside_a_pass_is_given_up_before_the_pass_goes_on(moe, monkeypatch):
    """Its loads were held until the pass was over, and their errors met whoever came next."""
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()
    path, recorder = moe.engine.path, moe.engine.recorder
    noted: list[str] = []

    def failing(method):
        def run(*args):
            if recorder.step.phase is Phase.DECODE and "failed" not in noted:
                noted.append("failed")
                raise CheckpointError("a file cannot be read")
            noted.append(recorder.step.phase.name)
            return method(*args)

        return run

    for name in ("run_layer", "run_recorded_layer"):
        monkeypatch.setattr(path, name, failing(getattr(path, name)), raising=False)
    recover = path.recover

    def watched():
        noted.append("recovered")
        recover()

    monkeypatch.setattr(path, "recover", watched)
    long = Client(engine, LONG, max_new_tokens=1)
    engine.step()
    assert isinstance(short.error, CheckpointError)
    assert long.error is None
    behind = noted[noted.index("failed") + 1 :]
    assert behind[0] == "recovered"
    run_all(engine, long)


def test_a_prompt_that_fits_alone_is_read_while_others_wait_for_a_seat(few_slots, monkeypatch):
    room = few_slots.engine.room
    num_tokens = len(LONG)
    needed = room.needs.of_pass(30, num_tokens) + room.needs.kv.of(num_tokens)
    leave(few_slots, monkeypatch, needed - room.movable())  # and nothing for others
    engine = make_engine(few_slots, max_batch=2, prefix_cache="off")
    monkeypatch.setattr(engine._passes, "can_hold", lambda sequence, others, held: not others)
    long, other = Client(engine, LONG, max_new_tokens=1), Client(engine, OTHER)
    run_all(engine, long, other)
    assert long.error is None
    assert other.error is None


def test_what_stays_between_blocks_is_not_kept_twice(few_slots, monkeypatch):
    """Hidden states and masks of all tokens are there already; what a block takes was freed."""
    room = few_slots.engine.room
    num_tokens = len(LONG)
    step = Step(Phase.PREFILL, 1, num_tokens, begins_B=np.array([True]), context=num_tokens)
    monkeypatch.setattr(room._blocks, "size", 32)
    leave(few_slots, monkeypatch, 1 << 40)
    left = room.left()
    with room.set_aside(step):
        kept = left - room.left()
    whole = room.needs.of_pass(num_tokens, num_tokens, 32)
    assert kept == room.needs.of_pass(32, num_tokens) < whole


def sizes_of_blocks(monkeypatch) -> list[int]:
    """A list that gets the tokens of each block of a long prompt that a layer computes."""
    sizes: list[int] = []
    inner = prompt_blocks._blocks

    def watched(num_tokens, size):
        found = inner(num_tokens, size)
        if num_tokens == len(LONG):
            sizes.append(found[0].stop)
        return found

    monkeypatch.setattr(prompt_blocks, "_blocks", watched)
    return sizes


def test_blocks_are_short_while_others_wait_for_them(few_slots, monkeypatch):
    """4,096 tokens of a layer took 7 s, and a running answer waited for all of them."""
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (64, 16))
    leave(few_slots, monkeypatch, 1 << 40)
    sizes = sizes_of_blocks(monkeypatch)
    engine = make_engine(few_slots, max_batch=3, max_gap=3.0, prefix_cache="off")
    alone = Client(engine, LONG, max_new_tokens=1)
    run_all(engine, alone)
    assert {*sizes} == {45}, "in two blocks"
    sizes.clear()
    short = Client(engine, SHORT)
    engine.step()
    engine._passes._token_layer_s = 1 / 20  # 20 tokens in the second that is a third of a gap
    run_all(engine, Client(engine, LONG, max_new_tokens=1), short)
    assert {*sizes} == {18}, "in five"


def test_blocks_are_the_shortest_before_any_pass_has_told_its_pace(few_slots, monkeypatch):
    """Beside the first long prompt after a start a running answer waited 6.2 s."""
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (64, 16))
    leave(few_slots, monkeypatch, 1 << 40)
    sizes = sizes_of_blocks(monkeypatch)
    engine = make_engine(few_slots, max_batch=3, max_gap=3.0, prefix_cache="off")
    short = Client(engine, SHORT)
    engine.step()
    run_all(engine, Client(engine, LONG, max_new_tokens=1), short)
    assert {*sizes} == {15}, "in six"


def test_blocks_become_shorter_when_others_come_in_the_pass(few_slots, monkeypatch):
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (64, 16))
    leave(few_slots, monkeypatch, 1 << 40)
    engine = make_engine(few_slots, max_batch=3, max_gap=0.0, prefix_cache="off")
    engine._passes._gap_share_s = 1.0
    engine._passes._token_layer_s = 1 / 20
    sizes = sizes_of_blocks(monkeypatch)
    admit = engine._seating.admit
    came: list[Client] = []

    def admit_one_more():
        if engine._prefilling.under_way and not came:
            came.append(Client(engine, SHORT))
        admit()

    monkeypatch.setattr(engine._seating, "admit", admit_one_more)
    long = Client(engine, LONG, max_new_tokens=1)
    engine.step()
    run_all(engine, long, *came)
    assert sizes[0] == 45
    assert 18 in sizes


def test_a_prompt_that_is_mostly_known_is_short(moe, monkeypatch):
    """A turn of an agent waited for the whole pass of another's first prompt."""
    monkeypatch.setattr(reading_module, "USUAL_TOKENS", 24)
    engine = make_engine(moe, max_batch=3, max_gap=0.0, prefix_cache="64MiB")
    conversation = LONG[::-1][:60]
    run_all(engine, Client(engine, conversation))
    long = Client(engine, LONG)
    turn = Client(engine, [*conversation, *OTHER])
    new = Client(engine, LONG[3:66])
    engine.step()
    assert turn.token_ids, "it would have waited"
    assert not new.token_ids
    run_all(engine, long, turn, new)
