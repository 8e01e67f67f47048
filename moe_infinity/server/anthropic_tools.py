"""The tools of a request of Anthropic's Messages API, and how messages change them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from moe_infinity.server.fields import KEEPS_EMPTY, Body, ToolOfType, refused_field, short

CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, in words of the chat API

Path = tuple[str, ...]  # names and positions that lead to a part of a body


class Cacheable(Body):
    cache_control: Any = None  # without effect: prefixes are kept in any case


class ClientTool(ToolOfType, Cacheable):
    """A tool. All but custom ones are tools of Anthropic's own."""

    known_type = "custom"
    name: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, KEEPS_EMPTY] = None
    strict: bool | None = None  # without effect: calls that are required fit the schema

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.input_schema}}

    def known_name(self, path: Path) -> str | None:
        """The name; None for a tool that is left out. Raises Refused if something is missing."""
        if self.left_out() is not None:
            return None
        for field in ("name", "input_schema"):
            if getattr(self, field) is None:
                raise refused_field((*path, field), "Field required")
        return self.name


class ToolReference(Body):
    """A tool of the request, or one that an earlier message defines."""

    type: Literal["tool_reference"]
    name: str


class ToolDefinition(Body):
    type: Literal["tool_definition"]
    definition: ClientTool


class OtherReference(Body):
    """A tool of a server that Anthropic's own servers would ask."""

    type: str

    def left_out(self) -> str | None:
        return f"a tool of type {short(self.type)}"


def kind_of(tool: Any) -> str:
    """The tag of a tool in ToolChange."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("tool_reference", "tool_definition") else "other"


class ToolChange(Cacheable):
    """A block of a message from which on a tool is offered, or no longer is."""

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[
        Annotated[ToolReference, Tag("tool_reference")]
        | Annotated[ToolDefinition, Tag("tool_definition")]
        | Annotated[OtherReference, Tag("other")],
        Discriminator(kind_of),
    ]


def offered_at_the_end(
    tools: Iterable[tuple[Path, ClientTool]], changes: Iterable[tuple[Path, ToolChange]]
) -> list[ClientTool]:
    """The tools of a request after what its messages change; each comes with its path. A template
    shows one list of tools. Raises Refused.
    """
    known = {name: tool for path, tool in tools if (name := tool.known_name(path)) is not None}
    offered = dict(known)
    for path, change in changes:
        tool = change.tool
        if isinstance(tool, OtherReference):
            continue
        if isinstance(tool, ToolDefinition):
            name = tool.definition.known_name((*path, "tool", "definition"))
            if name is None:
                continue
            known[name] = tool.definition
        else:
            name = tool.name
        if change.type == "tool_removal":
            offered.pop(name, None)
        elif name in known:  # a reference may be to a tool that was left out
            offered[name] = known[name]
    return list(offered.values())


class ToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Any:
        return CHOICES[self.type]


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Any:
        return {"type": "function", "function": {"name": self.name}}
