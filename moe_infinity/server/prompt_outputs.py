"""What passes over a prompt give beside the next token: log-probabilities of the prompt's own
tokens, and its embedding. T tokens of a chunk, V in the vocabulary, d width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from moe_infinity.errors import MoEInfinityError
from moe_infinity.server.sampling import ChosenToken, with_logprobs

Pooling = Literal["mean", "last"]
ROWS = 64  # of logits that are in float32 at a time


class NoEmbeddings(MoEInfinityError):
    """The model has no hidden states to make embeddings of."""


def prompt_logprobs(
    logits_TV: Tensor, next_ids: Sequence[int], num_alternatives: int
) -> list[ChosenToken]:
    """The tokens that follow those of a chunk, with the log-probabilities that the chunk's logits
    give them. The last chunk of a prompt has one row more than tokens follow.
    """
    tokens: list[ChosenToken] = []
    for start in range(0, len(next_ids), ROWS):
        ids = next_ids[start : start + ROWS]
        rows_TV = logits_TV[start : start + len(ids)].to(dtype=torch.float32)
        tokens += with_logprobs(ids, rows_TV.log_softmax(dim=-1), num_alternatives)
    return tokens


@contextmanager
def last_hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """Gives a list that gets, for each pass inside, what the model makes its logits of: [B, T, d].

    Raises NoEmbeddings for a model that makes them of something else.
    """
    decoder = model.get_decoder()
    if decoder is model:
        raise NoEmbeddings("this model has no hidden states of its own: there are no embeddings")
    states: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        state = getattr(output, "last_hidden_state", None)
        if state is None:
            raise NoEmbeddings("this model does not give its hidden states")
        states.append(state)

    hook = decoder.register_forward_hook(keep)
    try:
        yield states
    finally:
        hook.remove()


class Embedding:
    """The embedding of one sequence, as its chunks are computed."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._pooled_d: Tensor | None = None

    def add(self, hidden_Td: Tensor) -> None:
        """Add the last hidden states of a chunk."""
        hidden_Td = hidden_Td.to("cpu", dtype=torch.float32)
        if self._pooling == "last" or self._pooled_d is None:
            self._pooled_d = torch.zeros_like(hidden_Td[0])
        self._pooled_d += hidden_Td[-1] if self._pooling == "last" else hidden_Td.sum(dim=0)

    def unit(self) -> tuple[float, ...]:
        """It has unit length, so a mean is a sum."""
        assert self._pooled_d is not None
        return tuple(normalize(self._pooled_d, dim=0).tolist())
