"""Chunks of a read. They end at multiples of CHUNK_BYTES of their file, so all but the first begin
at a block. Neighbours in the file are read together, wherever in memory they go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moe_infinity.checkpoint.headers import Extent
from moe_infinity.system.memory import address_of, huge_pages

BLOCK_BYTES = 4096  # file systems ask O_DIRECT reads for multiples of 512, a few for 4096
# How long a demand load may wait for a prefetch: 1 ms. 512 KiB cost a third more CPU time, of
# 2 MiB no gain was seen (9.4 MB experts, 1-8 threads).
CHUNK_BYTES = 1 << 20

Piece = tuple[Extent, memoryview]  # what to read, and where to


@dataclass(slots=True)
class Chunk:
    """Bytes of a file from `offset` on, and where they go, one part after the other."""

    file: Path
    offset: int
    parts: list[memoryview] = field(default_factory=list)
    num_bytes: int = 0

    def append(self, part: memoryview) -> None:
        self.parts.append(part)
        self.num_bytes += part.nbytes

    def parts_from(self, done: int) -> Iterator[memoryview]:
        """The parts without their first `done` bytes."""
        for part in self.parts:
            if done < part.nbytes:
                yield part[done:]
            done = max(done - part.nbytes, 0)

    @property
    def is_aligned(self) -> bool:
        """True if the system can put the bytes where they belong without a copy."""
        return self.offset % BLOCK_BYTES == 0 and all(
            part.nbytes % BLOCK_BYTES == 0 and address_of(part) % BLOCK_BYTES == 0
            for part in self.parts
        )


def chunks_of(pieces: Sequence[Piece]) -> list[Chunk]:
    """Cut reads into chunks, in the order of their files."""
    chunks: list[Chunk] = []
    end_of_last: tuple[Path, int] | None = None
    for extent, destination in sorted(pieces, key=lambda piece: (piece[0].file, piece[0].offset)):
        assert destination.nbytes == extent.num_bytes, (destination.nbytes, extent)
        done = 0
        while done < extent.num_bytes:
            at = extent.offset + done
            if end_of_last != (extent.file, at) or at % CHUNK_BYTES == 0:
                chunks.append(Chunk(extent.file, at))
            end = min(extent.num_bytes, done + CHUNK_BYTES - at % CHUNK_BYTES)
            chunks[-1].append(destination[done:end])
            end_of_last = extent.file, extent.offset + end
            done = end
    return chunks


class BounceBuffer:
    """Aligned memory for one chunk whose destination is not aligned."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(huge_pages(CHUNK_BYTES), np.uint8)

    def first(self, num_bytes: int) -> memoryview:
        return self._bytes[:num_bytes].data

    def copy_to(self, chunk: Chunk, skip: int, count: int) -> int:
        """Copy `count` bytes from `skip` on to the parts of the chunk, and return how many belonged
        there.
        """
        done = 0
        for part in chunk.parts:
            wanted = max(min(part.nbytes, count - done), 0)
            start = skip + done
            # numpy lets other threads run meanwhile, an assignment to the memoryview does not
            np.frombuffer(part, np.uint8)[:wanted] = self._bytes[start : start + wanted]
            done += wanted
        return done
