"""An expert whose bytes cannot be read ends the requests that need it, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from moe_infinity import MoE
from moe_infinity.experts import ExpertKey, Ints
from tests.conftest import save_tokenizer
from tests.disk import Disk, Read
from tests.server.conftest import DEMO
from tests.server.driving import TOLERANCE, Client, assert_same_answer, make_engine, run_all
from tests.server.serving import serving
from tests.sweep import discover, tiny

pytestmark = pytest.mark.arithmetic


def needed(moe: MoE) -> tuple[Ints, Ints]:
    """[L, E] of the last request, which was alone: what its prompt activated, and its answer."""
    (eam,) = moe.request_eams()
    return eam.prefill.copy(), eam.decode.copy()


def needed_by_one(prompts: Sequence[Ints], answers: Sequence[Ints]) -> ExpertKey:
    """An expert that only the first answer needs; of several, in the last layer."""
    others = sum(prompts) + sum(answers[1:])
    places = np.argwhere((answers[0] > 0) & (others == 0))
    assert len(places), "take other prompts"
    layer_idx, expert_idx = places[-1]
    return ExpertKey(int(layer_idx), int(expert_idx))


def places_of(moe: MoE, moe_layer_idx: int, experts: Iterable[int]) -> set[int]:
    """Bytes of the file at which a read of these experts begins."""
    recipes = moe.engine.loader.recipes[moe_layer_idx].recipes
    extents = [each for recipe in recipes for idx in experts for each in recipe.extents(idx)]
    return {place for each in extents for place in range(each.offset, each.offset + each.num_bytes)}


# through the server

SAID = 'My mom said "No!"'
KNOWN = "Once upon a time there was a little girl who lived in a house near the big forest with her"
TEXTS = [SAID, KNOWN, "One day a dog", "The sun", SAID]
STREAMED = (3, 4)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 6, "temperature": 0, **fields}


def test_only_requests_that_need_a_broken_expert_fail(monkeypatch):
    options: dict[str, Any] = {"host_memory": "25%", "dtype": "float32"}
    alone = []
    with MoE(DEMO, **options) as moe, serving(moe, max_batch=1, prefix_cache="off") as server:
        for text in TEXTS:
            sent = body(text, logprobs=2)
            found = httpx.post(f"{server.url}/v1/completions", json=sent, timeout=60)
            (choice,) = found.json()["choices"]
            alone.append((choice["text"], *needed(moe)))
            for likeliest in choice["logprobs"]["top_logprobs"]:
                second, first = sorted(likeliest.values())[-2:]
                assert first - second > 2 * TOLERANCE, "take another prompt"
    texts, prompts, answers = zip(*alone, strict=True)
    key = needed_by_one([*prompts[:4]], [*answers[:4]])
    disk = Disk(monkeypatch)
    with MoE(DEMO, **options) as moe:
        broken = places_of(moe, key.moe_layer_idx, [key.expert_idx])
        disk.fail(lambda read: read.offset in broken)
        with (
            serving(moe, prefix_cache="16MiB") as server,
            ThreadPoolExecutor(len(TEXTS)) as threads,
        ):

            def ask(number: int) -> httpx.Response:
                sent = body(TEXTS[number], stream=number in STREAMED)
                return httpx.post(f"{server.url}/v1/completions", json=sent, timeout=60)

            for _ in range(2):  # again, from kept prefixes
                replies = list(threads.map(ask, range(len(TEXTS))))
                assert [reply.status_code for reply in replies] == [500, 200, 200, 200, 200]
                error = replies[0].json()["error"]
                assert error["message"].startswith("generation failed: CheckpointError: a file ")
                assert error["type"] == "server_error"
                for reply, text in zip(replies[1:3], texts[1:3], strict=True):
                    assert reply.json()["choices"][0]["text"] == text
                assert texts[3] == streamed(replies[3])
                assert '"error"' in replies[4].text
                server.wait_until_idle()
                server.engine.check_invariants()
                assert server.engine.state()["kv_bytes"] == 0
            assert server.engine.counts.failed == 4
            assert server.engine.counts.cached_tokens > 0
            disk.mend()
            assert ask(0).json()["choices"][0]["text"] == texts[0]


def streamed(reply: httpx.Response) -> str:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    chunks = [httpx.Response(200, text=line).json() for line in lines if line.startswith("{")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


# what a step has to take back

PROMPTS = [[7, 20, 33, 46], list(range(5, 45)), [99], list(range(60, 80))]


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "qwen3_next", "lfm2_moe")
]


@pytest.mark.parametrize("name", ["mixtral", *SLOW])
def test_a_step_that_fails_once_is_computed_again_from_where_it_began(name, tmp_path, monkeypatch):
    (architecture, *_) = discover.architectures_in(name)
    tiny.tiny_model(architecture).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    disk = Disk(monkeypatch)
    with MoE(tmp_path, host_memory="25%", dtype="float32") as moe:
        alone = make_engine(moe, max_batch=1, prefix_cache="off")
        together = make_engine(moe, max_batch=4)
        singles = [Client(alone, prompt, max_new_tokens=16) for prompt in PROMPTS]
        run_all(alone, *singles)
        clients = [Client(together, prompt, max_new_tokens=16) for prompt in PROMPTS]
        for _ in range(6):
            together.step()
        last = places_of(moe, -1, range(tiny.NUM_EXPERTS_EACH))
        is_armed = True

        def fails(read: Read) -> bool:
            nonlocal is_armed
            if read.kind != "demand" or not is_armed:
                return False
            is_armed = read.offset not in last
            return not is_armed

        disk.fail(fails)
        while not any(client.is_done for client in clients):  # one alone would end
            is_armed = together.state()["decoding"] > 1
            together.step()
        disk.mend()
        run_all(together, *clients)
        assert len(disk.failed) > 5
        for client, single in zip(clients, singles, strict=True):
            assert_same_answer(client, single)
