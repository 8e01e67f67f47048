"""The tokenizer that a checkpoint brings with it."""

from __future__ import annotations

from typing import Any

import transformers

from moe_infinity.checkpoint.file_names import find_gguf
from moe_infinity.checkpoint.gguf_config import WITH_CONFIG
from moe_infinity.errors import CheckpointError


def load_tokenizer(checkpoint: str, *, config_from: str | None, trust_remote_code: bool) -> Any:
    """As transformers gives it: of a folder or hub id, or of the vocabulary in a GGUF file, if
    transformers knows how its architecture splits text. Raises CheckpointError.
    """
    file = find_gguf(checkpoint) if config_from is None else None
    try:
        if file is not None:
            return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        return transformers.AutoTokenizer.from_pretrained(
            config_from or checkpoint, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        if file is None and not isinstance(
            error, OSError | ValueError
        ):  # broken JSON is the latter
            raise
        hint = "" if file is None else f"\n{WITH_CONFIG}"
        raise CheckpointError(f"{checkpoint}: no usable tokenizer: {error}{hint}") from error
