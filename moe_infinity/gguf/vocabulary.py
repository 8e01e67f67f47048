"""The tokens of a GGUF file, what kind each is, and which of them begin and end a text.

The meaning of the keys is that of llama.cpp (src/llama-vocab.cpp), and so are the names of tokens
that end an answer whatever the keys say: many files name only one of several.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from moe_infinity.errors import CheckpointError

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
ID_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
    "unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id",
    "cls": "cls_token_id", "mask": "mask_token_id", "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id", "fim_sep": "fim_sep_token_id",
}  # fmt: skip
DEFAULT_IDS = {
    "llama": {"unk": 0, "bos": 1, "eos": 2},
    "t5": {"pad": 0, "eos": 1, "unk": 2},
    "bert": {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103},
}  # by tokenizer.ggml.model
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
NAMES_OF_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>", "</s>",
))  # fmt: skip
MARK = re.compile(r"_?[<\[].+[>\]]")  # how makers write what is no text
TAG = "</b>"  # beside this one, "</s>" is a tag of HTML, as in Gemma
# Where a model has all of these, "<|end|>" ends a message inside its answer.
NO_END_BESIDE = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
NO_TOKEN = (None, -1, 0xFFFFFFFF)  # how converters write that there is none
TRUTHS = {"true": 1, "false": 0}


class TokenKind(IntEnum):
    """A token's kind in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # not part of the text that a user reads
    USER_DEFINED = 4  # read by the user, but never split
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, and what it says of them."""

    model: str  # how text becomes tokens, e.g. "gpt2"; "none": by a file elsewhere
    tokens: list[str]  # by id
    kinds: list[int]
    ids: dict[str, int] = field(default_factory=dict)  # of special tokens, by ID_KEYS
    suppressed: list[int] = field(default_factory=list)  # ids that a model never writes

    @cached_property
    def _has_kinds(self) -> bool:
        """False for a file that says of no token what kind it is."""
        return any(kind != TokenKind.NORMAL for kind in self.kinds)

    def is_word(self, token_id: int) -> bool:
        """Return True for a token that is text, even if a key names it: programs that write files
        fill keys in which say nothing of the model.
        """
        if not self._has_kinds or self.kinds[token_id] != TokenKind.NORMAL:
            return False
        text = self.tokens[token_id]
        return text not in NAMES_OF_ENDS and MARK.fullmatch(text) is None

    def _has_tag(self, token_id: int | None) -> bool:
        """Return True if "</s>" is a tag of HTML: beside others, as in Gemma, or as a word of a
        byte-level vocabulary, as in Qwen, whose rules never make one of that text.
        """
        if token_id is None or self.kinds[token_id] == TokenKind.CONTROL:
            return False
        is_unnamed = token_id not in self.ids.values() and self._has_kinds
        is_unnamed &= self.kinds[token_id] == TokenKind.NORMAL
        return TAG in self.tokens or (self.model == "gpt2" and is_unnamed)

    def ends(self) -> list[int]:
        """The ids of tokens after which an answer is over, eos first."""
        named = {
            text: token_id for token_id, text in enumerate(self.tokens) if text in NAMES_OF_ENDS
        }
        if self._has_tag(named.get("</s>")):
            del named["</s>"]
        no_end = None  # whatever a key says
        if any(named.keys() >= {*names} for names in NO_END_BESIDE):
            no_end = named.pop("<|end|>", None)
        found = [self.ids[name] for name in ENDS if self.ids.get(name, no_end) != no_end]
        ends = list(dict.fromkeys([*found, *sorted(named.values())]))
        return [token_id for token_id in ends if not self.is_word(token_id)] or ends


def vocabulary_of(where: str, metadata: Mapping[str, Any], num_rows: int | None) -> Vocabulary:
    """Return what the metadata say of the tokens; `num_rows` are those of the embedding, which may
    be more. Special ids that are no token are left out with a warning. Raises CheckpointError.
    """
    model = metadata.get(f"{PREFIX}model", "none")
    if not isinstance(model, str):
        raise CheckpointError(f"{where}: {PREFIX}model is {model!r:.60}, expected a text")
    tokens = _array(where, metadata, "tokens", str)
    tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(tokens)]
    kinds = _array(where, metadata, "token_type", int, len(tokens))[: len(tokens)]
    kinds = kinds or [TokenKind.NORMAL] * len(tokens)
    ids = dict(DEFAULT_IDS.get(model, {}))
    limit = min(filter(None, (len(tokens), num_rows)), default=0)
    for name, key in ID_KEYS.items():
        token_id = number_of(metadata.get(PREFIX + key))
        if token_id is not None and token_id.is_integer() and 0 <= token_id < limit:
            ids[name] = int(token_id)
        elif token_id not in NO_TOKEN or (token_id is None and PREFIX + key in metadata):
            said = metadata[PREFIX + key]
            logger.warning("%s: %s%s is %.60r of %d, ignored", where, PREFIX, key, said, limit)
    suppressed = [i for i in _array(where, metadata, "suppress_tokens", int) if 0 <= i < limit]
    ids = {name: i for name, i in ids.items() if i < limit}
    return Vocabulary(model, tokens, kinds, ids, suppressed)


def number_of(value: Any) -> float | None:
    """A number of the metadata, of whatever type a program wrote: a text, too. None for others."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def flag_of(value: Any, default: bool) -> bool:
    """A flag of the metadata, of whatever type. `default` if it is absent or is none."""
    number = number_of(TRUTHS.get(value.lower(), value) if isinstance(value, str) else value)
    return default if number is None else number != 0


def _array(
    where: str, metadata: Mapping[str, Any], key: str, of: type, count: int = 0
) -> list[Any]:
    """An array of the vocabulary, [] if it is absent. Raises CheckpointError for one that has other
    values, or fewer than `count`.
    """
    found = metadata.get(PREFIX + key, [])
    if type(found) is not list or not all(type(value) is of for value in found):
        raise CheckpointError(f"{where}: {PREFIX}{key} is no list of {of.__name__}")
    if found and len(found) < count:
        raise CheckpointError(f"{where}: {PREFIX}{key} has {len(found)} entries for {count} tokens")
    return found
