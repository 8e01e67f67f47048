"""Changes of a file while it is in use: how they are noticed.

FileState      what the file system says of a file. Asked around every read: no bytes are accepted
               that may have been read while the file was written
Fingerprint    what a file was when it was first opened. A file that was changed is read again only
               if it has the same size and the same samples: somebody has put it right. Samples of a
               small file are all of it
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

NUM_SAMPLES = 64  # 6 ms of an SSD's time for each file, once
SAMPLE_BYTES = 4096
WHOLE_BYTES = 32 << 20  # up to here a file is hashed whole, within 60 ms


class FileState(NamedTuple):
    """Size, time and identity of an open file."""

    num_bytes: int
    changed_ns: int
    inode: int


def state_of(descriptor: int) -> FileState:
    """Return the state of an open file now. Raises OSError."""
    found = os.fstat(descriptor)
    return FileState(found.st_size, found.st_mtime_ns, found.st_ino)


class Fingerprint(NamedTuple):
    """A file's size, and a hash of samples from all over it."""

    num_bytes: int
    samples: str

    def difference_from(self, first: Fingerprint) -> str | None:
        """Return in words how the file differs from what it was at first; None if it does not."""
        if self.num_bytes != first.num_bytes:
            return f"it has {self.num_bytes} bytes, and had {first.num_bytes}"
        return None if self == first else "it holds other bytes than before"


def fingerprint_of(num_bytes: int, read: Callable[[int, memoryview], None]) -> Fingerprint:
    """Return the fingerprint of a file of this size; `read` fills memory from an offset on."""
    spacing = max(num_bytes // NUM_SAMPLES // SAMPLE_BYTES, 1) * SAMPLE_BYTES
    sample_bytes = SAMPLE_BYTES if num_bytes > WHOLE_BYTES else spacing
    digest = hashlib.blake2b(digest_size=16)
    for offset in range(0, num_bytes, spacing):
        sample = memoryview(bytearray(min(sample_bytes, num_bytes - offset)))
        read(offset, sample)
        digest.update(sample)
    return Fingerprint(num_bytes, digest.hexdigest())
