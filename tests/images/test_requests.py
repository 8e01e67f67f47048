"""Images in requests of each API, and what is refused."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moe_infinity import MoE
from moe_infinity.server import limits
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.prompts import PromptReader
from moe_infinity.server.sequences import QueueFull, Request
from moe_infinity.server.turns import SeatQueue
from tests.images.asking import RED, Answered, asked
from tests.images.eyes import EYES
from tests.images.files import bomb, encoded, picture
from tests.images.tiny_eyes import data_url, save_checkpoint
from tests.server.driving import make_engine
from tests.server.serving import Serving, serving

PNG = encoded(RED, "PNG")
BASE64 = base64.b64encode(PNG).decode()
TEXT = "w1 w2 w3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(EYES["qwen3_vl_moe"], tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "red.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, pictures: Path) -> Iterator[Serving]:
    with (
        MoE(folder, host_memory="50%", dtype="float32") as moe,
        serving(moe, allow_media=[str(pictures)], prompt_store="off") as server,
    ):
        yield server


@pytest.fixture(scope="module")
def num_tokens(server: Serving) -> int:
    """Of the prompt with the red image and the text."""
    return Answered(server, [asked(RED, TEXT)], max_tokens=1).num_prompt


def post(server: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", json=body, timeout=60)


def of_user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "low"}},
        {"type": "image_url", "image_url": data_url(PNG)},
        {"type": "input_image", "image_url": data_url(PNG)},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        {"type": "image", "data": BASE64, "mimeType": "image/png"},
        {"type": "image", "image": data_url(PNG)},
        {"type": "image", "image": BASE64, "mediaType": "image/png"},
        {"type": "image", "image": {"url": data_url(PNG)}},
        {"type": "image", "source": {"type": "url", "url": data_url(PNG)}},
        {"type": "image", "source": {"type": "base64", "data": data_url(PNG)}},
    ],
)
def test_an_image_has_the_same_tokens_in_each_form(server, num_tokens, part):
    answer = post(server, "v1/chat/completions", {"messages": of_user(part), "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "file_id": "file-1"},
        {"type": "image", "source": {"type": "file", "file_id": "file-1"}},
    ],
)
def test_an_uploaded_file_is_refused_by_its_field(server, part):
    answer = post(server, "v1/chat/completions", {"messages": of_user(part), "max_tokens": 1})
    assert answer.status_code == 400
    assert "image 0: file_id: this server keeps no files" in answer.json()["error"]["message"]


def test_responses_and_messages_and_ollama_take_images(server, num_tokens):
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    asked_last = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    messages = {"messages": [{"role": "user", "content": asked_last}], "max_tokens": 1}
    answer = post(server, "v1/messages", messages).json()
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    counted = post(server, "v1/messages/count_tokens", messages).json()
    assert counted["input_tokens"] == num_tokens
    parts = [
        {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"},
        {"type": "input_text", "text": TEXT},
    ]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 1}
    assert post(server, "v1/responses", body).json()["usage"]["input_tokens"] == num_tokens
    said = {"role": "user", "content": TEXT, "images": [BASE64]}
    body = {"messages": [said], "stream": False, "options": {"num_predict": 1}}
    assert post(server, "api/chat", body).json()["prompt_eval_count"] == num_tokens
    body = {"prompt": TEXT, "images": [BASE64], "stream": False, "options": {"num_predict": 1}}
    assert post(server, "api/generate", body).json()["prompt_eval_count"] == num_tokens


def test_what_a_tool_gives_may_have_an_image(server):
    """Several results come in the order of their calls, and their images with them."""
    other = picture(9)
    calls = [
        {"id": each, "type": "function", "function": {"name": "fetch", "arguments": "{}"}}
        for each in "ab"
    ]
    begun = [{"role": "user", "content": TEXT}, {"role": "assistant", "tool_calls": calls}]
    results = [asked(image, role="tool") for image in (RED, other)]
    ids = [result | {"tool_call_id": each} for result, each in zip(results, "ab", strict=True)]
    in_order = Answered(server, [*begun, *ids])
    assert Answered(server, [*begun, *reversed(ids)]).ids == in_order.ids
    swapped = [results[1] | {"tool_call_id": "a"}, results[0] | {"tool_call_id": "b"}]
    assert Answered(server, [*begun, *swapped]).ids != in_order.ids


def test_a_path_is_read_where_a_rule_names_its_folder(server, pictures, num_tokens):
    part = {"type": "image_url", "image_url": {"url": f"file://{pictures}/red.png"}}
    answer = post(server, "v1/chat/completions", {"messages": of_user(part), "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (data_url(b"no image"), "image 0: this is no image"),
        (data_url(PNG[:100]), "image 0: this is no image"),
        (data_url(bomb(5000, 5000)), "at most 16,777,216 are read"),
        (data_url(encoded(picture(1, 3200, 10), "PNG")), "processor does not take this"),
        ("https://images.example/a.png", "image 0: --allow-media"),
        ("/etc/passwd", "image 0: this file is not in a folder"),
        ("a.png", "image 0: expected a data URL"),
        (None, "image 0: there is no URL"),
    ],
)
def test_an_image_that_cannot_be_read_is_a_400_that_names_the_field(server, url, said):
    part = {"type": "image_url", "image_url": {"url": url}}
    chat = post(server, "v1/chat/completions", {"messages": of_user(part)})
    error = chat.json()["error"]
    assert (chat.status_code, error["param"]) == (400, "messages")
    assert said in error["message"]
    response = post(server, "v1/responses", {"input": of_user(part)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


def test_the_images_of_a_request_are_bounded(server, monkeypatch):
    part = {"type": "image_url", "image_url": data_url(PNG)}
    body = {"messages": of_user(*[part] * (limits.IMAGES.most + 1))}
    answer = post(server, "v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_large")
    large = {"type": "image_url", "image_url": data_url(encoded(picture(1, 4096, 4096), "PNG"))}
    answer = post(server, "v1/chat/completions", {"messages": of_user(*[large] * 3)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_large")
    assert "pixels" in answer.json()["error"]["message"]


def test_a_text_cannot_stand_for_an_image(server):
    part = {"type": "image_url", "image_url": data_url(PNG)}
    messages = of_user({"type": "text", "text": "w4 <|image_pad|> w5"}, part)
    answer = post(server, "v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400
    assert "stands for an image" in answer.json()["error"]["message"]


def test_audio_is_refused_by_a_model_with_eyes(server):
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    answer = post(server, "v1/chat/completions", {"messages": of_user(part)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_with_none_no_image_is_taken(server):
    with serving(server.moe, allow_media=["none"]) as closed:
        part = {"type": "image_url", "image_url": data_url(PNG)}
        answer = post(closed, "v1/chat/completions", {"messages": of_user(part)})
    assert answer.status_code == 400
    assert "--allow-media none" in answer.json()["error"]["message"]


def test_without_pillow_the_refusal_says_what_to_install(folder, monkeypatch):
    part = {"type": "image_url", "image_url": data_url(PNG)}
    with MoE(folder, host_memory="50%", dtype="float32") as moe, serving(moe) as server:
        monkeypatch.setitem(sys.modules, "PIL", None)
        answer = post(server, "v1/chat/completions", {"messages": of_user(part)})
    assert answer.status_code == 400
    assert "pip install 'moe-infinity[images]'" in answer.json()["error"]["message"]


def test_a_processor_that_is_damaged_is_a_400_without_a_path(folder, tmp_path, caplog):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text("[")
    part = {"type": "image_url", "image_url": data_url(PNG)}
    with MoE(tmp_path, host_memory="50%", dtype="float32") as moe, serving(moe) as server:
        answer = post(server, "v1/chat/completions", {"messages": of_user(part)})
    assert answer.status_code == 400
    assert "processor cannot be loaded" in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text
    assert "no usable processor" in caplog.text


def test_a_template_that_only_the_processor_has_is_used(folder, tmp_path, num_tokens):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    part = {"type": "image_url", "image_url": data_url(PNG)}
    with MoE(tmp_path, host_memory="50%", dtype="float32") as moe:
        assert moe.tokenizer.chat_template is None
        with serving(moe) as server:
            body = {"messages": of_user(part), "max_tokens": 1}
            answer = post(server, "v1/chat/completions", body)
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens


def test_images_that_wait_have_a_limit(server, monkeypatch):
    """A request alone is taken, however large its images are."""
    reader = PromptReader(server.moe, ServeConfig())
    body = ChatBody.model_validate({"messages": [asked(RED, TEXT)], "n": 2})
    first, second = reader.chat(body)
    assert first.images is second.images
    assert first.images is not None
    queue = SeatQueue(9)
    monkeypatch.setattr(limits, "QUEUED_IMAGES", replace(limits.QUEUED_IMAGES, most=1))
    queue.add([waiting(first), waiting(second)])
    with pytest.raises(QueueFull, match="large images are waiting"):
        queue.add([waiting(reader.chat(body)[0])])
    queue.add([waiting(Request(prompt_ids=[1], max_new_tokens=1))])
    most = first.images.num_bytes
    monkeypatch.setattr(limits, "QUEUED_IMAGES", replace(limits.QUEUED_IMAGES, most=2 * most))
    queue.add([waiting(reader.chat(body)[0])])


def waiting(request: Request) -> Any:
    return SimpleNamespace(request=request, ids=list(request.prompt_ids))


def test_tensors_are_freed_when_all_choices_have_read_them(server):
    reader = PromptReader(server.moe, ServeConfig())
    body = ChatBody.model_validate({"messages": [asked(RED, TEXT)], "n": 2, "max_tokens": 3})
    requests = reader.chat(body)
    engine = make_engine(server.moe, prefix_cache="off")
    sizes = []
    for request in requests:
        outputs: list[Any] = []
        engine.submit([engine.running(request, outputs.append)])
        while not (outputs and outputs[-1].is_last):
            engine.step()
        assert outputs[-1].error is None
        assert request.images is not None
        sizes.append(request.images.num_bytes)
    assert sizes[0] > sizes[1] == 0
