"""The engine gives each request what it would get alone, and lets them come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import set_seed

from moe_infinity import MoE
from moe_infinity.errors import Cancelled, CheckpointError, ConfigError
from moe_infinity.server.sampling import Sampling
from moe_infinity.server.sequences import DeadlineExceeded, EngineStopped, QueueFull
from tests.closeness import routing_margins
from tests.server.driving import (
    GREEDY,
    Client,
    assert_same_answer,
    generated,
    make_engine,
    run_all,
)

pytestmark = pytest.mark.arithmetic

PROMPTS = [[5, 6, 9, 100, 31], [77], [40, 41, 42, 43, 44, 45, 46, 47, 48], [12, 13], [90, 3, 90]]
ROUTING_MARGIN = 1e-4  # of router logits, float32: their sums are off by 1e-6


def until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


# alone


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_without_batching_tokens_are_those_of_generate(tiny_checkpoint, dtype):
    with MoE(tiny_checkpoint, host_memory="50%", dtype=dtype) as moe:
        expected = [generated(moe, prompt) for prompt in PROMPTS]
        engine = make_engine(moe, max_batch=1)
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        run_all(engine, *clients)
    assert [client.token_ids for client in clients] == expected


def test_without_batching_logits_are_those_of_generate_to_the_bit(moe):
    prompt = PROMPTS[2]
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = moe.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=12,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    engine = make_engine(moe, max_batch=1)
    seen = []
    passes: Any = engine._passes
    forward = passes._forward

    def watched(step, inputs):
        seen.append(forward(step, inputs))
        return seen[-1].clone()

    passes._forward = watched
    run_all(engine, Client(engine, prompt))
    assert len(seen) == len(out.logits) == 12
    assert all(torch.equal(a, b) for a, b in zip(seen, out.logits, strict=True))


@pytest.mark.parametrize("wishes", [{}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 1.7}])
def test_a_seed_gives_what_set_seed_and_generate_give(moe, wishes):
    set_seed(7)
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | wishes
    expected = generated(moe, PROMPTS[0], **sampled)
    engine = make_engine(moe, max_batch=1)
    client = Client(engine, PROMPTS[0], sampling=Sampling(seed=7, num_logprobs=0, **wishes))
    run_all(engine, client)
    assert client.token_ids == expected != generated(moe, PROMPTS[0])


# among others


def test_neighbours_do_not_change_a_request(moe):
    expected = [generated(moe, prompt) for prompt in PROMPTS]
    engine = make_engine(moe, max_batch=4)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    run_all(engine, *clients)
    assert [client.token_ids for client in clients] == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "lru"},
        {"policy": "request-lfu"},
        {"prefetch": True},
        {"prefetch": True, "early_router": True},
    ],
)
@pytest.mark.parametrize("host_memory", ["5%", "40%"])
def test_neither_budget_nor_policy_nor_prefetch_change_a_batch(
    tiny_checkpoint, moe, options, host_memory
):
    with MoE(tiny_checkpoint, host_memory=host_memory, dtype="float32", **options) as other:
        engine = make_engine(other, max_batch=3, prefill_chunk=4)
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        run_all(engine, *clients)
    assert [client.token_ids for client in clients] == [generated(moe, p) for p in PROMPTS]


def test_requests_join_and_leave_at_any_step_and_lengths(moe):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, rng.integers(1, 30)).tolist() for _ in range(8)]
    lengths = rng.integers(1, 17, len(prompts)).tolist()
    alone = make_engine(moe, max_batch=1)
    expected = [Client(alone, p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    run_all(alone, *expected)
    engine = make_engine(moe, max_batch=5, prefill_chunk=7)
    clients = []
    for prompt, length in zip(prompts, lengths, strict=True):
        clients.append(Client(engine, prompt, max_new_tokens=length))
        for _ in range(rng.integers(0, 4)):
            engine.step()
    run_all(engine, *clients)
    for client, single in zip(clients, expected, strict=True):
        assert_same_answer(client, single)
    assert engine._decoding.num_bytes == 0


def test_a_prompt_in_chunks_gives_the_same_tokens(moe):
    prompt = list(range(3, 60))
    engine = make_engine(moe, max_batch=2, prefill_chunk=8)
    client = Client(engine, prompt)
    run_all(engine, client)
    assert client.token_ids == generated(moe, prompt)


def test_sampling_with_a_seed_does_not_depend_on_neighbours(moe):
    wishes = {"sampling": Sampling(seed=3, num_logprobs=0), "max_new_tokens": 20}
    texts = []
    for num_neighbours in (0, 3):
        engine = make_engine(moe, max_batch=4)
        for prompt in PROMPTS[:num_neighbours]:
            Client(engine, prompt, sampling=Sampling())
        client = Client(engine, [50, 60], **wishes)
        run_all(engine, client)
        texts.append(client.text)
    assert texts[0] == texts[1]


# experts and EAMs


def test_each_sequence_has_its_own_eam(moe):
    """Prefilled and decoded among others, a request's EAM is what it is alone."""
    alone = []
    with routing_margins(moe.model) as margins:
        for prompt in PROMPTS[:3]:
            generated(moe, prompt, max_new_tokens=6)
            alone += moe.request_eams()
    assert min(margins) > ROUTING_MARGIN, "take other prompts"
    engine = make_engine(moe, max_batch=4, prefill_chunk=4)
    clients = [Client(engine, prompt, max_new_tokens=6) for prompt in PROMPTS[:3]]
    engine.step()
    seats = [0, 1, 2]  # in order of arrival
    run_all(engine, *clients)
    eams = moe.request_eams()
    for seat, expected in zip(seats, alone, strict=True):
        np.testing.assert_array_equal(eams[seat].prefill, expected.prefill)
        np.testing.assert_array_equal(eams[seat].decode, expected.decode)


