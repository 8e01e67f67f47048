"""Prompts that are echoed with the log-probabilities that stock transformers gives them."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_infinity import MoE
from moe_infinity.prefixes.prefix_tree import BLOCK
from moe_infinity.server import sampling
from moe_infinity.server.sampling import Sampling, with_logprobs
from tests.closeness import routing_margins
from tests.conftest import SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer
from tests.server.driving import TOLERANCE, Client, generated, make_engine, run_all
from tests.server.serving import serving
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

pytestmark = pytest.mark.arithmetic

LONG = [(7 * at * at + at) % 120 + 3 for at in range(90)]
SHORT = [5, 6, 9, 100, 31]
CHUNK = 24
NAMES = [*SPECIAL_TOKENS, *(f"w{token_id}" for token_id in range(3, VOCAB_SIZE))]
ASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "echo": True, "logprobs": 3}


@pytest.fixture(scope="module")
def stock(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(moe):
    with serving(moe, max_batch=3, prefill_chunk=CHUNK, prefix_cache="64MiB") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def stock_logprobs(stock: Any, ids: list[int]) -> Tensor:
    """[T, V]: row t is of the token after token t."""
    with torch.no_grad():
        logprobs: Tensor = stock(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    return logprobs


def words(ids: list[int]) -> list[str]:
    return [NAMES[token_id] for token_id in ids]


def assert_scored(logprobs: Any, ids: list[int], expected_TV: Tensor) -> None:
    """The entries of OpenAI's form are those of these tokens."""
    num = len(ids)
    assert logprobs.tokens[:num] == words(ids)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    own = expected_TV[range(num - 1), ids[1:]]
    np.testing.assert_allclose(logprobs.token_logprobs[1:num], own, atol=TOLERANCE)
    # The chosen token is there, too, if it is not one of the three.
    best = [sorted(top.values(), reverse=True)[:3] for top in logprobs.top_logprobs[1:num]]
    likeliest = expected_TV[: num - 1].topk(3).values.tolist()
    np.testing.assert_allclose(best, likeliest, atol=TOLERANCE)
    for row, top in enumerate(logprobs.top_logprobs[1:num]):
        named = expected_TV[row, [NAMES.index(name) for name in top]]
        np.testing.assert_allclose(list(top.values()), named, atol=TOLERANCE)


def test_a_prompt_has_the_logprobs_of_a_stock_forward_pass(client, server, stock):
    """Over several chunks, in each form of prompt, without generating and with the text whole."""
    with routing_margins(stock) as margins:
        expected_TV = stock_logprobs(stock, LONG)
    assert min(margins) > TOLERANCE, "take another prompt"
    before = server.engine.counts.generated_tokens
    for prompt in (LONG, " ".join(words(LONG)), [LONG]):
        answer = client.completions.create(prompt=prompt, max_tokens=0, **ASK)
        (choice,) = answer.choices
        assert_scored(choice.logprobs, LONG, expected_TV)
        assert choice.text == " ".join(words(LONG))
        assert choice.finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(LONG), 0)
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text[offset:].strip().startswith(token)
    assert server.engine.counts.generated_tokens == before


def test_another_models_logprobs_fail_the_comparison(client, stock):
    answer = client.completions.create(prompt=LONG, max_tokens=0, **ASK)
    with pytest.raises(AssertionError):
        assert_scored(answer.choices[0].logprobs, LONG, stock_logprobs(stock, LONG[::-1]))


def test_an_answer_continues_its_prompt(client, moe, stock):
    expected = generated(moe, SHORT)
    answer = client.completions.create(prompt=SHORT, max_tokens=12, **ASK)
    (choice,) = answer.choices
    assert choice.text == " ".join(words(SHORT + expected))
    assert_scored(choice.logprobs, SHORT + expected, stock_logprobs(stock, SHORT + expected))
    assert answer.usage.completion_tokens == 12
    stream = client.completions.create(prompt=SHORT, max_tokens=12, stream=True, **ASK)
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == choice.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(each.logprobs, name) for each in choices if each.logprobs]
        assert [entry for part in parts for entry in part] == getattr(choice.logprobs, name)


