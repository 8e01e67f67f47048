"""A checkpoint written shard by shard, that may be killed at any moment and goes on where it was.

    FOLDER.partial/         finished files, and one *.partial that is being written
    FOLDER.progress.json    whose job this is, and of every finished shard its checksum
    FOLDER/                 the first of them, renamed once it is whole

Tensors lie where a plan made beforehand puts them, so that a job gives the same bytes however often
it was interrupted. Nothing has its final name before it is on the disk. No torch here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from moe_infinity.checkpoint.headers import STORED_DTYPES
from moe_infinity.errors import CheckpointError, ConfigError
from moe_infinity.sizes import format_bytes
from moe_infinity.system.files import (
    PositionalFile,
    create,
    locked,
    rename_folder,
    sync_names,
)

PAGE_BYTES = 4096
CHECKSUMS = "SHA256SUMS"  # for `sha256sum -c`
HASHED_BYTES = 1 << 20  # at a time
LOCK = ".lock"  # in the folder that is being written

TensorBytes = tuple[str, int, Any]  # name of a tensor, offset in it (bytes), what to write there


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to write."""

    name: str
    stored_dtype: str  # as in the header, e.g. "BF16"
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return STORED_DTYPES[self.stored_dtype][1] // 8

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that lie side by side."""

    entries: tuple[TensorEntry, ...]
    is_aligned: bool  # begins at a page of the file
    produce: Callable[[], Iterator[TensorBytes]]  # their bytes, in any order

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(slots=True)
class Shard:
    """A file to write: which tensor lies where in it."""

    name: str
    units: list[Unit]
    header: bytes = b""
    places: dict[str, int] = field(default_factory=dict)  # bytes from the start of the file
    num_bytes: int = 0


def plan_shards(units: Iterable[Unit], shard_bytes: int) -> list[Shard]:
    """Shards of about `shard_bytes`, in the order of the units. Units that are to begin at a page
    have tensors named padding.N before them where need be.
    """
    lists: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if lists[-1] and filled + unit.num_bytes > shard_bytes:
            lists.append([])
            filled = 0
        lists[-1].append(unit)
        filled += unit.num_bytes
    shards = []
    num_paddings = 0
    for number, members in enumerate(lists, start=1):
        shard = Shard(f"model-{number:05d}-of-{len(lists):05d}.safetensors", members)
        num_paddings = _lay_out(shard, num_paddings)
        shards.append(shard)
    return shards


def _lay_out(shard: Shard, num_paddings: int) -> int:
    """Fill in where everything lies. Returns how many paddings there are by then."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}  # from the first byte of data
    end = 0
    for unit in shard.units:
        entries = list(unit.entries)
        if unit.is_aligned and end % PAGE_BYTES:
            padding = TensorEntry(f"padding.{num_paddings}", "U8", (-end % PAGE_BYTES,))
            entries.insert(0, padding)
            num_paddings += 1
        for entry in entries:
            starts[entry.name] = end
            end += entry.num_bytes
            fields[entry.name] = {
                "dtype": entry.stored_dtype, "shape": entry.shape,
                "data_offsets": [starts[entry.name], end],
            }  # fmt: skip
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    shard.header = len(text).to_bytes(8, "little") + text
    shard.places = {name: len(shard.header) + start for name, start in starts.items()}
    shard.num_bytes = len(shard.header) + end
    return num_paddings


def index_of(shards: list[Shard]) -> bytes:
    """The index that says which shard has which tensor; paddings are not in it."""
    entries = [(e, shard.name) for shard in shards for unit in shard.units for e in unit.entries]
    total_bytes = sum(entry.num_bytes for entry, _ in entries)
    weight_map = {entry.name: shard_name for entry, shard_name in entries}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}).encode()


