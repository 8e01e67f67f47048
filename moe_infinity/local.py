"""Find what of a model is on this machine: its folder, or what a download left in the hub cache.
No torch here, which takes seconds to import: a mistyped name is an error before that.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from moe_infinity.checkpoint.file_names import checkpoint_files, find_gguf, gguf_models, gguf_parts
from moe_infinity.errors import CheckpointError

WEIGHTS = (".safetensors", ".bin")  # endings of files that only their folder opens


def local_folder(model: str) -> str:
    """Return what `find_local` finds. Raises CheckpointError if that is nothing."""
    found = find_local(model)
    if found is None:
        raise CheckpointError(
            f"{model}: neither a folder nor a model in the local hub cache\n"
            f"hint: check the spelling of a folder; `moe-infinity pull {model}` downloads a hub id"
        )
    return found


def find_local(model: str) -> str | None:
    """Return what can be opened of a model: a path as it is; of a hub id the folder or GGUF file in
    the hub cache, or None if that is not there or not whole. Nothing is downloaded. Raises
    CheckpointError for several to choose from.
    """
    is_path = os.path.exists(model) or model.startswith((".", "/", "~"))
    if is_path or find_gguf(model) is not None:
        return model
    try:
        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=[]))
    except (OSError, HFValidationError, RuntimeError):  # the last: no home folder, so no hub cache
        return None
    files = (path for path in folder.rglob("*") if path.is_file())
    return weights_in(folder, [path.relative_to(folder).as_posix() for path in files])


def weights_in(folder: Path, names: Collection[str]) -> str | None:
    """Return what can be opened of these files of a hub: the folder itself if it has weights, else
    the only folder or GGUF file below that has. Raises CheckpointError for several.
    """
    folders = {(folder / name).parent for name in names if name.endswith(WEIGHTS)}
    ggufs = [name for name in gguf_models(names) if {*gguf_parts(name)} <= {*names}]
    found = [*filter(_has_weights, sorted(folders)), *(folder / name for name in ggufs)]
    if len(found) > 1 and found[0] != folder:
        listed = "\n".join(map(str, found))
        raise CheckpointError(f"{folder}: several models, name one:\n{listed}")
    return str(found[0]) if found else None


def _has_weights(folder: Path) -> bool:
    try:
        return bool(checkpoint_files(folder))
    except CheckpointError:
        return False
