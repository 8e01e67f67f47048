"""Conversations with images, for stock transformers and for a server."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from tests.images.files import encoded, picture
from tests.images.tiny_eyes import TIE, StockAnswer, data_url
from tests.server.serving import Serving

Part = str | Image.Image
RED = picture(1)
BLUE = picture(2)
TALL = picture(3, width=40, height=140)
NUM_NEW = 12


def said(*parts: Part, role: str = "user") -> dict[str, Any]:
    """A message of texts and images, for transformers."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]
    return {"role": role, "content": content}


def images_in(*parts: Part) -> list[Image.Image]:
    return [part for part in parts if not isinstance(part, str)]


def asked(*parts: Part, role: str = "user") -> dict[str, Any]:
    """The same for OpenAI's chat API."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(encoded(part, "PNG"))}}
        for part in parts
    ]
    return {"role": role, "content": content}


class Answered:
    """The answer of a server to messages."""

    def __init__(self, server: Serving, messages: list[Any], **options: Any) -> None:
        settings: dict[str, Any] = {"max_tokens": NUM_NEW, "temperature": 0, "logprobs": True}
        with server.client() as client:
            made = client.chat.completions.create(
                model="tiny", messages=messages, **settings | options
            )
        ids_of = server.moe.tokenizer.convert_tokens_to_ids
        listed = [choice.logprobs and choice.logprobs.content for choice in made.choices]
        self.choices = [[ids_of(token.token.strip()) for token in each or ()] for each in listed]
        self.ids = self.choices[0]
        self.logprobs = [token.logprob for token in listed[0] or ()]
        assert made.usage is not None
        details = made.usage.prompt_tokens_details
        self.num_prompt = made.usage.prompt_tokens
        self.num_cached = details.cached_tokens if details is not None else 0

    def assert_is(self, stock: StockAnswer) -> None:
        """Assert that these are the tokens of stock transformers, and their log-probabilities."""
        assert self.ids == stock.ids
        np.testing.assert_allclose(self.logprobs, stock.logprobs, atol=TIE)
