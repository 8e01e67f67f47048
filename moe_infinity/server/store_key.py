"""Opens the prompt store of a model, with a key that no other model or arithmetic has."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from moe_infinity import __version__
from moe_infinity.checkpoint.file_names import checkpoint_files, find_gguf, gguf_parts
from moe_infinity.checkpoint.file_state import fingerprint_of, state_of
from moe_infinity.errors import MoEInfinityError
from moe_infinity.kernels.cpu.compiler import place_of_kernels
from moe_infinity.local import find_local
from moe_infinity.model import MoE
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.prompt_store import PromptStore
from moe_infinity.sizes import parse_size
from moe_infinity.system.files import expanded, nearest_folder, open_to_read

logger = logging.getLogger(__name__)
FORMAT = 1  # of names and files


def store_of(moe: MoE, config: ServeConfig) -> PromptStore | None:
    """The store that the options name; None if there is to be none, or none can be. The log says
    why.
    """
    gives_exact_bits = config.max_batch == 1 and moe.config.is_exact
    is_off = config.prefix_cache == "off" or (config.prefix_cache is None and gives_exact_bits)
    if config.prompt_store == "off" or is_off:
        return None
    try:
        folder = _folder(config.prompt_store)
        key = key_of(moe)
    except (OSError, RuntimeError, MoEInfinityError) as error:
        logger.warning("prompts are not kept on disk: %s", error)
        return None
    free_bytes = shutil.disk_usage(nearest_folder(folder)).free
    return PromptStore(folder, key, parse_size(config.prompt_store_size, whole_bytes=free_bytes))


def _folder(wanted: str | None) -> Path:
    if wanted is not None:
        return expanded(wanted).absolute()
    return platformdirs.user_cache_path("moe-infinity") / "prompts"


def key_of(moe: MoE) -> str:
    """32 digits that tell all apart which the values of a cache depend on: the weights, how they
    are read, and who computes with them. Raises OSError or CheckpointError.
    """
    config = json.loads(moe.model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    code = sys.modules[type(moe.model).__module__].__file__
    parts = [
        FORMAT,
        [__version__, torch.__version__, transformers.__version__],
        place_of_kernels().name,  # kernels, compiler and processor
        [type(moe.model).__name__, hashlib.sha256(Path(code or "").read_bytes()).hexdigest()],
        config,
        [str(moe.model.dtype), str(moe.model.device)],
        [moe.config.is_exact, moe.config.experts_implementation, moe.config.expert_dtype],
        moe.config.gpu_engine,
        [_identity(file) for file in _weight_files(moe.checkpoint)],
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weight_files(checkpoint: str) -> list[Path]:
    here = find_local(checkpoint) or checkpoint
    gguf = find_gguf(here)
    if gguf is None:
        return checkpoint_files(expanded(here))
    parts = [gguf.with_name(name) for name in gguf_parts(gguf.name)]
    return [part for part in parts if part.exists()]


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
