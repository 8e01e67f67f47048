"""Ctrl-C, processes of their own, what threads and sockets are told."""

from __future__ import annotations

import _thread
import ctypes
import signal
import struct
import subprocess
from functools import cache
from threading import main_thread
from typing import Any

from moe_infinity.system import features


def interrupt_main() -> None:
    """As Ctrl-C does, from any thread; where a thread can be sent a signal, a wait for the system
    ends, too.
    """
    thread = main_thread().ident
    if features.found().pthread_kill and thread is not None:
        signal.pthread_kill(thread, signal.SIGINT)
    else:
        _thread.interrupt_main()


def without_ctrl_c() -> dict[str, Any]:
    """What Popen is told for a process that Ctrl-C on this terminal does not reach."""
    if features.found().sessions:
        return {"start_new_session": True}
    return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}


@cache
def yield_address() -> int:
    """Address of the system's function that yields a core to other threads; 0: none is known."""
    if not features.found().own_symbols:
        return 0
    function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0


def socket_timeout(seconds: float) -> bytes:
    """The value of the options SO_RCVTIMEO and SO_SNDTIMEO. 0: none."""
    if not features.found().timevals:
        return struct.pack("L", round(seconds * 1e3))  # milliseconds
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))
