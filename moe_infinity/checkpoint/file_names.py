"""The files of a checkpoint that have its weights, found by their names. No torch here: a download
is chosen by these names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from moe_infinity.errors import CheckpointError
from moe_infinity.system.files import expanded

WHOLE = ("model.safetensors", "pytorch_model.bin")  # the order in which transformers looks
MAX_INDEX_BYTES = 64 << 20  # three times that of Kimi K2
INDEX = "{}.index.json"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# Words in the names of GGUF files that are no models of text. Models that were quantized with an
# importance matrix say so, too, beside their type.
MMPROJ = re.compile(r"(^|[._-])mmproj[._-]", re.IGNORECASE)
AHEAD = re.compile(r"(^|/)mtp[-/]", re.IGNORECASE)  # layers that predict tokens ahead, alone
IMATRIX = re.compile(r"^imatrix[._-]|^(?!.*[._-]I?Q\d).*[._-]imatrix\.gguf$", re.IGNORECASE)


def shards_of(index: Path) -> list[str]:
    """The names of the files that an index lists. Raises CheckpointError."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES} bytes")
        content = json.loads(index.read_text("utf-8"))
        names = sorted(set(content["weight_map"].values()))
        paths = list(map(Path, names))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of shards: {error!r}") from error
    if not names or not isinstance(content.get("metadata"), dict):  # transformers wants one
        raise CheckpointError(f"{index}: not an index of shards: no names or no metadata")
    folder = index.parent.absolute()
    for path in paths:
        if ".." in path.parts or not (folder / path).is_relative_to(folder):
            raise CheckpointError(f"{index}: names {path}, a file outside of the folder")
    return names


def checkpoint_files(folder: Path) -> list[Path]:
    """The files with the weights of a checkpoint folder: safetensors, or PyTorch's if there are no
    such. Raises CheckpointError if there are none or a shard is missing.
    """
    for name in WHOLE:
        single = folder / name
        index = folder / INDEX.format(name)
        if single.is_file():
            return [single]
        if index.exists():
            return _shards(folder, index)
    raise CheckpointError(
        f"{folder}: neither model.safetensors nor model.safetensors.index.json is there, "
        "and no pytorch_model.bin"
    )


def _shards(folder: Path, index: Path) -> list[Path]:
    names = shards_of(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: "
            f"{', '.join(missing[:3])}\nhint: download the checkpoint again"
        )
    return [folder / name for name in names]


def gguf_models(names: Iterable[str]) -> list[str]:
    """The GGUF files that a model can be opened by: the first part of a split one, no vision
    parts.
    """
    return [name for name in sorted(names) if name.endswith(".gguf") and _is_model(name)]


def _is_model(name: str) -> bool:
    match = PART.fullmatch(name)
    is_later_part = match is not None and int(match[2]) != 1
    own = Path(name).name
    is_other = MMPROJ.search(own) or IMATRIX.search(own) or AHEAD.search(name)
    return not (is_later_part or is_other)


def gguf_parts(name: str) -> list[str]:
    """The names of all parts of the split GGUF model that this one belongs to, or this name
    alone.
    """
    match = PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def find_gguf(checkpoint: str) -> Path | None:
    """The GGUF file that a path names: the path itself, or the only model in a folder without a
    config.json or other weights, or one level below, vision parts (mmproj) left aside. None if it
    names no GGUF file. Raises CheckpointError for a folder with several.
    """
    path = expanded(checkpoint)
    is_folder = os.path.isdir(path)  # False for one that may not be entered, and for long texts
    if path.suffix.lower() == ".gguf" and not is_folder:
        return path
    if not is_folder:
        return path if ".gguf.part" not in path.name and _begins_as_gguf(path) else None
    weights = [form.format(name) for name in WHOLE for form in ("{}", INDEX)]
    if (path / "config.json").exists() and any((path / name).exists() for name in weights):
        return None
    files = sorted([*path.glob("*.gguf"), *path.glob("*/*.gguf")])  # on the hub a folder for each
    names = [file.relative_to(path).as_posix() for file in files]
    models = gguf_models(name for name in names if "/" not in name) or gguf_models(names)
    if len(models) > 1:
        first = ", ".join(models[:4])
        raise CheckpointError(f"{path}: several GGUF files, name one of them: {first}")
    name = next(iter([*models, *names]), None)
    return None if name is None else path / name


def _begins_as_gguf(path: Path) -> bool:
    """Return True for a file of another name, as Ollama's blobs have."""
    with suppress(OSError):
        if os.path.isfile(path):  # False for a text that cannot be a path
            with path.open("rb") as file:
                return file.read(4) == b"GGUF"
    return False


def split_files(path: Path) -> list[Path]:
    """All files of the GGUF model that this one belongs to. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    names = gguf_parts(path.name)
    if path.name not in names:
        raise CheckpointError(f"{path}: no part of {len(names)} is called so")
    there = {path.name, *(file.name for file in path.parent.glob("*.gguf"))}
    missing = [name for name in names if name not in there]
    if missing:
        raise CheckpointError(
            f"{path.parent}: {len(missing)} of {len(names)} parts are missing: "
            f"{', '.join(missing[:3])}\nhint: download them, too"
        )
    return [path.parent / name for name in names]
