"""The server's answers to conversations with images, against stock transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import ConfigError, MoE
from moe_infinity.images.question import question
from tests.images.asking import BLUE, RED, TALL, Answered, Part, asked, images_in, said
from tests.images.eyes import EYES, Eyes
from tests.images.files import encoded
from tests.images.tiny_eyes import TIE, StockAnswer, processor_of, save_checkpoint, stock_answer
from tests.server.serving import Serving, serving

pytestmark = [
    pytest.mark.arithmetic,
    # transformers' processors of GLM-4V and ERNIE, with numpy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
# M-RoPE, and a model whose images are not told apart.
FAST = ("qwen3_vl_moe", "aria")
FAMILIES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name) for name in EYES
]
CONVERSATIONS: dict[str, tuple[Part, ...]] = {
    "image first": (RED, "w1 w2 w3"),
    "image last": ("w4 w5 w6", TALL),
    "two images": ("w7", BLUE, "w8 w9", TALL, "w10 w11"),
    "neighbours": (RED, RED, BLUE, "w12"),
    "no image": ("w13 w14 w15",),
}
ALONE: dict[str, Any] = {"max_batch": 1, "prefix_cache": "off"}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": ALONE,
    "chunks": {"max_batch": 2, "prefill_chunk": 5, "prefix_cache": "off"},
    "prefixes": {"max_batch": 2, "prefill_chunk": 20, "prefix_cache": "16MiB"},
}
Stock = dict[str, StockAnswer]


@pytest.fixture(scope="module", params=FAMILIES)
def eyes(request: Any) -> Eyes:
    return EYES[request.param]


@pytest.fixture(scope="module")
def folder(eyes: Eyes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(eyes, tmp_path_factory.mktemp(eyes.folder))
    try:
        processor_of(folder)
    except ConfigError as error:  # as of Gemma 4 in transformers 5.17
        pytest.skip(str(error))
    return folder


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
def server(request: Any, moe: MoE, eyes: Eyes) -> Iterator[Serving]:
    options = OPTIONS[request.param] | ({} if eyes.is_batched else ALONE)
    with serving(moe, prompt_store="off", **options) as server:
        yield server


@pytest.mark.sample(3)
def test_answers_have_the_tokens_of_stock_transformers(server, stock):
    for _ in range(2):  # the second time there may be prefixes
        for name, parts in CONVERSATIONS.items():
            Answered(server, [asked(*parts)]).assert_is(stock[name])


def test_the_logits_depend_on_the_image(folder, stock):
    other = stock_answer(folder, [said(BLUE, "w1 w2 w3")], [BLUE], num_new=1)
    assert abs(other.logprobs[0] - stock["image first"].logprobs[0]) > 20 * TIE


@pytest.mark.sample(3)
def test_answers_in_a_batch_have_these_tokens_too(server, stock):
    def answered(parts: tuple[Part, ...]) -> Answered:
        return Answered(server, [asked(*parts)])

    with ThreadPoolExecutor(len(CONVERSATIONS)) as threads:
        answers = list(threads.map(answered, CONVERSATIONS.values()))
    for answer, wanted in zip(answers, stock.values(), strict=True):
        answer.assert_is(wanted)


@pytest.mark.sample(3)
def test_choices_of_one_prompt_share_its_images(server, stock):
    answer = Answered(server, [asked(*CONVERSATIONS["two images"])], n=2)
    assert answer.choices == [stock["two images"].ids] * 2


def test_a_model_in_bfloat16_takes_images(folder, tmp_path):
    """Processors make numbers of other types than the model's, and some models cast none."""
    file = tmp_path / "red.png"
    file.write_bytes(encoded(RED, "PNG"))
    wanted = stock_answer(folder, [said(RED, "w1 w2")], [RED], num_new=2, dtype=torch.bfloat16)
    with MoE(folder, host_memory="50%", dtype="bfloat16", exact=True) as moe:
        inputs = question(moe, "w1 w2", [file])
        out = moe.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == wanted.ids


@pytest.mark.sample(3)
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
        Answered(server, asking).assert_is(stock)
