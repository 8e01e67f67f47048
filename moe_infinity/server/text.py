"""Tokens to text, piece by piece. A piece ends with a whole character and shows no stop string.

token ids --Detokenizer--> certain text --StopStrings--> text that may be shown
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "�"  # what a tokenizer decodes part of a character to


class Detokenizer:
    """Decodes token ids one by one, into the text that a decoding of all of them gives.

    Text is certain once later tokens cannot change it. Each token is decoded together with those
    since the last certain piece.
    """

    def __init__(self, tokenizer: Any, *, has_special: bool = False) -> None:
        """`has_special`: the text of special tokens is part of the text."""
        self._tokenizer = tokenizer
        self._has_special = has_special
        self._window: list[int] = []  # ids of the last certain piece and after it
        self._certain = 0  # how many of these ids are certain
        self._text = ""  # of the certain ids

    def add(self, token_id: int) -> str:
        """Add a token. Returns the text that became certain, which may be empty."""
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
        """The text that is left when no more tokens come."""
        return self._decode(self._window)[len(self._text) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=not self._has_special,
            clean_up_tokenization_spaces=False,
        )
        return text


class StopStrings:
    """Passes text on up to the first stop string. Keeps back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._kept = ""
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str) -> str:
        """Add text. Returns the text that may be shown."""
        text = self._kept + text
        places = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if places:
            at, self.found = min(places)
            self._kept = ""
            return text[:at]
        end = len(text) - self._num_suspicious(text)
        self._kept = text[end:]
        return text[:end]

    def finish(self) -> str:
        """The text kept back, when no more text comes."""
        kept = self._kept
        self._kept = ""
        return kept

    def _num_suspicious(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for num in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-num:]) for stop in self._stops):
                return num
        return 0
