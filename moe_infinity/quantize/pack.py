"""`moe-infinity pack`: a checkpoint with its experts in fewer bits, everything else as it was.

    plan of the model -> which tensors are experts' weights -> units to write -> shards

What comes out is a checkpoint again, named and laid out as compressed-tensors has it, but for two
extensions: an expert's tensors lie side by side and begin at a page of the file, filled up by
tensors padding.N; and where the checkpoint stacks experts in one tensor NAME, its parts are
NAME_packed and NAME_scale, stacked as well. The arithmetic is in kernels/pack.py, writing and going
on after an interruption in quantize/shards.py.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_infinity.checkpoint.file_names import checkpoint_files
from moe_infinity.checkpoint.headers import Extent, StoredTensor, read_headers
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.errors import CheckpointError, ConfigError
from moe_infinity.formats.methods import PACKED_BY_US
from moe_infinity.kernels.pack import Precision, pack, precision_of
from moe_infinity.loading.model import plan_from_headers
from moe_infinity.local import local_folder
from moe_infinity.quantize.options import check_options
from moe_infinity.quantize.shards import (
    CHECKSUMS,
    ShardJob,
    TensorBytes,
    TensorEntry,
    Unit,
    index_of,
    plan_shards,
)
from moe_infinity.quantize.tensors import (
    ChosenTensors,
    choose,
    quantization_config,
)
from moe_infinity.sizes import format_bytes

VERSION = 2  # to be raised when the same command would write other bytes or notes
SHARD_BYTES = 2 * 10**9
COPIED_BYTES = 16 << 20  # of a dense tensor at a time
INDEX = "model.safetensors.index.json"
# Weights, perhaps the same once more in another form, and what would not be true of the new folder.
NOT_COPIED_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt",
    ".index.json", ".partial",
)  # fmt: skip
NOT_COPIED = ("config.json", CHECKSUMS)


@dataclass(frozen=True, slots=True)
class PackReport:
    """The result of packing a checkpoint."""

    folder: str
    bytes_before: int  # of all weights of the checkpoint
    bytes_after: int
    num_weights: int  # that were packed
    mean_error: float  # of them: norm of the difference over norm of the weight
    worst_error: float
    worst_name: str
    seconds: float  # of all runs, where some were interrupted

    def __str__(self) -> str:
        share = self.bytes_after / self.bytes_before
        return (
            f"{self.folder}: {format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)} "
            f"({share:.0%}) in {self.seconds:.0f} s\n"
            f"{self.num_weights} weights of experts, relative error {self.mean_error:.3%} on "
            f"average, at worst {self.worst_error:.3%} ({self.worst_name})"
        )


@dataclass(slots=True)
class Notes:
    """Errors and time of the shard that is being written, for the progress file."""

    errors: dict[str, float] = field(default_factory=dict)  # relative, by weight
    began: float = field(default_factory=time.monotonic)

    def take(self) -> dict[str, Any]:
        """For the progress file; begins anew."""
        taken = {"errors": self.errors, "seconds": time.monotonic() - self.began}
        self.errors = {}
        self.began = time.monotonic()
        return taken


def pack_checkpoint(
    model: str,
    folder: Path,
    *,
    experts: str,
    group_size: int = 32,
    rounding: str = "search",
    trust_remote_code: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> PackReport:
    """Write to `folder` the checkpoint `model` (folder or cached hub id) with its experts in
    `experts` (int4, int8, fp8). Called again with the same arguments after an interruption, it goes
    on. `on_bytes` gets bytes written and bytes to write.

    Raises ConfigError, UnsupportedModelError, CheckpointError.
    """
    check_options(experts, group_size, rounding)
    source = Path(local_folder(model)).resolve()
    target = folder.absolute()
    if source in (target.resolve(), *target.resolve().parents):
        raise ConfigError(f"{folder} is inside the checkpoint to read: give another folder")
    weights_files = checkpoint_files(source)
    plan = plan_from_headers(str(source), dtype="auto", trust_remote_code=trust_remote_code)
    chosen = choose(plan)
    precision = precision_of(experts, group_size)
    chosen.check(precision)
    others = list(_other_files(source))
    job_id = {
        "command": [VERSION, str(source), experts, group_size, rounding, shard_bytes],
        "files": _fingerprint([*weights_files, *others, source / "config.json"]),
    }
    notes = Notes()
    reader = Reader()
    packing = _Packing(precision, rounding == "search", reader, notes)
    stored = read_headers(weights_files).tensors
    shards = plan_shards(packing.units(stored, chosen), shard_bytes)
    files: dict[str, bytes | Path] = {str(path.relative_to(source)): path for path in others}
    config = quantization_config(precision, chosen, stored)
    files |= {"config.json": _config(source, config), INDEX: index_of(shards)}
    job = ShardJob(target, job_id, shards, files, notes.take, on_bytes)
    try:
        taken = job.run()
    finally:
        reader.close()
    errors: dict[str, float] = {}
    for each in taken:
        errors |= each["errors"]
    worst_name = max(errors, key=errors.__getitem__)
    return PackReport(
        folder=str(folder),
        bytes_before=sum(tensor.extent.num_bytes for tensor in stored.values()),
        bytes_after=sum(shard.num_bytes for shard in shards),
        num_weights=len(errors),
        mean_error=sum(errors.values()) / len(errors),
        worst_error=errors[worst_name],
        worst_name=worst_name,
        seconds=sum(each["seconds"] for each in taken),
    )


# What to write


@dataclass(frozen=True, slots=True)
class _Packing:
    """Turns tensors of the checkpoint into units to write."""

    precision: Precision
    is_searched: bool
    reader: Reader
    notes: Notes

    def units(self, stored: dict[str, StoredTensor], chosen: ChosenTensors) -> Iterator[Unit]:
        """Dense tensors first, the widest elements before the others: so all are aligned to their
        elements, which torch needs.
        """
        of_experts = {name for tensors in chosen.experts.values() for name in tensors}
        of_experts |= chosen.stacked.keys()
        dense = [
            self._unit([], [tensor], is_aligned=False)
            for name, tensor in stored.items()
            if name not in of_experts
        ]
        if self.precision.name == "int4":
            dense += [_shape_of(tensor) for tensor in chosen.packed if len(tensor.shape) == 2]
        yield from sorted(dense, key=lambda unit: -unit.entries[0].item_bytes)
        for tensor in chosen.stacked.values():
            yield self._unit([tensor], [], is_aligned=True)
        for tensors in chosen.experts.values():
            matrices = [tensor for tensor in tensors.values() if len(tensor.shape) == 2]
            biases = [tensor for tensor in tensors.values() if len(tensor.shape) < 2]
            yield self._unit(matrices, biases, is_aligned=True)

    def _unit(
        self, matrices: list[StoredTensor], copied: list[StoredTensor], *, is_aligned: bool
    ) -> Unit:
        """Matrices that are packed, and tensors that stay as they are."""
        entries = [TensorEntry(each.name, each.stored_dtype, each.shape) for each in copied]
        for tensor in matrices:
            *stack, rows, columns = tensor.shape
            for role, (dtype, shape) in self.precision.layout((rows, columns)).items():
                entries.append(
                    TensorEntry(tensor.name + self._suffix(role), dtype, (*stack, *shape))
                )
        entries.sort(key=lambda entry: -entry.item_bytes)
        return Unit(tuple(entries), is_aligned, partial(self._produce, matrices, copied))

    def _suffix(self, role: str) -> str:
        """Return the suffix of a stored tensor's name."""
        return PACKED_BY_US[self.precision.name].suffix_of(role)

    def _produce(
        self, matrices: list[StoredTensor], copied: list[StoredTensor]
    ) -> Iterator[TensorBytes]:
        for tensor in matrices:
            num_experts = tensor.shape[0] if len(tensor.shape) == 3 else 0  # stacked
            for expert_idx in range(max(1, num_experts)):
                name = f"{tensor.name}[{expert_idx}]" if num_experts else tensor.name
                extent = tensor.extent.equal_part(expert_idx, max(1, num_experts))
                one = StoredTensor(name, tensor.stored_dtype, tensor.shape[-2:], extent)
                for role, data in self._pack(one).items():
                    yield tensor.name + self._suffix(role), expert_idx * len(data), data
        for tensor in copied:
            yield from _copy(tensor, self.reader)

    def _pack(self, tensor: StoredTensor) -> dict[str, memoryview]:
        """The parts of one expert's weight, by role."""
        raw = bytearray(tensor.extent.num_bytes)
        self.reader.read_into(tensor.extent, memoryview(raw))
        weight = torch.frombuffer(raw, dtype=getattr(torch, tensor.dtype)).view(tensor.shape)
        packed = pack(weight, self.precision, is_searched=self.is_searched)
        if not math.isfinite(packed.squared_norm):
            raise CheckpointError(f"{tensor.name} has values that are infinite or no numbers")
        norm = packed.squared_norm or 1.0
        self.notes.errors[tensor.name] = math.sqrt(packed.squared_error / norm)
        return {role: _bytes_of(part) for role, part in packed.parts.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).flatten().numpy().data