def test_the_end_token_has_an_entry_too(client):
    """`lm_eval` asks for one token and leaves out the last entry, whatever it is."""
    answer = client.completions.create(prompt=SHORT, max_tokens=1, logit_bias={"1": 100}, **ASK)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.text == " ".join(words(SHORT))
    assert choice.logprobs.tokens == [*words(SHORT), "<eos>"]


def test_prompts_in_one_request_keep_their_scores(client, stock):
    prompts = [LONG, SHORT, [77], LONG[40:]]
    answer = client.completions.create(prompt=prompts, max_tokens=1, **ASK)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert_scored(choice.logprobs, prompt, stock_logprobs(stock, prompt))
        assert len(choice.logprobs.tokens) == len(prompt) + 1


def test_a_known_prefix_does_not_lose_its_logprobs(client, stock):
    """Such a request computes its prompt anew; one without log-probabilities does not."""
    plain = {"model": "tiny", "temperature": 0, "max_tokens": 1, "prompt": LONG}
    cached = []
    for more in ({}, {"echo": True}, ASK, {"logprobs": 1}):
        answer = client.completions.create(**(plain | more))
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        if "echo" in more:
            assert answer.choices[0].text.startswith(" ".join(words(LONG)))
        if more is ASK:
            assert_scored(answer.choices[0].logprobs, LONG, stock_logprobs(stock, LONG))
    whole = len(LONG) // BLOCK * BLOCK
    assert cached[1:] == [whole, 0, whole]


@pytest.mark.parametrize("max_batch", [1, 2])
def test_logits_of_a_prompt_are_never_all_in_memory(moe, monkeypatch, max_batch):
    engine = make_engine(moe, max_batch=max_batch, prefill_chunk=CHUNK)
    computed, scored = [], []
    logits = engine._passes._logits

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        computed.append(logits(*args, **kwargs))
        return computed[-1]

    def watched_rows(ids: Any, logprobs_TV: Tensor, *args: Any) -> Any:
        scored.append(len(logprobs_TV))
        return with_logprobs(ids, logprobs_TV, *args)

    monkeypatch.setattr(engine._passes, "_logits", watched)
    monkeypatch.setattr(sampling, "with_logprobs", watched_rows)
    monkeypatch.setattr(sampling, "ROWS", 10)
    client = Client(engine, LONG, echo=True, max_new_tokens=0)
    run_all(engine, client)
    assert client.token_ids == LONG
    assert [x.shape[1] for x in computed] == [CHUNK, CHUNK, CHUNK, len(LONG) - 3 * CHUNK]
    assert max(scored) == 10
    assert sum(scored) == len(LONG) - 1


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_next"])
def test_caches_of_all_kinds(name, tmp_path):
    model = tiny.tiny_model(architectures_in(name)[0])
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    ids = LONG[:60]
    stock = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    expected_TV = stock_logprobs(stock, ids)
    with MoE(tmp_path, dtype="float32") as moe:
        engine = make_engine(moe, max_batch=1, prefill_chunk=CHUNK)
        wishes = {"echo": True, "max_new_tokens": 0, "sampling": Sampling(num_logprobs=1)}
        client = Client(engine, ids, **wishes)
        run_all(engine, client)
    assert client.error is None
    expected = expected_TV[range(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(client.logprobs, expected, atol=TOLERANCE)


def test_characters_of_several_tokens_are_echoed_whole(demo):
    text = "être «ça» – naïve 你好 🙂 ő"
    with serving(demo, served_name="demo") as server, server.client() as client:
        answer = client.completions.create(
            model="demo", prompt=text, echo=True, logprobs=0, max_tokens=0
        )
    (choice,) = answer.choices
    assert choice.text == text
    assert choice.logprobs is not None
    offsets = choice.logprobs.text_offset or []
    assert len(offsets) == len(demo.tokenizer(text)["input_ids"]) > len(text.split())
    assert offsets == sorted(offsets)


def test_zero_tokens_are_for_who_wants_the_prompt_read(client, server):
    answer = client.completions.create(model="tiny", prompt="w5", max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 0
    body = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
