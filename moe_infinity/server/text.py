"""Tokens to text, piece by piece: no piece ends within a character, none shows part of a stop
string.

    token ids --Detokenizer--> text as it is certain --StopStrings--> text that may be shown
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "�"  # what a tokenizer decodes part of a character to


class Detokenizer:
    """Decodes a growing list of ids. Text is certain once what follows cannot change it, so a token
    is decoded together with those before it, back to the last certain place.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # ids of the last certain piece, and those after it
        self._certain = 0  # how many of them are certain
        self._text = ""  # of those

    def add(self, token_id: int) -> str:
        """The text that became certain."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._text) or text.endswith(UNFINISHED):
            return ""
        piece = text[len(self._text) :]
        self._window = self._window[self._certain :]
        self._certain = len(self._window)
        self._text = self._decode(self._window)
        return piece

    def finish(self) -> str:
        """What is left, certain or not."""
        return self._decode(self._window)[len(self._text) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopStrings:
    """Passes text on up to the first stop string; keeps back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._kept = ""
        self.has_stopped = False

    def add(self, text: str) -> str:
        """The text that may be shown."""
        text = self._kept + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.has_stopped = True
            self._kept = ""
            return text[: min(found)]
        end = len(text) - self._num_suspicious(text)
        self._kept = text[end:]
        return text[:end]

    def finish(self) -> str:
        """No more text comes: what was kept back began no stop string."""
        kept = self._kept
        self._kept = ""
        return kept

    def _num_suspicious(self, text: str) -> int:
        """Characters at the end that a stop string begins with, the most."""
        longest = max(map(len, self._stops), default=1) - 1
        for num in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-num:]) for stop in self._stops):
                return num
        return 0
