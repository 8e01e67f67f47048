"""Limits of a tokenizer's files, checked before a tokenizer is made of them. Its library keeps a
table as long as the highest id, and ends the process where there is no memory for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_infinity.errors import CheckpointError
from moe_infinity.untrusted.config_limits import NumberRange, read_object, shown

MAX_FILE_BYTES = 64 << 20  # twice that of Gemma 3
MAX_DEPTH = 32
MAX_VALUES = 20_000_000
ID = NumberRange(0, (1 << 24) - 1)


def check_tokenizer_file(file: Path, kind: str | None = None) -> dict[str, Any]:
    """Return what a file says that is read as one of the name `kind`, by default its own. Raises
    CheckpointError if it has what no tokenizer has.
    """
    content = read_object(file, MAX_FILE_BYTES, MAX_DEPTH, MAX_VALUES)
    match kind or file.name:
        case "vocab.json" | "added_tokens.json":
            _check_ids(file, "its tokens", content)
        case "tokenizer.json":
            check_tokenizer_json(str(file), content)
        case "tokenizer_config.json":
            _check_decoder(file, content.get("added_tokens_decoder"))
        case "tekken.json":
            _check_tekken(file, content)
    return content


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


def _check_tekken(file: Path, content: dict[str, Any]) -> None:
    """Mistral's: sizes in its config, and a rank of each token."""
    numbers = content.get("config")
    listed = [content.get("vocab"), content.get("special_tokens")]
    ranked = [token for tokens in listed if isinstance(tokens, list) for token in tokens]
    entries = list(numbers.items()) if isinstance(numbers, dict) else []
    entries += [("rank", token.get("rank", 0)) for token in ranked if isinstance(token, dict)]
    for name, value in entries:
        if isinstance(value, int | float) and not ID.has(value):
            raise CheckpointError(f"{file}: {shown(name)} is {shown(value)}, expected {ID}")


def _check_decoder(file: Path, added: Any) -> None:
    for id_ in added if isinstance(added, dict) else ():
        if not (id_.isascii() and id_.isdigit() and len(id_) < 9 and ID.has(int(id_))):
            what = f"an id of added_tokens_decoder is {shown(id_)}"
            raise CheckpointError(f"{file}: {what}, expected {ID}")
