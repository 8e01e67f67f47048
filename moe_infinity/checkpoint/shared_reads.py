"""Reads of several experts that the read threads do together: whoever is free takes the next chunk,
in machine code (kernels/cpu/chunk_reads.py). What goes wrong there, a reader reads again by itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock

from moe_infinity.checkpoint.files import BounceBuffer, Copy, OpenFile, Piece
from moe_infinity.kernels.cpu.chunk_reads import (
    FAILED,
    GROUP_SIZE,
    HEADER,
    IS_STOPPED,
    NUM_CHUNKS,
    ROW_SIZE,
    ChunkRow,
    read_group,
)
from moe_infinity.system.memory import address_of

SharedFile = tuple[OpenFile, tuple[int, int]]  # with the descriptors to read


class SharedRead:
    """One read of several experts. Each has a future, which tells how its part ended."""

    def __init__(
        self,
        # The chunks of each, and where its slot is: asked for when the slot is about to be filled.
        experts: Sequence[tuple[Sequence[Copy], Callable[[], memoryview]]],
        files: Mapping[Path, SharedFile],  # of all chunks
        *,
        read: Callable[[Sequence[Piece]], None],  # by this thread alone; raises CheckpointError
        urgently: Callable[[], AbstractContextManager[None]],  # inside, reads ahead wait
        bounce_buffer: Callable[[], BounceBuffer],  # of this thread
    ) -> None:
        self._experts = experts
        self._files = files
        self._read = read
        self._urgently = urgently
        self._bounce_buffer = bounce_buffer
        self.futures: list[Future[None]] = [Future() for _ in experts]
        self._lock = Lock()
        self._num_inside = 0
        self._slots: list[memoryview] = []
        self._is_begun = False
        num_chunks = sum(len(chunks) for chunks, _ in experts)
        self._table = array("q", bytes(8 * HEADER))
        self._table[NUM_CHUNKS] = num_chunks
        self._first_number = HEADER + ROW_SIZE * num_chunks

    @property
    def num_chunks(self) -> int:
        return self._table[NUM_CHUNKS]

    def work(self) -> None:
        """Take part, in one of several threads, until no chunk is left to take."""
        scratch = self._bounce_buffer().address
        with self._lock:
            self._num_inside += 1
            if not self._is_begun:
                self._is_begun = True
                self._begin()
        table = self._table.buffer_info()[0]
        with self._urgently():
            while (index := read_group(table, scratch)) >= 0:
                self._end(index)
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and self._table[IS_STOPPED]:
                for future in self.futures:
                    if not future.done():
                        future.set_exception(CancelledError())

    def _begin(self) -> None:
        """Write down what there is to read. From here on no future can be cancelled."""
        for future in self.futures:
            future.set_running_or_notify_cancel()
        try:
            self._slots = [slot() for _, slot in self._experts]
        except BaseException as error:
            self._table[NUM_CHUNKS] = 0
            for future in self.futures:
                future.set_exception(error)
            return
        for index, (chunks, _) in enumerate(self._experts):
            address = address_of(self._slots[index])
            for extent, at in chunks:
                _, (cached, direct) = self._files[extent.file]
                row = ChunkRow(cached, direct, extent.offset, extent.num_bytes, address + at, index)
                self._table.extend(row)
        for chunks, _ in self._experts:
            self._table.extend((len(chunks), 0))

    def _end(self, index: int) -> None:
        """Tell how the read of an expert ended, all of whose chunks were taken."""
        chunks, _ = self._experts[index]
        num_failed = self._table[self._first_number + GROUP_SIZE * index + FAILED]
        try:
            files = {self._files[extent.file][0] for extent, _ in chunks}
            if num_failed or not all(file.is_unchanged() for file in files):
                slot = self._slots[index]
                self._read([(extent, slot[at : at + extent.num_bytes]) for extent, at in chunks])
        except BaseException as error:
            self.futures[index].set_exception(error)
        else:
            self.futures[index].set_result(None)

    def stop(self) -> None:
        """Let threads take no more chunks; experts that are not read by then are cancelled."""
        self._table[IS_STOPPED] = 1