def _copy(tensor: StoredTensor, reader: Reader) -> Iterator[TensorBytes]:
    for first in range(0, tensor.extent.num_bytes, COPIED_BYTES):
        raw = bytearray(min(COPIED_BYTES, tensor.extent.num_bytes - first))
        reader.read_into(
            Extent(tensor.extent.file, tensor.extent.offset + first, len(raw)), memoryview(raw)
        )
        yield tensor.name, first, raw


def _shape_of(tensor: StoredTensor) -> Unit:
    """Return the shape that compressed-tensors stores beside a weight in words."""
    name = f"{tensor.name}_shape"
    numbers = b"".join(size.to_bytes(8, "little") for size in tensor.shape)
    return Unit((TensorEntry(name, "I64", (2,)),), False, lambda: iter([(name, 0, numbers)]))


# The rest of the folder


def _other_files(source: Path) -> Iterator[Path]:
    """Yield the files that are copied as they are: tokenizer, generation_config, code, README and
    so on. Raises CheckpointError for what may not be in the new folder.
    """
    is_snapshot = source.parent.name == "snapshots"  # of links to files beside it
    root = source.parents[1] if is_snapshot else source
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_ours = not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if str(name) in NOT_COPIED or path.name.endswith(NOT_COPIED_SUFFIXES):
            continue
        if not (is_ours and path.is_file()):
            continue
        if not path.resolve().is_relative_to(root):
            raise CheckpointError(
                f"{path}: a link to {path.resolve()}, outside of the checkpoint\n"
                "hint: put a copy in its place, or take it away"
            )
        if str(name) == "adapter_config.json":
            raise CheckpointError(
                f"{path}: packing would leave the adapter out\n"
                "hint: merge it, or take the file away"
            )
        yield path


def _fingerprint(files: list[Path]) -> dict[str, list[int]]:
    """Sizes and times of change, by which a changed file is known."""
    return {str(file): [(s := file.stat()).st_size, s.st_mtime_ns] for file in files}


def _config(source: Path, quantization_config: dict[str, Any]) -> bytes:
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = quantization_config
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
