"""OpenAI's embeddings: the body of a request and its answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from moe_infinity.server.answers import Answer
from moe_infinity.server.prompt_outputs import Pooling
from moe_infinity.server.protocol import Body, Prompts
from moe_infinity.server.sequences import Output, Request

Encoding = Literal["float", "base64"]


class EmbeddingsBody(Body):
    """The body of /v1/embeddings."""

    input: Prompts
    model: str | None = None
    encoding_format: Encoding | None = None
    dimensions: int | None = Field(None, ge=1)
    pooling: Pooling = "mean"  # a field that OpenAI's API has not
    user: str | None = None  # for the client's own use: it has no effect


class EmbeddingsAnswer(Answer):
    """A vector of unit length for each input."""

    def __init__(
        self, requests: Sequence[Request], *, model: str, encoding: Encoding | None
    ) -> None:
        super().__init__(requests)
        self._model = model
        self._encoding = encoding
        self._vectors: list[tuple[float, ...]] = [()] * len(requests)

    def add(self, index: int, output: Output) -> None:
        super().add(index, output)
        self._vectors[index] = output.embedding

    def body(self) -> dict[str, Any]:
        """The whole answer, once all outputs are added."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(self._vectors)
        ]
        usage = {name: self.usage()[name] for name in ("prompt_tokens", "total_tokens")}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _encoded(self, vector: tuple[float, ...]) -> list[float] | str:
        if self._encoding == "base64":
            return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode()
        return list(vector)
