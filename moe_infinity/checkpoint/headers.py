"""The files of a checkpoint and the tensors in them, found by reading headers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moe_infinity.checkpoint.extents import StoredTensor
from moe_infinity.checkpoint.file_names import INDEX, WHOLE, shards_of
from moe_infinity.checkpoint.pickled import read_pickled
from moe_infinity.checkpoint.safetensors_header import read_safetensors
from moe_infinity.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Headers:
    """All tensors of a checkpoint by name, and what reading that cost."""

    tensors: dict[str, StoredTensor]
    num_bytes: int  # bytes read: the headers


def read_headers(files: Iterable[Path]) -> Headers:
    """Headers of all shards, safetensors or PyTorch's. Raises CheckpointError for a missing,
    truncated or lying file, or a name given twice.
    """
    tensors: dict[str, StoredTensor] = {}
    num_bytes = 0
    for file in files:
        read = read_pickled if file.suffix == ".bin" else read_safetensors
        found, header_bytes = read(file)
        num_bytes += header_bytes
        for tensor in found:
            if tensor.name in tensors:
                other = tensors[tensor.name].extent.file.name
                raise CheckpointError(
                    f"tensor {tensor.name} is in {other} and again in {file.name}"
                )
            tensors[tensor.name] = tensor
    return Headers(tensors, num_bytes)


def checkpoint_files(folder: Path) -> list[Path]:
    """The files with the weights of a checkpoint folder, safetensors or else PyTorch's. Raises
    CheckpointError if there are none or a shard is missing.
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
