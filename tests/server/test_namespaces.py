"""Tools in namespaces of the Responses API. So Codex offers the tools of MCP servers."""

from __future__ import annotations

from typing import Any

from moe_infinity import MoE
from moe_infinity.server.responses_body import ResponsesBody
from tests.server.serving import serving

SCHEMA = {"type": "object", "properties": {"key": {"enum": ["red", "green"]}}, "required": ["key"]}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA}


def test_tools_in_namespaces_are_functions_of_a_longer_name():
    inner = [tool("f"), {"type": "custom", "name": "g"}]
    call = {"type": "function_call", "call_id": "a", "namespace": "mcp__desk", "name": "f"}
    called = [call, {"type": "function_call_output", "call_id": "a", "output": "1"}]
    more = {"type": "additional_tools", "role": "developer", "tools": [tool("h")]}
    fields = {
        "input": [{"role": "user", "content": "hi"}, *called, more],
        "tools": [tool("f"), {"type": "namespace", "name": "mcp__desk", "tools": inner}],
    }
    body = ResponsesBody.model_validate(fields)
    chat = body.for_chat()
    names = [tool.function and tool.function.name for tool in chat.tools or ()]
    assert names == ["f", "mcp__desk__f", "h"]
    (earlier,) = chat.messages[1].for_template()["tool_calls"]
    assert earlier["function"]["name"] == "mcp__desk__f"
    plain, grouped = body.echoed_fields()["tools"]
    assert (plain["name"], [tool["name"] for tool in grouped["tools"]]) == ("f", ["f"])


def test_a_call_of_a_tool_in_a_namespace_names_both(demo: MoE):
    groups: list[Any] = [
        {"type": "namespace", "name": name, "description": "", "tools": [tool("look")]}
        for name in ("mcp__desk", "mcp__attic__")
    ]
    asked: dict[str, Any] = {"model": "demo", "input": "hi", "tools": groups, "temperature": 0}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    with serving(demo, served_name="demo") as server, server.client() as client:
        with client.responses.stream(**asked) as stream:
            events: list[Any] = list(stream)
            answer: Any = stream.get_final_response()
        (item,) = [item for item in answer.output if item.type == "function_call"]
        assert (item.namespace in ("mcp__desk", "mcp__attic__"), item.name) == (True, "look")
        kind = "response.function_call_arguments.done"
        (done,) = [event for event in events if event.type == kind]
        assert (done.name, done.arguments) == (item.name, item.arguments)
        assert [group.name for group in answer.tools] == ["mcp__desk", "mcp__attic__"]
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "red"}
        said = [{"role": "user", "content": "hi"}, item.model_dump(), result]
        again: Any = client.responses.create(**(asked | {"input": said, "tool_choice": "none"}))
        assert again.output_text
