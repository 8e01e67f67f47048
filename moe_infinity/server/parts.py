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
    """Reasoning, in the forms of Mistral, Anthropic, LangChain and the AI SDK. What another server
    has redacted is empty.
    """

    type: Literal["thinking", "reasoning", "redacted_thinking"]
    data: Any = None  # of what is redacted, without effect
    thinking: str | Items[TextPart] = Field(
        "", validation_alias=AliasChoices("thinking", "reasoning", "text")
    )


class MediaPart(Body):
    """A file, speech, or anything else that no model here can read."""

    type: str

    @property
    def text(self) -> str:
        """The words that a model is told in its place."""
        return f"[{self.type}: left out, because this model reads text only]"

    def left_out(self) -> str | None:
        return f"a part of type {short(self.type)}"


class ImagePart(MediaPart):
    """An image, in the forms of OpenAI, Anthropic, the AI SDK and MCP."""

    type: Literal["image_url", "input_image", "image"]
    image_url: Any = None
    source: Any = None
    image: Any = None
    data: Any = None
    file_id: Any = None
    mime_type: Any = Field(None, alias="mimeType")  # without effect: the data say what they are
    detail: Any = None  # without effect: the model's processor decides
    cache_control: Any = None

    def left_out(self) -> str | None:
        return None

    @property
    def url(self) -> str | None:
        """Return the URL, a data URL for an image that is in the request; None if it has neither,
        or not as a string.
        """
        source = self.source if isinstance(self.source, dict) else {}
        data = source.get("data") or self.data
        if isinstance(data, str):
            is_url = data.lstrip()[:5].lower() == "data:"
            return data if is_url else f"data:;base64,{data}"
        places = (_url_in(self.image_url), source.get("url"), _url_in(self.image))
        return next((place for place in places if place and isinstance(place, str)), None)

    @property
    def is_uploaded(self) -> bool:
        """Return True if it names a file that a client has uploaded."""
        source = self.source if isinstance(self.source, dict) else {}
        return bool(self.file_id or source.get("file_id"))


def _url_in(value: Any) -> Any:
    """Return the URL where it is one, or in an object."""
    return value.get("url") if isinstance(value, dict) else value


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
    "redacted_thinking": "thinking",
    "image_url": "image",
    "input_image": "image",
    "image": "image",
}
Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[ThinkingPart, Tag("thinking")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[MediaPart, Tag("media")],
    Discriminator(kind_of),
    BeforeValidator(with_type),
]
