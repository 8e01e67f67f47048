"""The parts of a message's content."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_infinity.server.fields import Body, Items


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """A refusal of a model, which is read as its text."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class ThinkingPart(Body):
    """Reasoning, in Mistral's or Anthropic's form."""

    type: Literal["thinking"]
    thinking: str | Items[TextPart]


class MediaPart(Body):
    """An image, a file or speech, in the words of several APIs. No model here can read it."""

    type: Literal[
        "image", "image_url", "input_image", "computer_screenshot", "input_audio", "audio_url",
        "video_url", "file", "input_file", "document", "container_upload",
    ]  # fmt: skip

    @property
    def text(self) -> str:
        """The words that a model is told in its place."""
        return f"[{self.type}: left out, because this model reads text only]"

    def left_out(self) -> str | None:
        return f"a part of type {self.type!r}"


Part = Annotated[TextPart | RefusalPart | ThinkingPart | MediaPart, Field(discriminator="type")]