def test_a_recording_keeps_the_tokens_of_each_sequence_apart(moe):
    with moe.recording() as finish, routing_margins(moe.model) as margins:
        for prompt in PROMPTS[:3]:
            generated(moe, prompt, max_new_tokens=6)
        alone = finish()
    assert min(margins) > ROUTING_MARGIN, "take other prompts"
    engine = make_engine(moe, max_batch=4, prefill_chunk=4)
    with moe.recording() as finish:
        run_all(engine, *(Client(engine, prompt, max_new_tokens=6) for prompt in PROMPTS[:3]))
        together = finish()
    assert len(together) == 3
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.token_ids_T, other.token_ids_T)
        np.testing.assert_array_equal(one.experts_TLK, other.experts_TLK)


def test_a_seat_taken_again_begins_a_new_eam(moe):
    engine = make_engine(moe, max_batch=2)
    run_all(engine, Client(engine, PROMPTS[0]))
    run_all(engine, Client(engine, PROMPTS[1], max_new_tokens=4))
    eam = moe.request_eams()[0]
    assert (eam.prefill.sum(axis=1) == 2 * len(PROMPTS[1])).all()
    assert (eam.decode.sum(axis=1) == 2 * 3).all()


def test_a_step_looks_up_the_union_of_its_sequences_once(moe):
    engine = make_engine(moe, max_batch=4)
    moe.preload()  # or slots fill between two looks at them
    for prompt in ([5, 6], [5, 6], [5, 6]):
        Client(engine, prompt, max_new_tokens=50)
    for _ in range(4):
        engine.step()
    before = moe.report().decode
    eams_before = moe.request_eams()
    engine.step()
    after = moe.report().decode
    eams = moe.request_eams()
    used = [now.decode - then.decode for now, then in zip(eams, eams_before, strict=True)]
    assert [int(u.sum()) for u in used] == [6, 6, 6, 0]  # 3 MoE layers, 2 experts each
    assert after.lookups - before.lookups == (sum(used) > 0).sum() < 18
    assert after.tokens - before.tokens == 3
    states = moe.expert_states()
    assert ((states == 3) <= (sum(used) > 0)).all()
    assert (states >= 2).sum() == moe.report().tiers[0].experts


# fairness and bounds


def test_a_long_prompt_holds_up_nobody_for_longer_than_a_chunk(moe):
    engine = make_engine(moe, max_batch=2, prefill_chunk=8)
    first = Client(engine, PROMPTS[0], max_new_tokens=30)
    engine.step()
    Client(engine, list(range(3, 83)), max_new_tokens=2)
    before = len(first.token_ids)
    for num_steps in range(1, 11):
        engine.step()
        assert len(first.token_ids) == before + num_steps


def test_requests_are_served_in_order_of_arrival(moe):
    engine = make_engine(moe, max_batch=2)
    clients = [Client(engine, PROMPTS[0], max_new_tokens=3) for _ in range(6)]
    ended: list[int] = []
    while len(ended) < 6:
        engine.step()
        ended += [i for i, client in enumerate(clients) if client.is_done and i not in ended]
    assert ended == sorted(ended)


def test_a_full_queue_refuses_and_takes_again_later(moe):
    engine = make_engine(moe, max_batch=1, max_queue=2)
    clients = [Client(engine, PROMPTS[0]) for _ in range(2)]
    with pytest.raises(QueueFull):
        Client(engine, PROMPTS[0])
    run_all(engine, *clients)
    assert engine.counts.refused == 1
    run_all(engine, Client(engine, PROMPTS[0]))


