"""Images in the texts of a conversation, until a chat template takes them as parts."""

from __future__ import annotations

import re
from secrets import token_hex
from typing import Any

from moe_infinity.server.parts import ImagePart
from moe_infinity.server.shapes import Messages


class ImageMarks:
    """A mark for each image of one conversation. No text of a client has one: marks are random.

    So whatever reshapes, joins or reorders texts moves the images, too.
    """

    def __init__(self) -> None:
        self.parts: list[ImagePart] = []
        self.order: list[ImagePart] = []  # of the images in the messages that were taken apart last
        secret = token_hex(16)
        self._form = f"\ue000{secret}:{{}}\ue001"
        self._pattern = re.compile(self._form.format(r"(\d+)"))

    def put(self, part: ImagePart) -> str:
        """Return the mark of an image that a text has next."""
        self.parts.append(part)
        return self._form.format(len(self.parts) - 1)

    def join(self, texts: list[str]) -> str:
        """Return texts, of which some are marks, with a line break between two that are not."""
        joined = ""
        for at, text in enumerate(texts):
            is_apart = at > 0 and not any(map(self._pattern.fullmatch, texts[at - 1 : at + 1]))
            joined += f"\n{text}" if is_apart else text
        return joined

    def taken_apart(self, messages: Messages) -> Messages:
        """Return messages whose contents with images are lists of parts."""
        self.order = []
        taken = []
        for message in messages:
            content = message.get("content")
            texts = [content] if isinstance(content, str) else [p["text"] for p in content or ()]
            if any(map(self._pattern.search, texts)):
                parts = [part for text in texts for part in self._parts_of(text)]
                message = message | {"content": parts}
            taken.append(message)
        return taken

    def _parts_of(self, text: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for at, piece in enumerate(self._pattern.split(text)):
            if at % 2:
                self.order.append(self.parts[int(piece)])
                parts.append({"type": "image"})
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts
