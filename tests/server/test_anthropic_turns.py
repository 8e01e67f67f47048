"""What the messages of Anthropic's API say beside their text: tools that come and go, instructions
for one turn, and how much to think in it.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from moe_infinity.server.anthropic_body import CountTokensBody, MessagesBody
from moe_infinity.server.fields import FieldCheck
from moe_infinity.server.refusals import Refused

SCHEMA = {"type": "object"}
ASKED = {"role": "user", "content": "w5"}
ANSWERED = {"role": "assistant", "content": "w6"}


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA}


def changed(kind: str, what: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": what}


def named(kind: str, name: str) -> dict[str, Any]:
    return changed(kind, {"type": "tool_reference", "name": name})


def defined(definition: dict[str, Any]) -> dict[str, Any]:
    return changed("addition", {"type": "tool_definition", "definition": definition})


def system(*blocks: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks)} | fields


def chat_of(*messages: Any, **fields: Any) -> Any:
    body = CountTokensBody.model_validate({"messages": list(messages)} | fields)
    FieldCheck(is_strict=False).apply(body)
    return body.for_chat()


def offered(chat: Any) -> list[str]:
    return [each["function"]["name"] for each in chat.template_tools or ()]


MCP = {"type": "mcp_toolset_reference", "server_name": "s"}


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ([named("removal", "a")], ["b"]),
        ([named("removal", "a"), named("addition", "a")], ["b", "a"]),
        ([named("addition", "a")], ["a", "b"]),
        ([defined(tool("c"))], ["a", "b", "c"]),
        ([defined(tool("c")), named("removal", "c"), named("addition", "c")], ["a", "b", "c"]),
        ([defined({"type": "bash_20250124", "name": "bash"})], ["a", "b"]),
        ([changed("addition", MCP), changed("removal", MCP)], ["a", "b"]),
        ([named("addition", "bash"), named("removal", "bash")], ["a", "b"]),
        ([named("removal", "a"), named("removal", "b")], []),
        (
            [{"type": "compaction", "content": "w7", "tool_changes": [named("removal", "a")]}],
            ["b"],
        ),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_tools_come_and_go_with_messages(role, blocks, names):
    tools = [tool("a"), tool("b"), {"type": "bash_20250124", "name": "bash"}]
    chat = chat_of(ASKED, {"role": role, "content": blocks}, ASKED, tools=tools)
    assert offered(chat) == names


def test_a_definition_takes_the_place_of_an_earlier_one():
    newer = tool("a") | {"description": "newer"}
    chat = chat_of(ASKED, system(defined(newer)), tools=[tool("a")])
    assert chat.template_tools[0]["function"]["description"] == "newer"


def test_a_message_that_only_changes_tools_is_none_of_the_prompt():
    chat = chat_of(system(named("removal", "a")), ASKED, tools=[tool("a")])
    assert [message.role for message in chat.messages] == ["user"]


def test_a_tool_without_a_schema_is_refused_with_its_place():
    with pytest.raises(Refused) as refused:
        chat_of(ASKED, system(defined({"name": "c"})))
    place = "messages.1.content.0.tool.definition.input_schema"
    assert refused.value.error.message == f"{place}: Field required"


def test_an_instruction_for_one_turn_is_gone_in_the_next():
    once = {"role": "system", "content": "w8", "clear_at": "next_user_message"}
    always = {"role": "system", "content": "w9", "clear_at": "never"}
    chat = chat_of(ASKED, once, always, ANSWERED, ASKED, once)
    texts = [message.for_template()["content"] for message in chat.messages]
    assert texts == ["w5", "w9", "w6", "w5", "w8"]


def test_the_effort_of_a_message_counts_in_its_turn():
    low = {"role": "system", "output_config": {"effort": "low"}}
    high = {"output_config": {"effort": "high"}}
    assert chat_of(ASKED, low, **high).reasoning_effort == "low"
    assert chat_of(ASKED, low, ANSWERED, ASKED, **high).reasoning_effort == "high"
    assert chat_of(ASKED, low).reasoning_effort == "low"
    assert len(chat_of(ASKED, low).messages) == 1


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_only_a_system_message_may_be_without_content(role):
    with pytest.raises(Refused) as refused:
        chat_of(ASKED, {"role": role})
    assert refused.value.error.message == "messages.1.content: Field required"


def test_thoughts_between_tools_are_left_to_the_model():
    chat = chat_of(ASKED, thinking={"type": "between_tools"})
    assert (chat.thought_budget, chat.template_hints) == (None, {})


def test_a_conversation_is_not_summarised_but_counted():
    wanted = {"compaction": {"type": "summarize"}}
    assert chat_of(ASKED, **wanted).messages
    with pytest.raises(Refused, match="no conversation is summarised here") as refused:
        MessagesBody.model_validate({"messages": [ASKED], "max_tokens": 1} | wanted).for_chat()
    assert refused.value.error.param == "compaction"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_may_be_read_without_an_answer(server, stream):
    """With max_tokens 0 Anthropic's API only fills its cache."""
    body = {"messages": [ASKED], "max_tokens": 0, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        assert "content_block_start" not in answer.text
        assert '"stop_reason":"max_tokens"' in answer.text.replace(": ", ":")
        assert "message_stop" in answer.text
    else:
        said = answer.json()
        assert (said["content"], said["stop_reason"]) == ([], "max_tokens")
        assert said["usage"]["output_tokens"] == 0
        assert said["usage"]["input_tokens"] + said["usage"]["cache_read_input_tokens"] == 2
