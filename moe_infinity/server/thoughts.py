"""How long a model may think before it answers.

A thought whose budget is used up is closed as the model itself would close it: until all of it is
written, the next token of a newline and `</think>` (gpt-oss: of the end of the analysis) is the
only one that can be chosen. Afterwards no further thought can begin.

    outside --begin--> thinking --end, by the model--------------------> outside
                       thinking --budget used up--> closing --its tokens--> outside
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor

from moe_infinity.detokenizer import UNFINISHED

NUM_RECENT = 24  # tokens in which the begin or the end of a thought is looked for
NUM_BYTES = 4  # tokens that the rest of a character may take


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """How a kind of model writes thoughts."""

    begin: str
    end: str
    closing: str  # what closes a thought for the model; a newline that is there is not repeated


class ThoughtBudget(LogitsProcessor):  # type: ignore[misc]
    """The budget of all thoughts of one answer, and how far the answer has come in it.

    What the scores forbid already, as a grammar does, is not enforced.
    """

    def __init__(
        self,
        tokenizer: Any,
        form: ThoughtForm,
        num_tokens: int,
        prompt_ids: Sequence[int],
        *,
        has_begun: bool,
        message: str = "",
    ) -> None:
        """`num_tokens`: of thoughts. `has_begun`: the prompt ends inside of a thought. `message`:
        the last words of a thought that is closed.
        """
        self._tokenizer = tokenizer
        self._form = form
        self._num_left = num_tokens
        self._num_seen = len(prompt_ids)
        self._is_thinking = has_begun
        self._recent = list(prompt_ids[-1:])  # since the thought, or what is outside of one, began
        self._closing: list[int] = []  # tokens that are still to be written
        # The second token tells a thought from what else begins with the first.
        self._begin_ids = self._ids(form.begin)[:2]
        closing = message + form.closing
        self._closing_ids = self._ids(closing)
        self._closing_ids_in_line = self._ids(closing.removeprefix("\n"))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Change scores [1, V] of the token behind ids [1, T]."""
        for token_id in input_ids[0, self._num_seen :].tolist():
            self._take(token_id)
        self._num_seen = input_ids.shape[1]
        if self._is_thinking and self._num_left <= 0 and not self._closing:
            self._begin_closing()
        if self._closing:
            only = self._closing[0]
            score = float(scores[0, only])
            if score > -math.inf:
                scores.fill_(-math.inf)
                scores[0, only] = score
        elif not self._is_thinking and self._num_left <= 0:
            self._forbid_beginning(scores)
        return scores

    def _take(self, token_id: int) -> None:
        self._recent = [*self._recent[1 - NUM_RECENT :], token_id]
        if self._closing:
            self._closing = self._closing[1:] if token_id == self._closing[0] else []
            if not self._closing:
                self._turn_if(self._form.end)
        elif self._is_thinking:
            self._turn_if(self._form.end)
            self._num_left -= self._is_thinking
        elif self._num_left > 0:
            self._turn_if(self._form.begin)

    def _turn_if(self, mark: str) -> None:
        """Begin or end a thought if the newest tokens have its mark."""
        if mark in self._text():
            self._is_thinking = not self._is_thinking
            self._recent = []

    def _begin_closing(self) -> None:
        text = self._text()
        if text.endswith(UNFINISHED) and self._num_left > -NUM_BYTES:
            return  # the rest of a character comes first
        in_line = text.endswith("\n")
        self._closing = list(self._closing_ids_in_line if in_line else self._closing_ids)

    def _forbid_beginning(self, scores: Tensor) -> None:
        *before, last = self._begin_ids
        if not before or self._recent[-1:] == before:
            scores[0, last] = -math.inf

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._recent)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
