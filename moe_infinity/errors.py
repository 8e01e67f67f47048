"""Every error this library raises on purpose. A message says what was found, what was expected and
what to change.

    MoEInfinityError
    ├── ConfigError            an option or a budget the user can correct  (also a ValueError)
    ├── CheckpointError        a file that is missing, truncated or lying  (also an OSError)
    ├── DownloadError          a hub that does not give, a disk that does not take (an OSError)
    ├── UnsupportedModelError  a model this library cannot serve           (also a ValueError)
    ├── TraceError             a trace that cannot be written or read      (also an OSError)
    ├── OutputError            a picture, page or prefix not written       (also an OSError)
    ├── LoadTimeout            an expert did not arrive in bounded time    (also a TimeoutError)
    ├── HostLost               another host is gone, silent or not ours   (also a ConnectionError)
    ├── OutOfMemory            the device has no room for a cache or for activations (a MemoryError)
    ├── OutOfSlots             every slot is held or loading
    ├── Cancelled              nobody waits any more for what was to be generated
    └── ClosedError            the model was used after close()
"""

from moe_infinity.printable import printable_lines


class MoEInfinityError(Exception):
    """Base of all errors of this library. Messages name what is in files, which may be anything."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigError(MoEInfinityError, ValueError):
    """An option or a budget that the user can correct."""


class CheckpointError(MoEInfinityError, OSError):
    """A checkpoint file is missing, truncated, unreadable, or not what its header says."""


class DownloadError(MoEInfinityError, OSError):
    """A model was not downloaded, or not all of it. What came is kept for the next try."""


class UnsupportedModelError(MoEInfinityError, ValueError):
    """The checkpoint is of a kind this library cannot serve."""


class TraceError(MoEInfinityError, OSError):
    """A trace could not be written or read; no partial file is left behind."""


class OutputError(MoEInfinityError, OSError):
    """A picture, a page or a prefix could not be written; no partial file is left behind."""


class LoadTimeout(MoEInfinityError, TimeoutError):
    """An expert did not arrive within the bound every wait has."""


class HostLost(MoEInfinityError, ConnectionError):
    """Another host is gone, does not answer, or is not one of ours."""


class OutOfMemory(MoEInfinityError, MemoryError):
    """The device has no room left for what a forward pass needs beside the experts."""


class OutOfSlots(MoEInfinityError):
    """Every slot is held or loading, so nothing can be evicted."""


class Cancelled(MoEInfinityError):
    """Nobody waits any more for what was to be generated."""


class ClosedError(MoEInfinityError):
    """The model was used after `close()`."""
