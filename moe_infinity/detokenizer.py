"""Text of token ids that come one by one.

Together the pieces are what the tokenizer decodes all the ids to, each once: no piece is taken
back. Time is linear in the number of tokens, because only a few of the last ones are decoded again.

    ids:   [ certain and left behind | anchor | new ]      decoded together: anchor and new
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

UNFINISHED = "�"  # what a tokenizer decodes part of a character to
MOST_UNFINISHED = 3  # bytes of a character that is not complete, each decoded to one of these
MOST_HELD = 64  # tokens whose text is not certain; after so many it is taken as it is
SPLIT_AFTER = 16  # tokens without a whole character, as in a run of stray bytes
BYTE = re.compile("<0x[0-9A-F]{2}>")  # what tokenizers with a fallback to bytes call a byte
# Where no replacement of transformers' clean_up_tokenization() can reach across: before a word
# that follows another character, and behind four characters without a space.
CLEAN_CUT = re.compile(r"(?<=[^ '])(?= [^ .?!,'])|(?<=[^ ]{4})")


class Detokenizer:
    """Decodes token ids one by one. Text is certain once later tokens cannot change it.

    Each token is decoded together with the last certain piece before it, because many decoders
    treat the first token of a text differently.
    """

    def __init__(
        self, tokenizer: Any, *, has_special: bool = False, hidden_ids: Collection[int] = ()
    ) -> None:
        """`has_special`: the text of special tokens is part of the text. `hidden_ids`: tokens whose
        text is not.
        """
        self._tokenizer = tokenizer
        self._has_special = has_special
        self._hidden_ids = hidden_ids
        self._cleaned = Cleaned(tokenizer.clean_up_tokenization) if cleans_up(tokenizer) else None
        self._window: list[int] = []  # the anchor and the ids after it
        self._anchor = 0  # how many ids of the window are in it
        self._text = ""  # of the window
        self._given = 0  # how many characters of it are certain

    def add(self, token_id: int) -> str:
        """Add a token. Returns the text that became certain, which may be empty."""
        if token_id in self._hidden_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text and self._is_skipped(token_id):
            # Within a character it may decide whether the parts around it are one.
            if self._given == len(text) or len(self._window) > MOST_HELD:
                self._window.pop()
            return ""
        self._text = text
        before = self._given
        self._given = max(before, self._certain_end(token_id))
        piece = text[before : self._given]
        self._leave_behind()
        return piece if self._cleaned is None else self._cleaned.add(piece)

    @property
    def held(self) -> str:
        """The text after the certain one, if no more tokens come."""
        held = self._text[self._given :]
        return held if self._cleaned is None else self._cleaned.rest(held)

    def _certain_end(self, token_id: int) -> int:
        """Return how many characters of the window's text no later token can change."""
        if len(self._window) - self._anchor > MOST_HELD:
            return len(self._text)
        if self._is_byte(token_id):  # a later one may make all of a run of bytes invalid
            return 0
        whole = self._text.rstrip(UNFINISHED)
        return max(len(whole), len(self._text) - MOST_UNFINISHED)

    def _leave_behind(self) -> None:
        """Shorten the window where its text can be split."""
        if self._given == len(self._text) > 0:
            tail = self._window[self._anchor :]
            text = self._decode(tail)
            # An anchor of spaces might not be all that a decoder strips from the beginning.
            if text.strip() or len(self._window) > MOST_HELD:
                self._window = tail
                self._text = text
                self._given = len(text)
            self._anchor = len(self._window)
        elif len(self._window) > SPLIT_AFTER:
            self._split_unfinished()

    def _split_unfinished(self) -> None:
        """Shorten a window that does not end with a whole character."""
        for num_kept in range(MOST_UNFINISHED + 1, 2 * MOST_UNFINISHED + 2):
            left = self._decode(self._window[:-num_kept])
            right = self._decode(self._window[-num_kept:])
            if left + right == self._text and len(left) <= self._given:
                self._window = self._window[-num_kept:]
                self._anchor = 0
                self._text = right
                self._given -= len(left)
                return

    def _is_byte(self, token_id: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        is_byte = isinstance(name, str) and BYTE.fullmatch(name) is not None
        return is_byte and self._decode([token_id]) != name

    def _is_skipped(self, token_id: int) -> bool:
        """Return True for a special token that is not part of the text."""
        if self._has_special or self._decode([token_id]):
            return False
        return bool(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=not self._has_special,
            clean_up_tokenization_spaces=False,
        )
        return text


class Cleaned:
    """Removes spaces from pieces of a text as `clean` does from the whole."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._kept = ""

    def add(self, piece: str) -> str:
        """Add text. Returns cleaned text that later text cannot change."""
        text = self._kept + piece
        cuts = [match.start() for match in CLEAN_CUT.finditer(text)]
        at = max(cuts, default=0)
        self._kept = text[at:]
        return self._clean(text[:at])

    def rest(self, piece: str) -> str:
        """The text that is left if this is the last piece."""
        return self._clean(self._kept + piece)


def cleans_up(tokenizer: Any) -> bool:
    """Return True if this tokenizer's decode() removes spaces by default."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_forced = getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
    return is_forced or type(getattr(backend, "model", None)).__name__ != "BPE"