@dataclass(slots=True)
class ShardJob:
    """A checkpoint to write. Two jobs of equal `identity` write the same bytes."""

    folder: Path  # is made, last of all
    identity: dict[str, Any]  # JSON: the command and what it reads
    shards: list[Shard]
    files: dict[str, bytes | Path]  # by name: what else is in the folder, or where to copy it from
    notes: Callable[[], Any]  # JSON, kept with a shard just written
    on_bytes: Callable[[int, int], None]  # bytes done, of how many
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name of finished shards

    @property
    def partial(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")

    @property
    def progress_file(self) -> Path:
        return self.folder.with_name(self.folder.name + ".progress.json")

    def run(self) -> list[Any]:
        """The notes of all shards. Raises ConfigError if something else is in the way,
        CheckpointError if something cannot be read or written; then a later run goes on.
        """
        with _saying_what_to_do(self.partial):
            if not self._begin():
                with _alone(self.partial):
                    self._write_all()
                rename_folder(self.partial, self.folder)
                sync_names(self.folder.parent)
            self.progress_file.unlink()
        return [self.records[shard.name]["notes"] for shard in self.shards]

    def _begin(self) -> bool:
        """Find what an interrupted run has left. Was it all but finished?"""
        is_there = self.folder.exists() and not (
            self.folder.is_dir() and not any(self.folder.iterdir())
        )
        if not self.progress_file.exists():
            for path in (self.folder, self.partial):
                if path.exists() and (is_there or path == self.partial):
                    raise ConfigError(f"{path} is there already: give another folder or remove it")
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._save_progress()
        try:
            progress = json.loads(self.progress_file.read_text("utf-8"))
            identity = progress["identity"]
            self.records = progress["shards"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.progress_file}: not ours: {error!r}") from error
        if identity != self.identity:
            raise ConfigError(
                f"{self.partial} is an interrupted run with other options, or of a checkpoint that "
                f"has changed since\nhint: remove it and {self.progress_file.name} to start anew"
            )
        if not is_there:
            self.partial.mkdir(exist_ok=True)
            return False
        is_whole = self.records.keys() == {shard.name for shard in self.shards}
        if self.partial.exists() or not is_whole:
            raise ConfigError(f"{self.folder} was made by something else meanwhile: remove it")
        return True

    def _save_progress(self) -> None:
        progress = {"identity": self.identity, "shards": self.records}
        _write_whole(self.progress_file, json.dumps(progress, indent=1).encode())

    def _write_all(self) -> None:
        for left in self.partial.rglob("*.partial"):
            left.unlink()
        done = {shard.name for shard in self.shards if self._is_finished(shard)}
        self.records = {name: self.records[name] for name in done}
        self._check_room()
        for shard in self.shards:
            if shard.name not in done:
                sha256 = self._write(shard)
                self.records[shard.name] = {
                    "num_bytes": shard.num_bytes, "sha256": sha256, "notes": self.notes()
                }  # fmt: skip
                self._save_progress()
        sums = {name: record["sha256"] for name, record in self.records.items()}
        for name, content in self.files.items():
            path = self.partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content.read_bytes() if isinstance(content, Path) else content
            _write_whole(path, data)
            sums[name] = hashlib.sha256(data).hexdigest()
        lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(sums.items()))
        _write_whole(self.partial / CHECKSUMS, lines.encode())

    def _is_finished(self, shard: Shard) -> bool:
        path = self.partial / shard.name
        record = self.records.get(shard.name)
        return (
            record is not None
            and path.is_file()
            and path.stat().st_size == shard.num_bytes
            and _sha256(path) == record["sha256"]
        )

    def _check_room(self) -> None:
        missing = sum(s.num_bytes for s in self.shards if s.name not in self.records)
        free = shutil.disk_usage(self.partial).free
        if missing > free:
            raise CheckpointError(
                f"{self.partial}: {format_bytes(missing)} to write, {format_bytes(free)} free"
            )

    def _write(self, shard: Shard) -> str:
        """Returns the checksum."""
        path = self.partial / shard.name
        total = sum(each.num_bytes for each in self.shards)
        written = sum(record["num_bytes"] for record in self.records.values())
        with _replacing(path) as file:
            os.ftruncate(file.descriptor, shard.num_bytes)  # paddings are zeros
            file.write(memoryview(shard.header), 0)
            for unit in shard.units:
                for name, offset, data in unit.produce():
                    file.write(memoryview(data).cast("B"), shard.places[name] + offset)
                written += unit.num_bytes
                self.on_bytes(written, total)
        return _sha256(path)


@contextmanager
def _replacing(path: Path) -> Iterator[PositionalFile]:
    """To write a file that gets its name once it is on the disk."""
    temporary = path.with_name(path.name + ".partial")
    file = create(temporary)
    try:
        yield file
        os.fsync(file.descriptor)
    finally:
        file.close()
    os.replace(temporary, path)
    sync_names(path.parent)


def _write_whole(path: Path, data: bytes) -> None:
    with _replacing(path) as file:
        file.write(memoryview(data), 0)


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(HASHED_BYTES):
            found.update(data)
    return found.hexdigest()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Raises ConfigError if another process is at it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK))
        except BlockingIOError as error:
            raise ConfigError(f"{folder}: another process is writing it") from error
        yield
    (folder / LOCK).unlink(missing_ok=True)


@contextmanager
def _saying_what_to_do(partial: Path) -> Iterator[None]:
    """OSError becomes CheckpointError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        where = f"{error.filename or partial}: cannot be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f"{partial}: the disk is full"
        hint = "the same command goes on from here"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            hint = "name another folder with -o"
        raise CheckpointError(f"{where}: {error.strerror or error}\nhint: {hint}") from error
