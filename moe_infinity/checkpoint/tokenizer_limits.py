"""Limits of a tokenizer's files, checked before a tokenizer is made of them. Its library keeps a
table as long as the highest id, and ends the process where there is no memory for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_infinity.checkpoint.config_limits import NumberRange, read_object, shown
from moe_infinity.errors import CheckpointError

MAX_FILE_BYTES = 256 << 20  # ten times that of Gemma 3
MAX_DEPTH = 32
MAX_VALUES = 20_000_000
ID = NumberRange(0, (1 << 24) - 1)


def check_tokenizer(files: Iterable[Path]) -> None:
    """Raise CheckpointError if one of these files has what no tokenizer has."""
    for file in files:
        content = read_object(file, MAX_FILE_BYTES, MAX_DEPTH, MAX_VALUES)
        if file.name == "vocab.json":
            _check_ids(file, "its tokens", content)
        elif file.name == "tokenizer.json":
            check_tokenizer_json(str(file), content)
        elif file.name == "tokenizer_config.json":
            _check_decoder(file, content.get("added_tokens_decoder"))


def check_tokenizer_json(file: str, content: dict[str, Any]) -> None:
    """Raise CheckpointError for the content of a tokenizer.json with ids that no tokenizer has."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{file}: model is {shown(model)}, expected an object")
    _check_ids(file, "model.vocab", model.get("vocab"))
    _check_added(file, content.get("added_tokens"))


def _check_ids(file: str | Path, where: str, vocabulary: Any) -> None:
    """A list has its ids by position."""
    if isinstance(vocabulary, dict):
        for token, id_ in vocabulary.items():
            if not ID.has(id_):
                what = f"{shown(token)} of {where} is {shown(id_)}"
                raise CheckpointError(f"{file}: {what}, expected {ID}")
    elif not isinstance(vocabulary, list):
        raise CheckpointError(f"{file}: {where} is {shown(vocabulary)}, expected tokens")


def _check_added(file: str | Path, added: Any) -> None:
    if not isinstance(added, list):
        raise CheckpointError(f"{file}: added_tokens is {shown(added)}, expected a list")
    for token in added:
        id_ = token.get("id") if isinstance(token, dict) else token
        if not ID.has(id_):
            raise CheckpointError(f"{file}: an id of added_tokens is {shown(id_)}, expected {ID}")


def _check_decoder(file: Path, added: Any) -> None:
    for id_ in added if isinstance(added, dict) else ():
        if not (id_.isascii() and id_.isdigit() and len(id_) < 9 and ID.has(int(id_))):
            what = f"an id of added_tokens_decoder is {shown(id_)}"
            raise CheckpointError(f"{file}: {what}, expected {ID}")
