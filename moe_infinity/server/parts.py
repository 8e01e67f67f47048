"""The parts of a message's content."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from moe_infinity.server.fields import Body, Items, short


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """A refusal of a model, which is read as its text."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class ThinkingPart(Body):
    """Reasoning, in the forms of Mistral, Anthropic, LangChain and the AI SDK."""

    type: Literal["thinking", "reasoning"]
    thinking: str | Items[TextPart] = Field(
        "", validation_alias=AliasChoices("thinking", "reasoning", "text")
    )


class MediaPart(Body):
    """An image, a file, speech, or anything else that no model here can read."""

    type: str

    @property
    def text(self) -> str:
        """The words that a model is told in its place."""
        return f"[{self.type}: left out, because this model reads text only]"

    def left_out(self) -> str | None:
        return f"a part of type {short(self.type)}"


def with_type(part: Any) -> Any:
    """Return a text without a type as a part: LangChain mixes such texts with parts."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    is_text = isinstance(part, dict) and "text" in part and not part.get("type")
    return part | {"type": "text"} if is_text else part


def kind_of(part: Any) -> str:
    """Return the tag of a part in Part."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return KINDS.get(kind, "media") if isinstance(kind, str) else "media"


KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "reasoning": "thinking",
}
Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[ThinkingPart, Tag("thinking")]
    | Annotated[MediaPart, Tag("media")],
    Discriminator(kind_of),
    BeforeValidator(with_type),
]
