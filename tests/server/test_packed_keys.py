"""The server with keys and values in 8 bits: what neighbours, chunks and kept prefixes change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_infinity import MoE
from moe_infinity.prefixes.prefix_tree import BLOCK
from tests.prefixes.tiny_models import KINDS, TEXT, answer, save_tiny
from tests.server.driving import Client, answered, cached, make_engine, run_all
from tests.server.test_prompt_store import asked

pytestmark = pytest.mark.arithmetic

# Plain keys and values, windows in some layers and in all, latents, recurrent layers.
SERVED = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next")


# Of logits, where sums in another order give a number the neighbouring code; 2.8e-3 was seen.
STEP = 3e-2


def assert_near(found: Client, expected: Client) -> None:
    """The same tokens, of logprobs that are near, up to the first that is near a tie."""
    tokens = [token.chosen for output in expected.outputs for token in output.tokens]
    margins = [one[1] - other[1] for one, other in (t.alternatives[:2] for t in tokens)]
    num_sure = next((at for at, each in enumerate(margins) if each <= 2 * STEP), len(margins))
    assert found.token_ids[:num_sure] == expected.token_ids[:num_sure]
    num_near = max(num_sure, 1)  # of two tokens that are near a tie logprobs are near, too
    np.testing.assert_allclose(
        found.logprobs[:num_near], expected.logprobs[:num_near], rtol=0, atol=3 * STEP
    )


@pytest.fixture(scope="module", params=SERVED)
def folder(request, tmp_path_factory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["int8", "fp8"])
def moe(request, folder) -> Iterator[MoE]:
    with MoE(folder, host_memory="50%", dtype="float32", kv_dtype=request.param) as moe:
        yield moe
        moe.check_invariants()


@pytest.mark.sample(4)
def test_rows_that_join_and_leave_a_batch_get_what_they_get_alone(moe):
    without = make_engine(moe, max_batch=1, prefix_cache="off")
    prompts = [TEXT[:50], TEXT[30:37], TEXT[90:160]]
    lengths = (4, 12, 8)
    engine = make_engine(moe, max_batch=3, prefix_cache="off", prefill_chunk=24)
    clients = [
        Client(engine, prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    run_all(engine, *clients)
    for client, prompt, length in zip(clients, prompts, lengths, strict=True):
        assert_near(client, answered(without, prompt, max_new_tokens=length))


@pytest.mark.sample(4)
def test_a_kept_prefix_has_the_rows_that_were_computed(moe):
    if moe.model.config.model_type == "gpt_oss":
        pytest.skip("its windows are no longer than a block")
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    without = make_engine(moe, max_batch=2, prefix_cache="off")
    prompt = TEXT[: 5 * BLOCK]
    first, again = (answered(engine, prompt) for _ in range(2))
    longer = answered(engine, [*prompt, *TEXT[300:320]])
    assert cached(first) == 0
    assert cached(longer) == len(prompt)
    assert_near(again, first)
    assert_near(longer, answered(without, [*prompt, *TEXT[300:320]]))


def test_a_stored_prompt_of_another_type_is_never_used(tiny_checkpoint, tmp_path):
    prompt = TEXT[:300]
    known = {}
    for turn in range(2):
        for kv_dtype in ("auto", "int8", "fp8"):
            with MoE(tiny_checkpoint, dtype="float32", kv_dtype=kv_dtype) as moe:
                client = asked(moe, tmp_path / "store", prompt)
            known[turn, kv_dtype] = cached(client)
    assert {known[0, kv_dtype] for kv_dtype in ("auto", "int8", "fp8")} == {0}
    assert all(known[1, kv_dtype] >= 256 for kv_dtype in ("auto", "int8", "fp8"))


def test_a_cache_takes_a_quarter_of_float32s_bytes_and_the_scales(tiny_checkpoint):
    taken = {}
    for kv_dtype in ("auto", "int8"):
        with MoE(tiny_checkpoint, dtype="float32", kv_dtype=kv_dtype) as moe:
            engine = make_engine(moe, max_batch=2, prefix_cache="1MiB")
            client = Client(engine, TEXT[:64], max_new_tokens=40)
            while len(client.token_ids) < 30:
                engine.step()
            state = engine.state()
            taken[kv_dtype] = state["kv_bytes"], state["prefix_bytes"]
            width = moe.model.config.head_dim
            run_all(engine, client)
    for plain, packed in zip(taken["auto"], taken["int8"], strict=True):
        assert 0 < packed < plain
    assert taken["int8"][0] / taken["auto"][0] == (width + 4) / (4 * width)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_goes_on_from_a_file(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    with MoE(folder, dtype="float32", kv_dtype="int8") as moe:
        expected = answer(moe, TEXT[:100])
        prefix = moe.save_prefix(tmp_path / "a.prefix", TEXT[:70])
        loaded = moe.load_prefix(tmp_path / "a.prefix")
        for each in (prefix, loaded):
            found = answer(moe, TEXT[:100], prefix=each)
            torch.testing.assert_close(found.logits[0], expected.logits[0], atol=STEP, rtol=0)
        assert torch.equal(
            answer(moe, TEXT[:100], prefix=loaded).sequences,
            answer(moe, TEXT[:100], prefix=prefix).sequences,
        )
