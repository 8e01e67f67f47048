"""How fast a disk gives experts: random reads past the page cache, as many at once as the engine
has, into memory that is aligned otherwise than the file, as experts mostly are.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from moe_infinity.checkpoint.files import SMALL_FILE_BYTES, BounceBuffer, Chunk, OpenFile, chunks_of
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import NUM_READ_THREADS
from moe_infinity.errors import CheckpointError
from moe_infinity.memory import threads
from moe_infinity.memory.threads import CLOSE_TIMEOUT_S, ReadThreads
from moe_infinity.sizes import format_bytes
from moe_infinity.system.memory import huge_pages

WEIGHTS = (".safetensors", ".gguf", ".bin")
READ_BYTES = 8 << 20  # of one expert, where the caller knows no better
TEMPORARY_BYTES = 256 << 20
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """The first bytes of a file, which reads are spread over."""

    file: Path
    num_bytes: int


def measure_disk(
    folder_or_file: str | Path, seconds: float = 3.0, *, read_bytes: int = READ_BYTES
) -> float:
    """Bytes per second of random reads of `read_bytes` each, past the page cache.

    From this file or the large weight files of this folder. A folder without any gets a temporary
    file. Takes about `seconds`, and as long again to write that file. Raises CheckpointError.
    """
    path = Path(folder_or_file)
    try:
        regions = _weights_of(path)
        if regions:
            return _random_rate(regions, seconds, read_bytes)
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: no file of at least {format_bytes(SMALL_FILE_BYTES)} to measure the disk "
                "with, and no folder for a temporary one"
            )
        with _temporary_region(path, seconds) as region:
            return _random_rate([region], seconds, read_bytes)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path}: the disk cannot be measured: {error.strerror or error}"
        ) from error


def _weights_of(path: Path) -> list[Region]:
    """Smaller files the engine reads through the page cache."""
    files = [path] if not path.is_dir() else sorted(path.iterdir())
    sizes = {
        file: file.stat().st_size
        for file in files
        if file.is_file() and (file == path or file.suffix in WEIGHTS)
    }
    return [Region(file, size) for file, size in sizes.items() if size >= SMALL_FILE_BYTES]


@contextmanager
def _temporary_region(folder: Path, seconds: float) -> Iterator[Region]:
    """A file of what can be written in that time, at most TEMPORARY_BYTES. It is removed at the
    end.
    """
    free = shutil.disk_usage(folder).free
    if free < 2 * TEMPORARY_BYTES:
        raise CheckpointError(
            f"{folder}: {format_bytes(free)} free, measuring the disk needs "
            f"{format_bytes(2 * TEMPORARY_BYTES)}\nhint: name a folder on a disk with more room"
        )
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".moe-infinity-disk-") as file:
        num_bytes = 0
        give_up_at = time.monotonic() + seconds
        while num_bytes < TEMPORARY_BYTES and (num_bytes == 0 or time.monotonic() < give_up_at):
            num_bytes += file.write(os.urandom(PIECE_BYTES))  # nothing that a disk could compress
            file.flush()
            os.fsync(file.fileno())
        file.truncate(max(num_bytes, SMALL_FILE_BYTES))  # smaller ones are not read past the cache
        yield Region(Path(file.name), num_bytes)


def _random_rate(regions: list[Region], seconds: float, read_bytes: int) -> float:
    reads = RandomReads(regions, seconds, read_bytes)
    pool = ReadThreads(NUM_READ_THREADS, "moe-infinity-measure")
    futures: list[Future[None]] = [Future() for _ in range(NUM_READ_THREADS)]
    start = time.monotonic()
    try:
        for future in futures:
            pool.submit(reads.run, future)
        _, late = wait(futures, timeout=seconds + CLOSE_TIMEOUT_S)
        elapsed = time.monotonic() - start
    finally:
        reads.stop()
        threads.close(pool)
    if late:
        raise CheckpointError(f"{regions[0].file}: the disk did not answer for {elapsed:.0f} s")
    for future in futures:
        future.result()
    return reads.num_bytes / elapsed


class RandomReads:
    """Reads of `read_bytes` at random places, one at least, until `seconds` have passed, by any
    number of threads that take the chunks one by one, as those of a Reader do.
    """

    def __init__(self, regions: list[Region], seconds: float, read_bytes: int) -> None:
        self.num_bytes = 0
        self._files = {region.file: OpenFile(region.file) for region in regions}
        self._end = time.monotonic() + seconds
        self._has_begun = False
        self._lock = Lock()
        self._chunks = self._random_chunks(regions, read_bytes)

    def run(self) -> None:
        """Raises OSError, CheckpointError."""
        buffer = BounceBuffer()
        while (chunk := self._next()) is not None:
            file = self._files[chunk.file]
            count = file.read_direct(chunk, buffer)
            if count == 0:  # no O_DIRECT here: what the page cache has of it would be no reading
                file.forget(chunk)
                count = file.read_cached(chunk)
            if count == 0:
                raise CheckpointError(f"{chunk.file}: became shorter while it was read")
            with self._lock:
                self.num_bytes += count

    def stop(self) -> None:
        self._has_begun = True
        self._end = 0.0

    def _next(self) -> Chunk | None:
        with self._lock:
            is_over = self._has_begun and time.monotonic() >= self._end
            self._has_begun = True
            return None if is_over else next(self._chunks)

    def _random_chunks(self, regions: list[Region], read_bytes: int) -> Iterator[Chunk]:
        chance = random.Random(0)
        memory = huge_pages(2 * read_bytes)  # two reads overlap where one ends
        sizes = [region.num_bytes for region in regions]
        for number in iter(int, 1):
            (region,) = chance.choices(regions, weights=sizes)
            num_bytes = min(read_bytes, region.num_bytes)
            offset = chance.randint(0, region.num_bytes - num_bytes)
            at = number % 2 * read_bytes
            extent = Extent(region.file, offset, num_bytes)
            yield from chunks_of([(extent, memory[at : at + num_bytes])])
