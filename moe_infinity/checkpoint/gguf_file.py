"""A GGUF model: one file, or all parts of a split one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_infinity.checkpoint.extents import StoredTensor
from moe_infinity.checkpoint.file_names import gguf_models, gguf_parts
from moe_infinity.checkpoint.gguf_header import read_gguf_header
from moe_infinity.errors import CheckpointError, UnsupportedModelError

BLOCK = re.compile(r"blk\.(\d{1,6})\.")
EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight")
NO_MODELS = {
    "adapter": "a LoRA adapter", "mmproj": "the vision part of a model",
    "imatrix": "an importance matrix", "vocab": "a vocabulary",
}  # fmt: skip


@dataclass(frozen=True)
class GgufModel:
    """What the headers of a model say, all parts together."""

    files: list[Path]
    metadata: dict[str, Any]  # of the first part
    tensors: dict[str, StoredTensor]  # by name in the file
    header_bytes: int

    @property
    def architecture(self) -> str:
        """As GGUF calls it, e.g. "qwen3moe"."""
        return str(self.metadata["general.architecture"])

    def value(self, key: str, default: Any = None) -> Any:
        """Of the metadata that belong to the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def num_blocks(self) -> int:
        """Layers, as far as there are tensors."""
        numbers = {int(match[1]) for match in map(BLOCK.match, self.tensors) if match is not None}
        return next(number for number in range(len(numbers) + 1) if number not in numbers)

    @cached_property
    def dtype(self) -> str:
        """What dense weights are widened to, if nobody says otherwise."""
        stored = {t.stored_dtype for t in self.tensors.values() if len(t.shape) > 1}
        if stored == {"F32"}:
            return "float32"
        return "float16" if stored <= {"F16", "F32"} else "bfloat16"


def find_gguf(checkpoint: str) -> Path | None:
    """The GGUF file that a path names: itself, or the only model in a folder that has no
    config.json, vision parts (mmproj) left aside. None if it names no GGUF file. Raises
    CheckpointError for a folder with several.
    """
    path = Path(checkpoint).expanduser()
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(file.name for file in path.glob("*.gguf"))
    models = gguf_models(found)
    if len(models) > 1:
        names = ", ".join(models[:4])
        raise CheckpointError(f"{path}: several GGUF files, name one of them: {names}")
    name = next(iter([*models, *found]), None)
    return None if name is None else path / name


def read_gguf(path: Path) -> GgufModel:
    """The model of a file, or of all parts if it is one part of a split. Raises CheckpointError for
    what is damaged or missing, UnsupportedModelError for what is no MoE model.
    """
    files = _parts_of(path)
    headers = [read_gguf_header(file) for file in files]
    metadata = headers[0].metadata
    _require_model(path, metadata)
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        found = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if found != (len(files), number):
            raise CheckpointError(f"{file}: says that it is part {found[1]} of {found[0]}, from 0")
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{tensor.extent.file}: tensor {tensor.name} is in another part, too"
                )
            tensors[tensor.name] = tensor
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        raise CheckpointError(f"{path}: {len(tensors)} tensors in all parts, more are announced")
    if not any(map(EXPERTS.fullmatch, tensors)):
        raise UnsupportedModelError(
            f"{path}: has no routed experts\n"
            "hint: a dense model needs no offloading, run it with llama.cpp"
        )
    return GgufModel(files, metadata, tensors, sum(header.num_bytes for header in headers))


def _parts_of(path: Path) -> list[Path]:
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


def _require_model(path: Path, metadata: dict[str, Any]) -> None:
    what = metadata.get("general.type", "model")
    architecture = metadata.get("general.architecture")
    if architecture == "clip":
        what = "mmproj"
    if what in NO_MODELS:
        raise UnsupportedModelError(f"{path}: is {NO_MODELS[what]}, not a model")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{path}: its metadata name no general.architecture")
