"""Memory that the threads of a program share, and who touched it; for ptx.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[Any]


class Memory:
    """Bytes, and which warps touched each since the last barrier: a bit for each."""

    def __init__(self, content: NDArray[np.uint8], start: int) -> None:
        self.content, self.start = content, start
        self.forget()

    def forget(self) -> None:
        self.read_by, self.written_by, self.added_by = np.zeros((3, len(self.content)), np.uint32)

    def at(self, address: Lanes, warp: Lanes, num_bytes: int, *, writes: bool) -> Lanes:
        """[lanes, num_bytes] of places, which are noted as touched."""
        place = (address - self.start)[:, None] + np.arange(num_bytes)
        one = np.broadcast_to((1 << warp).astype(np.uint32)[:, None], place.shape)
        others = self.written_by[place] | self.added_by[place]
        if writes:
            others |= self.read_by[place]
        if (others & ~one).any():
            raise RaceError("two warps at one address, and one writes, without a barrier")
        np.bitwise_or.at(self.written_by if writes else self.read_by, place, one)
        return place

    def note_sum(self, address: Lanes, warp: Lanes) -> None:
        """Words that several warps may add to at once, but not write or read meanwhile."""
        place = (address - self.start)[:, None] + np.arange(4)
        one = np.broadcast_to((1 << warp).astype(np.uint32)[:, None], place.shape)
        if ((self.written_by[place] | self.read_by[place]) & ~one).any():
            raise RaceError("a warp adds to what another one writes or reads, without a barrier")
        np.bitwise_or.at(self.added_by, place, one)

    def put(self, place: Lanes, numbers: Lanes, warp: Lanes) -> None:
        """Threads that hold the same element all write it. Of those of a warp one is kept: a sum
        across threads begins with a product that each of them rounds but its own.
        """
        given = numbers.view(np.uint8).reshape(place.shape)
        self.content[place] = given
        is_lost = self.content[place] != given
        if not is_lost.any():
            return
        last = np.zeros(len(self.content), np.int64)
        last[place] = warp[:, None]
        if (is_lost & (last[place] != warp[:, None])).any():
            raise RaceError("different numbers from two warps to one address")


class RaceError(AssertionError):
    """What a GPU may do in either order."""
