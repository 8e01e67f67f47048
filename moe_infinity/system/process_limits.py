"""Limits that Linux sets to a process. Elsewhere none is known, and none is set."""

from __future__ import annotations

from pathlib import Path

from moe_infinity.system import linux

OWN_PAGES = Path("/proc/self/statm")
OWN_FILES = Path("/proc/self/fd")


def lockable_bytes() -> int | None:
    """Return how many bytes of memory this process may lock; None: no limit that is known."""
    if not linux.is_linux():
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def openable_files() -> int | None:
    """Return how many more files this process may open; None: no limit that is known."""
    if not linux.is_linux():
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit - len(list(OWN_FILES.iterdir()))


def limit_memory(more_bytes: int) -> None:
    """Let this process have so many bytes of address space beyond what it has. Raises OSError."""
    if not linux.is_linux():
        return
    import resource

    had = int(OWN_PAGES.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (had + more_bytes, resource.RLIM_INFINITY))


def limit_time(more_seconds: float) -> None:
    """Let this process use a core for so many more seconds; then it is ended. Raises OSError."""
    if not linux.is_linux():
        return
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    most = int(usage.ru_utime + usage.ru_stime + more_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
