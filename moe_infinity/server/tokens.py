"""Texts of requests become token ids, in any thread and within the model's context."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moe_infinity.errors import CheckpointError
from moe_infinity.server.refusals import PromptTooLong

# A text of more characters for each token of the context is looked at from its beginning on.
CHARACTERS = 6
GROWTH = 4  # of the beginnings that are looked at
# A beginning has to be this much too long: its last tokens may be others in the whole text.
MARGIN = 1.25
REMOVED = 2  # times as many characters as the longest tokens have, where a tokenizer removes some
MORE = 1024
TRIAL_S = 20.0
TRIALS = ("The quick brown fox. " * 200, "a" * 4000, " " * 4000, "\n\t" * 2000, "é漢👍🏽" * 1000)


class TextTokens:
    """A tokenizer for the texts of requests.

    Tokenizers of the library tokenizers work in several threads at once, without the interpreter.
    Others take one text at a time. Raises CheckpointError for one that needs very long.
    """

    def __init__(self, tokenizer: Any, max_context: int) -> None:
        """`max_context`: the most tokens of a text."""
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token
        kind = type(tokenizer)
        is_stock = (
            isinstance(tokenizer, PreTrainedTokenizerFast)
            and kind.__call__ is PreTrainedTokenizerBase.__call__
            and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        )
        self._backend = tokenizer.backend_tokenizer if is_stock else None
        self._lock = nullcontext() if is_stock else threading.Lock()
        self._require_fast()

    def require_possible(self, num_characters: int, param: str) -> None:
        """Raises PromptTooLong, which names `param`, for more text than the context can hold in the
        longest tokens.
        """
        fewest = num_characters // (self._longest * REMOVED)
        if fewest > self._max_context:
            raise PromptTooLong(fewest, self._max_context, param=param, is_counted=False)

    def ids(self, text: str, param: str, *, has_special: bool = True) -> list[int]:
        """The token ids of a text, with those that the tokenizer puts around a text if
        `has_special`.

        Raises PromptTooLong, which names `param`, for a text that is far too long for the context.
        A large part of it is then never tokenized.
        """
        self.require_possible(len(text), param)
        size = self._max_context * CHARACTERS
        while len(text) > size:
            num_tokens = len(self._ids(text[:size], has_special=has_special))
            if num_tokens > self._max_context * MARGIN + MORE:
                raise PromptTooLong(num_tokens, self._max_context, param=param, is_counted=False)
            size *= GROWTH
        return self._ids(text, has_special=has_special)

    def _ids(self, text: str, *, has_special: bool) -> list[int]:
        if self._backend is not None:
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=has_special)
            found: list[int] = encoded[0].ids
            return found
        with self._lock:
            ids: list[int] = self._tokenizer(text, add_special_tokens=has_special)["input_ids"]
        return ids

    def _require_fast(self) -> None:
        """Tokenize a few texts in a thread that may be left behind."""

        def tokenize() -> None:
            self._tokenizer("")  # takes back what tokenizer.json says of cutting and padding
            for text in TRIALS:
                self._ids(text, has_special=True)

        trial = threading.Thread(target=tokenize, name="moe-infinity-trial", daemon=True)
        trial.start()
        trial.join(TRIAL_S)
        if trial.is_alive():
            raise CheckpointError(
                f"the checkpoint's tokenizer takes more than {TRIAL_S:g} s for a few short texts"
            )
