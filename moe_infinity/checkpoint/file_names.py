"""Which files of a checkpoint have the weights, by their names. Without torch: a download is chosen
by them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from moe_infinity.errors import CheckpointError

WHOLE = ("model.safetensors", "pytorch_model.bin")  # the order in which transformers looks
INDEX = "{}.index.json"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
NO_GGUF_MODELS = ("mmproj", "imatrix")  # how their names begin


def shards_of(index: Path) -> list[str]:
    """The files that an index names. Raises CheckpointError."""
    try:
        content = json.loads(index.read_text("utf-8"))
        names = sorted(set(content["weight_map"].values()))
        paths = list(map(Path, names))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of shards: {error!r}") from error
    if not names or "metadata" not in content:  # without which transformers does not take it
        raise CheckpointError(f"{index}: not an index of shards: no names or no metadata")
    for path in paths:
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{index}: names {path}, a file outside of the folder")
    return names


def gguf_models(names: Iterable[str]) -> list[str]:
    """The GGUF files that a model can be opened by: the first part of a split one, no vision
    parts.
    """
    return [name for name in sorted(names) if name.endswith(".gguf") and _is_model(name)]


def _is_model(name: str) -> bool:
    match = PART.fullmatch(name)
    is_later_part = match is not None and int(match[2]) != 1
    return not is_later_part and not Path(name).name.startswith(NO_GGUF_MODELS)


def gguf_parts(name: str) -> list[str]:
    """The names of all parts of the split GGUF model that one of them belongs to; else the name."""
    match = PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
