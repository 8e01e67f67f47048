"""The functions that a chat request offers, and which of them has to be called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from moe_infinity.server.fields import KEEPS_EMPTY, Body, Items, ToolOfType, short
from moe_infinity.server.refusals import BadRequest

# Types of choices in all APIs. The others are of tools that are left out.
CHOICES = ("none", "auto", "required", "any", "function", "tool", "allowed_tools")


class FunctionName(Body):
    name: str


class FunctionChoice(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTool(Body):
    """The name of a tool, as chat or as the Responses API writes it."""

    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[AllowedTool]

    @property
    def names(self) -> set[str | None]:
        return {tool.function.name if tool.function else tool.name for tool in self.tools}


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Function(Body):
    name: str
    description: Annotated[str | None, KEEPS_EMPTY] = None
    parameters: Annotated[dict[str, Any] | None, KEEPS_EMPTY] = None
    strict: bool | None = None  # without effect: calls that are required fit the schema

    def for_template(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


class OfferedTool(ToolOfType):
    known_type = "function"
    function: Function | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_other_forms(cls, fields: Any) -> Any:
        """In the words of the Responses API and of Anthropic's a function has no object of its own,
        and some clients send such tools to this one.
        """
        if not isinstance(fields, dict) or "function" in fields or "name" not in fields:
            return fields
        names = ("name", "description", "parameters", "strict")
        function = {name: fields[name] for name in names if name in fields}
        if "input_schema" in fields:
            function["parameters"] = fields["input_schema"]
        return {"type": fields.get("type"), "function": function}


def of_known_type(choice: Any) -> Any:
    """Return a choice as it is. Raises BadRequest for a tool that is left out of the request."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in CHOICES:
        message = f"a tool of type {short(kind)} is left out here, and cannot be chosen"
        raise BadRequest(message, param="tool_choice")
    return choice


def in_words_of_chat(choice: Any) -> Any:
    """Return a choice as the chat API has it: in the words of the Responses API and of Anthropic's
    it is another object.
    """
    if not isinstance(of_known_type(choice), dict) or "function" in choice:
        return choice
    kind = choice.get("type")
    name = choice.get("name")
    if kind in ("function", "tool") and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    return kind if kind in CHOICES[:4] else choice


ToolChoice = Annotated[
    Literal["none", "auto", "required", "any"] | FunctionChoice | AllowedToolsChoice,
    BeforeValidator(in_words_of_chat),
]
