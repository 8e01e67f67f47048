"""What this operating system and this Python have, of what not all have.

Most are known by their names in Python. `populate` and `page_cache` are numbers of Linux, which
mean something else elsewhere. The last two are habits of Windows that have no name.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """One field each, by the name of the call or flag where there is one."""

    preadv: bool  # reads at an offset into several places
    pread: bool  # reads and writes at an offset
    o_direct: bool  # reads past the page cache, asked for when a file is opened
    f_nocache: bool  # the same, asked for once it is open
    fadvise: bool  # pages of a file can be given back to the system
    page_cache: bool  # the system says which pages of a file it has in memory
    private_maps: bool  # memory and files are mapped with flags
    huge_pages: bool
    populate: bool  # pages of a mapped file can be made present: a failing disk is an error then
    folder_sync: bool  # names of files can be forced to the disk
    affinity: bool  # cores for this process alone
    pthread_kill: bool  # a signal for one thread
    sessions: bool  # a process can be started that no terminal sends signals to
    own_symbols: bool  # C functions of this process can be looked up by name
    timevals: bool  # timeouts of sockets are structs of seconds and microseconds


@cache
def found() -> Features:
    """The features of this system. Tests replace this function to switch some of them off."""
    is_linux = sys.platform == "linux"
    return Features(
        preadv=hasattr(os, "preadv"),
        pread=hasattr(os, "pread") and hasattr(os, "pwrite"),
        o_direct=hasattr(os, "O_DIRECT"),
        f_nocache=_has("fcntl", "F_NOCACHE"),
        fadvise=hasattr(os, "posix_fadvise"),
        page_cache=is_linux and hasattr(os, "RWF_NOWAIT"),
        private_maps=hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS"),
        huge_pages=hasattr(mmap, "MADV_HUGEPAGE"),
        populate=is_linux,
        folder_sync=hasattr(os, "O_DIRECTORY"),
        affinity=hasattr(os, "sched_setaffinity"),
        pthread_kill=hasattr(signal, "pthread_kill"),
        sessions=hasattr(os, "setsid"),
        own_symbols=os.name == "posix",
        timevals=os.name == "posix",
    )


def _has(module: str, name: str) -> bool:
    return find_spec(module) is not None and hasattr(__import__(module), name)
