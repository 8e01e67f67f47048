"""Ctrl-C, yielding a core, and timeouts of sockets."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import struct
from functools import cache
from threading import main_thread

from moe_infinity.system import linux


def interrupt_main() -> None:
    """Interrupt the main thread as Ctrl-C does, from any thread. On Linux this also ends a wait for
    the system.
    """
    thread = main_thread().ident
    if linux.is_linux() and thread is not None:
        signal.pthread_kill(thread, signal.SIGINT)
    else:
        _thread.interrupt_main()


@cache
def yield_address() -> int:
    """The address of the C function that yields a core to other threads; 0: none is known."""
    if not linux.is_linux():
        return 0
    function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0


def socket_timeout(seconds: float) -> bytes:
    """The value of the options SO_RCVTIMEO and SO_SNDTIMEO. 0: none."""
    if os.name == "nt":
        return struct.pack("L", round(seconds * 1e3))  # milliseconds
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))
