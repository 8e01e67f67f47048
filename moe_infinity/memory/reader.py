"""Positional reads from checkpoint files, straight into the memory that wants the bytes.

Safe to call from several threads: no file position is shared. A short read, an I/O error or a file
that vanished is a CheckpointError that names file and offset; the reader stays usable.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from moe_infinity.errors import CheckpointError
from moe_infinity.memory.extents import Extent


class Reader:
    """Keeps one descriptor per file open, from its first read until `close`."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._outdated: list[int] = []  # closed last: another thread may be reading from them
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read_into(self, extent: Extent, destination: memoryview) -> None:
        """Fill `destination` (bytes, as long as the extent). Raises CheckpointError."""
        assert destination.nbytes == extent.num_bytes, (destination.nbytes, extent)
        done = 0
        try:
            descriptor = self._descriptor(extent.file)
            while done < extent.num_bytes:
                count = os.preadv(descriptor, [destination[done:]], extent.offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{extent.file}: ends at byte {extent.offset + done}, "
                        f"{extent.num_bytes - done} more expected: was it changed while in use?"
                    )
                done += count
        except OSError as error:
            self._open_anew(extent.file)
            if isinstance(error, CheckpointError):
                raise
            where = f"{extent.file}: cannot be read at byte {extent.offset + done}"
            raise CheckpointError(f"{where}: {error.strerror or error}") from error
        with self._lock:
            self.bytes_read += extent.num_bytes

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def _open_anew(self, file: Path) -> None:
        """After an error: the file may be replaced by a whole one of its name."""
        with self._lock:
            if file in self._descriptors:
                self._outdated.append(self._descriptors.pop(file))

    def close(self) -> None:
        """Close all files. A later read opens its file anew."""
        with self._lock:
            for descriptor in (*self._descriptors.values(), *self._outdated):
                os.close(descriptor)
            self._descriptors.clear()
            self._outdated.clear()
