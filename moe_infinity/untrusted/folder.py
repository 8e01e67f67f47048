"""Looks at the files of a checkpoint folder or hub id that are not weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import cached_file, is_peft_available

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.untrusted.config_limits import (
    check_adapter_config,
    check_config,
    check_generation_config,
    check_processor_config,
    read_object,
)
from moe_infinity.untrusted.tokenizer_limits import check_tokenizer_file

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "tekken.json",
)  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def file_of(checkpoint: str, name: str) -> Path | None:
    """Return a file of a folder or hub id; None if there is none, or the hub does not give it."""
    with suppress(OSError):
        return Path(cached_file(checkpoint, name))
    return None


def check_configs(checkpoint: str, *, trust_remote_code: bool) -> None:
    """Raise CheckpointError or UnsupportedModelError for what no config of a folder or hub id may
    say. Nothing is made of them before.
    """
    file = file_of(checkpoint, "config.json")
    if file is not None:
        content = read_object(file)
        check_config(file, content, trust_remote_code=trust_remote_code)
        for other in _named(checkpoint, file, content, "configuration_files"):
            check_config(other, read_object(other), trust_remote_code=trust_remote_code)
    file = file_of(checkpoint, "generation_config.json")
    if file is None:
        return
    check_generation_config(file, read_object(file))
    try:
        transformers.GenerationConfig.from_pretrained(file.parent)
    except Exception as error:  # of any kind: its values go wherever they are used
        raise CheckpointError(f"{file}: transformers does not understand it: {error}") from error


def check_adapter(checkpoint: str) -> None:
    """Raise CheckpointError for an adapter beside a model that no adapter is like, and
    UnsupportedModelError without PEFT: transformers would leave it out without a word.
    """
    file = file_of(checkpoint, "adapter_config.json")
    if file is None:
        return
    check_adapter_config(file, read_object(file))
    if not is_peft_available():
        raise UnsupportedModelError(
            f"{file}: the model has an adapter, which needs PEFT\nhint: pip install peft, or take "
            "the file away to have the model without its adapter"
        )


def check_tokenizer(checkpoint: str) -> None:
    """Raise CheckpointError if one of a tokenizer's files has what no tokenizer has."""
    for name in TOKENIZER_FILES:
        file = file_of(checkpoint, name)
        if file is None:
            continue
        content = check_tokenizer_file(file)
        if name == "tokenizer_config.json":
            for other in _named(checkpoint, file, content, "fast_tokenizer_files"):
                check_tokenizer_file(other, "tokenizer.json")


def check_processor(checkpoint: str) -> None:
    """Raise CheckpointError if a processor of images would make what has no room."""
    for name in PROCESSOR_FILES:
        if (file := file_of(checkpoint, name)) is not None:
            check_processor_config(file, read_object(file))


def _named(checkpoint: str, file: Path, content: dict[str, Any], key: str) -> Iterator[Path]:
    """Yield the files that transformers takes in place of this one, by their versions."""
    names = content.get(key) or []
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{file}: {key} names {name!r}, which is no file of its folder")
        if (other := file_of(checkpoint, name)) is not None:
            yield other
