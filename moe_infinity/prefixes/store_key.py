"""Opens the prompt store of a model, with a key that no other model or arithmetic has."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from moe_infinity.checkpoint.file_names import checkpoint_files, find_gguf, gguf_parts
from moe_infinity.checkpoint.file_state import fingerprint_of, state_of
from moe_infinity.checkpoint.signature import digest_of
from moe_infinity.errors import CheckpointError
from moe_infinity.images.mmproj import find_mmproj
from moe_infinity.kernels.cpu.compiler import place_of_kernels
from moe_infinity.local import find_local
from moe_infinity.prefixes.loaded import Loaded
from moe_infinity.prefixes.prompt_store import PromptStore
from moe_infinity.sizes import parse_size
from moe_infinity.system.files import expanded, nearest_folder, open_to_read

FORMAT = 1  # of names and files


def open_store(moe: Loaded, folder: str | None, size: str) -> PromptStore:
    """The store of a model in a folder; None: the user's cache folder. `size`: what the files of
    all models there may take. Raises OSError, CheckpointError, ConfigError for a size, and
    RuntimeError where a user has no home folder.
    """
    if folder is None:
        path = platformdirs.user_cache_path("moe-infinity") / "prompts"
    else:
        path = expanded(folder).absolute()
    key = key_of(moe)
    free_bytes = shutil.disk_usage(nearest_folder(path)).free
    return PromptStore(path, key, parse_size(size, whole_bytes=free_bytes))


def key_of(moe: Loaded) -> str:
    """32 digits that tell all apart which the values of a cache depend on. Raises
    CheckpointError.
    """
    return _digest(identity_of(moe))[:32]


def identity_of(moe: Loaded) -> dict[str, str]:
    """All that the values of a cache depend on, by name: the weights, how they are read, and who
    computes with them. Raises CheckpointError.
    """
    config = json.loads(moe.model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    code = Path(sys.modules[type(moe.model).__module__].__file__ or "").read_bytes()
    own = moe.config
    try:
        weights = [_identity(file) for file in _weight_files(moe.checkpoint, own.mmproj)]
    except OSError as error:
        raise CheckpointError(f"{moe.checkpoint}: the weights cannot be read: {error}") from error
    return {
        "format": str(FORMAT),
        "weights": _digest(weights),
        "weights in memory": digest_of(moe.model),
        "config": _digest(config),
        "dtype": str(moe.model.dtype),
        "device": str(moe.model.device),
        "exact": str(own.is_exact),
        "experts_implementation": own.experts_implementation,
        "expert_dtype": str(own.expert_dtype),
        "kv_dtype": own.kv_dtype,
        "gpu_engine": own.gpu_engine,
        "moe-infinity": version("moe-infinity"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code of the model": f"{type(moe.model).__name__} {hashlib.sha256(code).hexdigest()}",
        "kernels and processor": place_of_kernels().name,
    }


def _digest(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _weight_files(checkpoint: str, mmproj: str | Path | None) -> list[Path]:
    here = find_local(checkpoint) or checkpoint
    gguf = find_gguf(here)
    if gguf is None:
        return checkpoint_files(expanded(here))
    parts = [gguf.with_name(name) for name in gguf_parts(gguf.name)]
    beside = find_mmproj(here, mmproj)
    return [part for part in [*parts, *([beside] if beside else [])] if part.exists()]


def _identity(path: Path) -> list[Any]:
    """Return size and samples of a file of weights, and when it was changed. Samples alone could
    miss a change of few weights; a file that was changed in place has another time.
    """
    file = open_to_read(path)
    try:
        state = state_of(file.descriptor)
        fingerprint = fingerprint_of(
            state.num_bytes, lambda offset, memory: _fill(file.read([memory], offset), memory)
        )
    finally:
        file.close()
    return [*fingerprint, state.changed_ns]


def _fill(num_read: int, memory: memoryview) -> None:
    if num_read != memory.nbytes:
        raise OSError("a file of weights ends early")
