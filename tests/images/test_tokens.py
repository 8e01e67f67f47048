"""The server's answers to conversations with images, against stock transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moe_infinity import MoE
from tests.images.asking import BLUE, RED, TALL, Answered, Part, asked, images_in, said
from tests.images.tiny_eyes import EYES, save_checkpoint, stock_answer
from tests.server.serving import Serving, serving

CONVERSATIONS: dict[str, tuple[Part, ...]] = {
    "image first": (RED, "w1 w2 w3"),
    "image last": ("w4 w5 w6", TALL),
    "two images": ("w7", BLUE, "w8 w9", TALL, "w10 w11"),
    "neighbours": (RED, RED, BLUE, "w12"),
    "no image": ("w13 w14 w15",),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {"max_batch": 1, "prefix_cache": "off"},
    "chunks": {"max_batch": 2, "prefill_chunk": 5, "prefix_cache": "off"},
    "prefixes": {"max_batch": 2, "prefill_chunk": 20, "prefix_cache": "16MiB"},
}
Stock = dict[str, list[int]]


@pytest.fixture(scope="module", params=EYES)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(EYES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def stock(folder: Path) -> Stock:
    return {
        name: stock_answer(folder, [said(*parts)], images_in(*parts))
        for name, parts in CONVERSATIONS.items()
    }


@pytest.fixture(scope="module")
def moe(folder: Path) -> Iterator[MoE]:
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        yield moe


@pytest.fixture(scope="module", params=OPTIONS)
def server(request: Any, moe: MoE) -> Iterator[Serving]:
    with serving(moe, prompt_store="off", **OPTIONS[request.param]) as server:
        yield server


def test_answers_have_the_tokens_of_stock_transformers(server, stock):
    for _ in range(2):  # the second time there may be prefixes
        for name, parts in CONVERSATIONS.items():
            assert Answered(server, [asked(*parts)]).ids == stock[name], name


def test_answers_in_a_batch_have_these_tokens_too(server, stock):
    def ids(parts: tuple[Part, ...]) -> list[int]:
        return Answered(server, [asked(*parts)]).ids

    with ThreadPoolExecutor(len(CONVERSATIONS)) as threads:
        assert list(threads.map(ids, CONVERSATIONS.values())) == list(stock.values())


def test_choices_of_one_prompt_share_its_images(server, stock):
    answer = Answered(server, [asked(*CONVERSATIONS["two images"])], n=2)
    assert answer.choices == [stock["two images"]] * 2


def test_a_conversation_goes_on_behind_its_images(server, folder):
    turns: list[tuple[str, tuple[Part, ...]]] = [
        ("user", ("w7", RED, "w8 w9")),
        ("assistant", ("w20 w21 w22",)),
        ("user", (BLUE, "w23")),
        ("assistant", ("w24",)),
        ("user", ("w25 w26",)),
    ]
    for end in (1, 3, 5):
        parts = [part for _, each in turns[:end] for part in each]
        messages = [said(*each, role=role) for role, each in turns[:end]]
        stock = stock_answer(folder, messages, images_in(*parts))
        asking = [asked(*each, role=role) for role, each in turns[:end]]
        assert Answered(server, asking).ids == stock