def test_more_sequences_than_could_ever_wait_are_the_users_mistake(moe):
    engine = make_engine(moe, max_queue=1)
    with pytest.raises(ConfigError, match="at most 1 may wait"):
        engine.submit([None, None])  # type: ignore[list-item]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_cancelled_request_is_gone_within_one_step(moe, num_steps):
    """Waiting, between two chunks of its prompt, or decoding."""
    engine = make_engine(moe, max_batch=2, prefill_chunk=4)
    client = Client(engine, PROMPTS[2], max_new_tokens=100)
    for _ in range(num_steps):
        engine.step()
    engine.cancel([client.running])
    engine.step()
    assert isinstance(client.error, Cancelled)
    assert engine._decoding.num_bytes == 0
    assert engine.state()["waiting"] + engine.state()["decoding"] == 0
    engine.check_invariants()


def test_a_neighbour_that_leaves_changes_nothing(moe):
    engine = make_engine(moe, max_batch=3)
    clients = [Client(engine, prompt) for prompt in PROMPTS[:3]]
    for _ in range(5):
        engine.step()
    engine.cancel([clients[2].running])
    run_all(engine, clients[0], clients[1])
    assert clients[0].token_ids == generated(moe, PROMPTS[0])
    assert clients[1].token_ids == generated(moe, PROMPTS[1])


def test_a_request_past_its_deadline_ends_with_an_error(moe):
    engine = make_engine(moe, deadline=1e-6)
    client = Client(engine, PROMPTS[0])
    run_all(engine, client)
    assert isinstance(client.error, DeadlineExceeded)
    assert engine.counts.expired == 1


# errors


def test_an_error_of_one_request_is_its_own(moe):
    engine = make_engine(moe, max_batch=3)
    good = Client(engine, PROMPTS[0])
    bad = Client(engine, PROMPTS[1])
    bad.running._sampler.choose = None  # type: ignore[method-assign,assignment]
    run_all(engine, good, bad)
    assert isinstance(bad.error, TypeError)
    assert good.token_ids == generated(moe, PROMPTS[0])
    assert engine.counts.failed == 1


def test_a_disk_that_is_gone_fails_all_and_the_next_request_works(tiny_checkpoint, monkeypatch):
    with MoE(tiny_checkpoint, host_memory="25%", dtype="float32") as moe:
        expected = generated(moe, PROMPTS[0])
        engine = make_engine(moe, max_batch=2)
        clients = [Client(engine, prompt, max_new_tokens=500) for prompt in PROMPTS[:2]]
        for _ in range(4):
            engine.step()

        def broken(*args, **kwargs):
            raise CheckpointError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(type(moe.engine.loader.recipes[0]), "load", broken)
            run_all(engine, *clients)
        assert all(isinstance(client.error, CheckpointError) for client in clients)
        again = Client(engine, PROMPTS[0])
        run_all(engine, again)
        assert again.token_ids == expected


def test_the_thread_goes_on_after_an_error_of_no_sequence(moe, monkeypatch, caplog):
    engine = make_engine(moe)
    with monkeypatch.context() as patch:
        patch.setattr(engine._seating, "admit", lambda: 1 / 0)
        client = Client(engine, PROMPTS[0])
        engine.start()
        until(lambda: client.is_done)
        assert isinstance(client.error, EngineStopped)
    again = Client(engine, PROMPTS[0])
    until(lambda: again.is_done)
    assert caplog.text.count("the engine goes on after ZeroDivisionError") == 1
    assert engine.is_alive
    assert again.token_ids == generated(moe, PROMPTS[0])
    engine.close()


def test_the_death_of_the_thread_is_told_to_all_and_remembered(moe, monkeypatch):
    """It dies of an error after which the slots of experts contradict each other."""

    def contradict() -> None:
        raise AssertionError

    engine = make_engine(moe)
    monkeypatch.setattr(engine._seating, "admit", lambda: 1 / 0)
    monkeypatch.setattr(moe, "check_invariants", contradict)
    client = Client(engine, PROMPTS[0])
    engine.start()
    assert engine._thread is not None
    engine._thread.join(10)
    assert isinstance(client.error, EngineStopped)
    assert isinstance(engine.death, ZeroDivisionError)
    with pytest.raises(EngineStopped):
        Client(engine, PROMPTS[0])


def test_close_fails_what_is_left_and_drain_lets_it_finish(moe):
    engine = make_engine(moe)
    client = Client(engine, PROMPTS[0], sampling=GREEDY)
    engine.drain()
    with pytest.raises(EngineStopped):
        Client(engine, PROMPTS[0])
    run_all(engine, client)
    assert client.finish == "length"
    other = make_engine(moe)
    left = Client(other, PROMPTS[0])
    other.close()
    assert isinstance(left.error, EngineStopped)
