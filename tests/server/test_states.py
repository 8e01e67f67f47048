"""Models with recurrent layers go on from kept states, and answer as they do without."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from moe_infinity import MoE
from moe_infinity.prefixes.prefix_tree import State
from tests.conftest import save_tokenizer
from tests.server.driving import (
    TOLERANCE,
    Client,
    answered,
    assert_same_answer,
    cached,
    make_engine,
    run_all,
)
from tests.server.serving import Serving, serving
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

pytestmark = pytest.mark.arithmetic

TEXT = [(7 * at * at + at) % 120 + 3 for at in range(200)]


@pytest.fixture(scope="module", params=["qwen3_next", "nemotron_h", "lfm2_moe"])
def hybrid(request, tmp_path_factory) -> Iterator[MoE]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny.tiny_model(architectures_in(request.param)[0]).save_pretrained(folder)
    save_tokenizer(folder)
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        yield moe


@pytest.mark.sample(3)
def test_a_conversation_continues_where_the_last_answer_ended(hybrid):
    engine = make_engine(hybrid, max_batch=2, prefix_cache="64MiB")
    without = make_engine(hybrid, max_batch=2, prefix_cache="off")
    prompt, known = TEXT[:40], 0
    for turn in range(3):
        found, expected = (answered(each, prompt) for each in (engine, without))
        assert_same_answer(found, expected)
        assert [cached(found), cached(expected)] == [known, 0]
        # The last token of an answer is chosen, and no pass has got it yet.
        known = len(prompt) + len(found.token_ids) - 1
        prompt = [*prompt, *found.token_ids, *TEXT[50 + 20 * turn :][:17]]
    # Another answer to the first prompt continues that prompt.
    other = answered(engine, [*TEXT[:40], *TEXT[5:30]])
    assert cached(other) == 40
    assert_same_answer(other, answered(without, [*TEXT[:40], *TEXT[5:30]]))


@pytest.mark.sample(3)
def test_sequences_that_decode_together_are_kept_apart(hybrid):
    engine = make_engine(hybrid, max_batch=3, prefix_cache="64MiB")
    without = make_engine(hybrid, max_batch=3, prefix_cache="off")
    prompts = [TEXT[:9], TEXT[20:60], TEXT[70:90]]
    clients = [
        Client(engine, prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, (20, 7, 12), strict=True)
    ]
    run_all(engine, *clients)
    for prompt, client in zip(prompts, clients, strict=True):
        longer = [*prompt, *client.token_ids, *TEXT[110:124]]
        found = answered(engine, longer, max_new_tokens=5)
        assert cached(found) == len(prompt) + len(client.token_ids) - 1
        assert_same_answer(found, answered(without, longer, max_new_tokens=5))


@pytest.mark.sample(3)
def test_owners_do_not_share(hybrid):
    engine = make_engine(hybrid, max_batch=2, prefix_cache="64MiB")
    longer = TEXT[:50]
    answered(engine, TEXT[:40], owner="a", max_new_tokens=1)
    shares = [cached(answered(engine, longer, owner=owner)) for owner in ("b", "", "a")]
    assert shares == [0, 0, 40]


@pytest.mark.sample(3)
def test_the_least_recently_used_goes_first_and_bytes_are_bounded(hybrid):
    engine = make_engine(hybrid, max_batch=1, prefix_cache="64MiB")
    first, second = TEXT[:40], TEXT[60:100]
    answered(engine, first, max_new_tokens=1)
    size = engine.state()["prefix_bytes"]
    assert size > 0
    engine = make_engine(hybrid, max_batch=1, prefix_cache=str(2 * size))  # two of these
    for prompt in (first, second):
        answered(engine, prompt, max_new_tokens=1)
    # It takes the first, so its own prompt, a longer one, drops the second.
    assert cached(answered(engine, [*first, 9], max_new_tokens=1)) == 40
    assert engine.state()["prefix_bytes"] <= 2 * size
    assert cached(answered(engine, [*second, 9], max_new_tokens=1)) == 0
    small = make_engine(hybrid, max_batch=1, prefix_cache=str(size // 2))
    assert cached(answered(small, first)) == cached(answered(small, [*first, 9])) == 0
    assert small.state()["prefix_bytes"] <= size // 2


@pytest.mark.sample(3)
def test_the_eam_of_a_request_is_that_of_all_its_tokens(hybrid):
    eams = []
    for size in ("off", "64MiB"):
        engine = make_engine(hybrid, max_batch=1, prefix_cache=size)
        answered(engine, TEXT[:50], max_new_tokens=1)
        client = answered(engine, TEXT[:70])
        eams.append(hybrid.request_eams()[0])
        eams[-1] = (eams[-1].prefill.copy(), eams[-1].decode.copy())
    assert cached(client) == 50
    for without, with_snapshot in zip(*eams, strict=True):
        np.testing.assert_array_equal(without, with_snapshot)


@pytest.mark.sample(3)
def test_a_wrong_state_changes_the_answer(hybrid):
    """The comparisons above can fail."""
    engine = make_engine(hybrid, max_batch=1, prefix_cache="64MiB")
    answered(engine, TEXT[:40], max_new_tokens=1)
    (state,) = (kept for kept in engine._passes.prefixes._kept if isinstance(kept, State))
    assert state.data is not None
    state.data.view(torch.float32).fill_(1)
    found = answered(engine, TEXT[:60])
    assert cached(found) == 40
    expected = answered(make_engine(hybrid, max_batch=1, prefix_cache="off"), TEXT[:60])
    with pytest.raises(AssertionError):
        assert_same_answer(found, expected)


@pytest.mark.sample(3)
def test_through_the_server_usage_and_metrics_count_it(hybrid):
    """Conversations at the same time; those of the other server keep nothing."""

    def turns(server: Serving, number: int) -> tuple[list[str], list[int]]:
        texts, counts = [], []
        prompt = f"w{number} " + " ".join(f"w{token}" for token in TEXT[number : number + 30])
        with server.client() as client:
            for turn in range(3):
                reply = client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=5, temperature=0, logprobs=2
                )
                (choice,) = reply.choices
                assert choice.logprobs is not None
                for likeliest in choice.logprobs.top_logprobs or []:
                    second, first = sorted(likeliest.values())[-2:]
                    assert first - second > 2 * TOLERANCE, "take another prompt"
                texts.append(choice.text)
                assert reply.usage is not None
                details = reply.usage.prompt_tokens_details
                counts.append((details and details.cached_tokens) or 0)
                prompt += f" {choice.text.strip()} w{turn + 5} w{turn + 50}"
        return texts, counts

    found = {}
    for size in ("off", "64MiB"):
        with (
            serving(hybrid, max_batch=4, prefix_cache=size) as server,
            ThreadPoolExecutor(3) as threads,
        ):
            found[size] = list(threads.map(lambda number: turns(server, number), (5, 50, 90)))
            total = server.engine.counts.cached_tokens
            assert total == sum(sum(counts) for _, counts in found[size])
    for (texts, counts), (expected, none) in zip(found["64MiB"], found["off"], strict=True):
        assert texts == expected
        assert counts[0] == sum(none) == 0
        assert counts[2] > counts[1] > 30
