"""Embeddings as the `openai` client gets them: pooled hidden states of stock transformers."""

from __future__ import annotations

import base64
from typing import Any, get_type_hints

import httpx
import numpy as np
import openai
import pytest
import torch
from openai.types.embedding_create_params import EmbeddingCreateParams
from transformers import AutoModelForCausalLM

from tests.closeness import routing_margins
from tests.server.driving import TOLERANCE, Client, assert_same_answer, make_engine, run_all
from tests.server.serving import serving

pytestmark = pytest.mark.arithmetic

LONG = [(7 * at * at + at) % 120 + 3 for at in range(90)]
SHORT = [5, 6, 9, 100, 31]
WIDTH = 32


@pytest.fixture(scope="module")
def stock(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(moe):
    with serving(moe, max_batch=3, max_queue=8, prefill_chunk=24) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def expected(stock: Any, ids: list[int], pooling: str = "mean") -> np.ndarray:
    with torch.no_grad(), routing_margins(stock) as margins:
        hidden_Td = stock.model(torch.tensor([ids])).last_hidden_state[0]
    assert min(margins) > TOLERANCE, "take another text"
    pooled_d = hidden_Td[-1] if pooling == "last" else hidden_Td.mean(dim=0)
    return (pooled_d / pooled_d.norm()).numpy()


def words(ids: list[int]) -> str:
    return " ".join(f"w{token_id}" for token_id in ids)


def vectors(answer: Any) -> np.ndarray:
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data])


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_an_embedding_is_pooled_from_the_last_hidden_states(client, stock, pooling, encoding):
    """Over several chunks. Without a format the client asks for base64, and decodes it."""
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(
        model="tiny", input=words(LONG), extra_body={"pooling": pooling}, **options
    )
    (found,) = (each.embedding for each in answer.data)
    if encoding == "base64":
        found = np.frombuffer(base64.b64decode(found), dtype="<f4")
    assert len(found) == WIDTH
    np.testing.assert_allclose(np.linalg.norm(found), 1, atol=1e-6)
    np.testing.assert_allclose(found, expected(stock, LONG, pooling), atol=TOLERANCE)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "tiny", "embedding")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(LONG), len(LONG))
    assert answer.id.startswith("embd-")  # without an id Mistral's client raises


def test_the_poolings_differ_and_the_mean_is_the_default(client, stock):
    default = vectors(client.embeddings.create(model="tiny", input=LONG))[0]
    assert np.abs(default - expected(stock, LONG, "last")).max() > 0.01
    np.testing.assert_allclose(default, expected(stock, LONG), atol=TOLERANCE)


def test_input_may_be_texts_or_token_ids(client, stock):
    texts = [LONG, SHORT, LONG[:20]]
    rows = np.array([expected(stock, ids) for ids in texts])
    forms: list[Any] = [[words(ids) for ids in texts], texts]
    for form in forms:
        answer = client.embeddings.create(model="tiny", input=form, dimensions=WIDTH)
        np.testing.assert_allclose(vectors(answer), rows, atol=TOLERANCE)
        assert answer.usage.prompt_tokens == sum(map(len, texts))
    alone = vectors(client.embeddings.create(model="tiny", input=SHORT))
    np.testing.assert_allclose(alone[0], rows[1], atol=TOLERANCE)


def test_more_texts_than_may_wait_take_turns(client, server):
    """LangChain sends a thousand in one request, LlamaIndex a hundred."""
    texts = [words(LONG[start : start + 12]) for start in range(20)]
    assert len(texts) > server.engine.config.max_queue
    together = client.embeddings.create(model="tiny", input=texts)
    alone = [vectors(client.embeddings.create(model="tiny", input=text))[0] for text in texts]
    np.testing.assert_allclose(vectors(together), alone, atol=TOLERANCE)
    assert together.usage.prompt_tokens == 20 * 12


def test_generations_beside_it_go_on_unchanged(moe, stock):
    options: dict[str, Any] = {"max_batch": 4, "prefill_chunk": 24, "prefix_cache": "off"}
    engine = make_engine(moe, **options)
    without = [Client(engine, prompt) for prompt in (SHORT, LONG[:30])]
    run_all(engine, *without)
    engine = make_engine(moe, **options)
    beside = [Client(engine, prompt) for prompt in (SHORT, LONG[:30])]
    embedded = []
    for start in range(0, 60, 20):
        engine.step()
        ids = LONG[start : start + 30]
        embedded.append(Client(engine, ids, max_new_tokens=0, pooling="mean"))
    run_all(engine, *beside, *embedded)
    for found, alone in zip(beside, without, strict=True):
        assert_same_answer(found, alone)
    for client in embedded:
        (output,) = client.outputs
        np.testing.assert_allclose(
            output.embedding, expected(stock, client.prompt_ids), atol=TOLERANCE
        )
    assert engine.counts.generated_tokens == sum(len(client.token_ids) for client in beside)


def test_the_prefix_cache_neither_helps_nor_grows(moe, stock):
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    run_all(engine, Client(engine, LONG))
    before = engine.state()["prefix_bytes"]
    client = Client(engine, LONG, max_new_tokens=0, pooling="mean")
    run_all(engine, client)
    assert engine.state()["prefix_bytes"] == before > 0
    np.testing.assert_allclose(client.outputs[-1].embedding, expected(stock, LONG), atol=TOLERANCE)
    assert client.outputs[-1].num_cached == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"dimensions": WIDTH - 1}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["w5", ""]}, "input"),
        ({"input": [128]}, "input"),
        ({"input": [5] * 600}, "input"),
        ({"input": ["w5"] * 2049}, "input"),
        ({"input": None}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server, change, param):
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "w5"} | change, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_every_field_openai_documents_is_honoured(server):
    body = {
        "input": "w5", "model": "tiny", "dimensions": WIDTH, "encoding_format": "float", "user": "u"
    }  # fmt: skip
    assert body.keys() == get_type_hints(EmbeddingCreateParams).keys()
    assert httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).status_code == 200


def test_a_model_without_hidden_states_of_its_own_refuses(client, server, moe, monkeypatch):
    def decoder_of(give: Any) -> None:
        monkeypatch.setattr(moe.model, "get_decoder", lambda: give)

    for decoder in (moe.model, moe.model.model.layers[0]):
        decoder_of(decoder)
        with pytest.raises(openai.BadRequestError, match="hidden states") as refused:
            client.embeddings.create(model="tiny", input="w5")
        assert refused.value.code == "no_embeddings"
    monkeypatch.undo()
    assert vectors(client.embeddings.create(model="tiny", input="w5")).shape == (1, WIDTH)
    server.wait_until_idle()
    moe.check_invariants()


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.embeddings.create(model="text-embedding-3-small", input="w5")
