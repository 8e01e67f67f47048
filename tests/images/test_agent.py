"""An agent that sees, by the packages of OpenAI and Anthropic: a question with an image, a call
that is forced, and a result with another image. The tokens of its last answer are those of stock
transformers for the same conversation.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_infinity import MoE
from tests.images.asking import BLUE, NUM_NEW, RED
from tests.images.eyes import EYES
from tests.images.files import encoded
from tests.images.mmproj_files import save_letters
from tests.images.tiny_eyes import data_url, save_checkpoint, stock_answer
from tests.server.serving import Serving, serving

pytestmark = pytest.mark.arithmetic
TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}"
    "{% elif m['content'] %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "PLACE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n"
    '{"name": "{{ c["function"]["name"] }}", "arguments": {{ c["function"]["arguments"] | tojson }}'
    "}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
QUESTION = "Look at this, then fetch one more."
SCHEMA = {
    "type": "object",
    "properties": {"which": {"enum": ["red", "blue"]}},
    "required": ["which"],
    "additionalProperties": False,
}
RESULT = "here it is"


class Turn(NamedTuple):
    """The call that an API gave, and its text after the result."""

    name: str
    arguments: dict[str, Any]
    answer: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    eyes = EYES["qwen3_vl_moe"]
    save_checkpoint(eyes, folder, save_letters)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", eyes.place))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with (
        MoE(folder, host_memory="50%", dtype="float32") as moe,
        serving(moe, max_batch=2, prefill_chunk=40, prompt_store="off") as server,
    ):
        yield server


def chat(server: Serving, result: Any) -> Turn:
    function = {"name": "fetch", "parameters": SCHEMA}
    image = {"type": "image_url", "image_url": {"url": url_of(RED)}}
    messages: list[Any] = [
        {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]},
    ]
    settings: Any = {
        "model": "tiny", "temperature": 0, "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    with server.client() as client:
        create = client.chat.completions.create
        made = create(messages=messages, tool_choice="required", max_tokens=80, **settings)
        (call,) = made.choices[0].message.tool_calls or []
        parts: list[Any] = [{"type": "text", "text": RESULT}]
        if result is not None:
            parts.append({"type": "image_url", "image_url": {"url": url_of(result)}})
        messages.append(made.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": parts})
        done = create(messages=messages, tool_choice="none", max_tokens=NUM_NEW, **settings)
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    return Turn(call.function.name, arguments, done.choices[0].message.content or "")


def responses(server: Serving, result: Any) -> Turn:
    asked = [
        {"type": "input_image", "image_url": url_of(RED), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    items: list[Any] = [{"role": "user", "content": asked}]
    tool = {"type": "function", "name": "fetch", "parameters": SCHEMA, "strict": True}
    settings: Any = {"model": "tiny", "temperature": 0, "tools": [tool], "store": False}
    with server.client() as client:
        create = client.responses.create
        made = create(input=items, tool_choice="required", max_output_tokens=80, **settings)
        (call,) = (item for item in made.output if item.type == "function_call")
        output: list[Any] = [{"type": "input_text", "text": RESULT}]
        if result is not None:
            output.append({"type": "input_image", "image_url": url_of(result), "detail": "auto"})
        items += [item.model_dump(exclude_none=True) for item in made.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        done = create(input=items, tool_choice="none", max_output_tokens=NUM_NEW, **settings)
    return Turn(call.name, json.loads(call.arguments), done.output_text)


def messages(server: Serving, result: Any) -> Turn:
    def image(picture: Any) -> dict[str, Any]:
        data = base64.b64encode(encoded(picture, "PNG")).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {"type": "image", "source": source}

    said: list[Any] = [
        {"role": "user", "content": [image(RED), {"type": "text", "text": QUESTION}]},
    ]
    tool = {"name": "fetch", "input_schema": SCHEMA}
    greedy = {"temperature": 0}  # no argument of this package's newest versions
    settings: Any = {"model": "tiny", "tools": [tool], "extra_body": greedy}
    with server.anthropic() as client:
        create = client.messages.create
        made = create(messages=said, tool_choice={"type": "any"}, max_tokens=80, **settings)
        (call,) = (block for block in made.content if block.type == "tool_use")
        content: list[Any] = [{"type": "text", "text": RESULT}]
        content += [] if result is None else [image(result)]
        said.append({"role": "assistant", "content": [b.model_dump() for b in made.content]})
        block = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        said.append({"role": "user", "content": [block]})
        done = create(messages=said, tool_choice={"type": "none"}, max_tokens=NUM_NEW, **settings)
    text = "".join(each.text for each in done.content if each.type == "text")
    return Turn(call.name, dict(call.input), text)


def url_of(picture: Any) -> str:
    return data_url(encoded(picture, "PNG"))


def conversation(turn: Turn, result: Any) -> list[dict[str, Any]]:
    """The same for transformers."""
    function = {"name": turn.name, "arguments": turn.arguments}
    shown = [{"type": "text", "text": RESULT}] + ([{"type": "image"}] if result else [])
    return [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": shown},
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("result", [None, BLUE], ids=["text", "image"])
@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_a_turn_with_images_and_a_tool(
    ask: Callable[[Serving, Any], Turn], result: Any, server: Serving, folder: Path
) -> None:
    turn = ask(server, result)
    assert turn.name == "fetch"
    assert turn.arguments["which"] in ("red", "blue")
    pictures = [RED] if result is None else [RED, result]
    stock = stock_answer(folder, conversation(turn, result), pictures, num_new=NUM_NEW)
    tokenizer = server.moe.tokenizer
    assert turn.answer == tokenizer.decode(stock.ids, skip_special_tokens=True)
