"""A guard for mapped files: a look at bytes that are gone does not end the process.

A file that is shortened, or whose disk fails, leaves pages of its mapping without bytes. The system
tells whoever looks at them by SIGBUS, in the middle of machine code. The handler here, machine code
itself, puts zeros there and counts: the look goes on, and the code that started the work sees by
the count that its results are worth nothing. Elsewhere than in guarded memory, the signal does what
it did before.

Private names of numba used here: `types.ExternalFunction`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Lock
from typing import Any

from numba import types

from moe_infinity.kernels.cpu.compiler import c_function
from moe_infinity.kernels.cpu.vectors import words_at
from moe_infinity.system import linux

MOST_RANGES = 1024
COUNT = 0  # where the table has how often it happened
FIRST = 2  # ... and from where on it has where each range begins and ends
SI_ADDR = 2  # the word of siginfo_t that has the address, on systems of 64 bits

map_memory = types.ExternalFunction(
    "mmap",
    types.intp(types.intp, types.intp, types.int32, types.int32, types.int32, types.intp),
)
set_action = types.ExternalFunction("sigaction", types.int32(types.int32, types.intp, types.intp))


class BusErrors:
    """The guarded ranges of this process, and how often bytes of one were gone."""

    def __init__(self) -> None:
        self._table = (ctypes.c_int64 * (FIRST + 2 * MOST_RANGES))()
        self._free = list(range(FIRST, len(self._table), 2))[::-1]
        self._stock = linux.SignalAction()  # what the signal did before
        self._handler: Any = None
        self._lock = Lock()

    @property
    def count(self) -> int:
        """How often bytes were gone so far."""
        return self._table[COUNT]

    def guard(self, address: int, num_bytes: int) -> Callable[[], None]:
        """Guard memory, and return what ends that. Raises OSError."""
        with self._lock:
            if not self._free:
                raise OSError("too many files are mapped")
            if self._handler is None:
                table = ctypes.addressof(self._table)
                self._handler = _handler(table, ctypes.addressof(self._stock))
                linux.handle_bus_errors(self._handler.address, self._stock)
            at = self._free.pop()
            self._table[at + 1] = address + num_bytes
            self._table[at] = address

        def end() -> None:
            self._table[at] = self._table[at + 1] = 0
            self._free.append(at)

        return end


def _handler(table: int, stock: int) -> Any:
    """Compile the handler. It calls nothing that waits for another thread."""
    page_mask = -linux.PAGE_BYTES
    last = FIRST + 2 * MOST_RANGES
    protection = linux.READ_AND_WRITE
    flags = linux.ZEROS_IN_PLACE

    @c_function(
        types.void(types.int32, types.CPointer(types.int64), types.voidptr),
        "bus_error_handler",
        is_kept=False,
    )
    def handle(number, info, context):  # type: ignore[no-untyped-def]
        words = words_at(table)
        address = info[SI_ADDR]
        for at in range(FIRST, last, 2):
            if words[at] <= address < words[at + 1]:
                page = address & page_mask
                if map_memory(page, words[at + 1] - page, protection, flags, -1, 0) != page:
                    break  # there is no memory for it
                words[COUNT] += 1
                return
        set_action(number, stock, 0)  # the next try does what it did before

    return handle


bus_errors = BusErrors()
